"""API keys: `bk-<id>-<secret>`, shown once, found by their public id and kept only as a digest."""

import hashlib
import hmac
import re
import secrets

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from store.errors import InvalidRequestError, NotFoundError
from store.models import ApiKey, Project

SECRET_BYTES = 32
FIRST_PROJECT = "default"
MAX_NAME = 200

_KEY_ID = re.compile(r"[0-9a-f]{16}")
_KEY = re.compile(rf"bk-({_KEY_ID.pattern})-[A-Za-z0-9_-]{{43}}")
_NO_DIGEST = hashlib.sha256(b"").digest()
_LOCK = 7_206_004
"""Advisory lock: of two processes that start at once, one makes the first key."""


def make_key(session: Session, project_id: str, name: str) -> str:
    """A new key of a project. Its text is returned this once and is stored nowhere.

    Raises:
        InvalidRequestError: the name is no short line of text, so a list of keys could not show it.
    """
    if not name.strip() or not name.isprintable() or len(name) > MAX_NAME:
        message = f"name: {name[:80]!r} is not one line of 1 to {MAX_NAME} printable characters"
        raise InvalidRequestError(message, param="name")
    key_id = secrets.token_hex(8)
    text = f"bk-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
    session.add(ApiKey(id=key_id, project_id=project_id, name=name, digest=_digest(text)))
    session.flush()
    return text


def make_first_key(session: Session) -> str | None:
    """The first key of a fresh service, with the project that it opens; None where there is any key already."""
    session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    if session.scalar(select(ApiKey.id).limit(1)) is not None:
        return None
    project_id = session.scalar(select(Project.id).where(Project.name == FIRST_PROJECT))
    if project_id is None:
        project_id = f"proj-{secrets.token_hex(8)}"
        session.add(Project(id=project_id, name=FIRST_PROJECT))
        session.flush()
    return make_key(session, project_id, "first key")


def find_project_of(session: Session, key_text: str) -> str | None:
    """The project that a key opens; None where the key is wrong or revoked, after the same work either way."""
    match = _KEY.fullmatch(key_text)
    key = session.get(ApiKey, match[1] if match else "")
    is_right = hmac.compare_digest(_digest(key_text), _NO_DIGEST if key is None else key.digest)
    return key.project_id if key is not None and is_right and key.revoked_at is None else None


def revoke_key(session: Session, id_or_key: str) -> ApiKey:
    """Refuse a key from now on, given by its id or its whole text. To revoke it again changes nothing.

    Raises:
        NotFoundError: there is no such key.
    """
    whole = _KEY.fullmatch(id_or_key)
    key_id = whole[1] if whole else id_or_key
    if not _KEY_ID.fullmatch(key_id):
        # What was given is not told back: it may be a part of a key.
        message = "no key has such an id: it is 16 characters 0-9 and a-f, between the first two hyphens of the key"
        raise NotFoundError(message, code="key_not_found")
    key = session.get(ApiKey, key_id, with_for_update=True)
    if key is None:
        raise NotFoundError(f"no key {key_id!r} here; `burnish keys list` shows all", code="key_not_found")
    if key.revoked_at is None:
        key.revoked_at = session.scalar(select(func.clock_timestamp()))
    return key


def list_keys(session: Session, project_id: str | None = None) -> list[ApiKey]:
    """Keys of one project, or all, oldest first; revoked ones too."""
    query = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)
    if project_id is not None:
        query = query.where(ApiKey.project_id == project_id)
    return list(session.scalars(query))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
