"""Uploaded files: a row in the database, the bytes in the object store."""

import errno
import re
import secrets
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError
from sqlalchemy import func, or_, select, tuple_
from sqlalchemy.orm import Session

from store import artifacts
from store.errors import ConflictError, InvalidRequestError, NotFoundError
from store.models import File, Job
from store.pages import Page, read_page
from store.status import JobStatus
from training.errors import StorageError

PURPOSE = "fine-tune"
OTHER_PURPOSES = (
    *("assistants", "assistants_output", "batch", "batch_output"),
    *("evals", "fine-tune-results", "user_data", "vision"),
)
"""Purposes of the OpenAI API that are refused by name."""
MAX_NAME_CHARACTERS = 255


def check_purpose(purpose: str) -> None:
    if purpose in OTHER_PURPOSES:
        message = f'purpose: "{purpose}" is not offered; files are for training here: "{PURPOSE}"'
        raise InvalidRequestError(message, param="purpose", code="not_offered")
    if purpose != PURPOSE:
        raise InvalidRequestError(f'purpose: "{purpose[:80]}" is not "{PURPOSE}"', param="purpose")


def clean_filename(name: str) -> str:
    """A client's name for a file, fit to be shown: no folders, no control characters. It never names anything here."""
    shown = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "", re.split(r"[/\\]", name)[-1]).strip()
    return shown[:MAX_NAME_CHARACTERS] or "file"


def create_file(
    session: Session,
    project_id: str,
    path: Path,
    *,
    filename: str,
    purpose: str,
    size_bytes: int,
    sha256: str,
    report: dict[str, Any],
) -> File:
    """Store the bytes at `path`, then the row that makes them a file. Give it a fresh session: then no transaction is
    open while the bytes travel."""
    check_purpose(purpose)
    file_id = f"file-{secrets.token_hex(12)}"
    file = File(
        id=file_id,
        project_id=project_id,
        filename=clean_filename(filename),
        purpose=purpose,
        bytes=size_bytes,
        sha256=sha256,
        object_key=f"files/{file_id}",
        report=report,
    )
    _put(file.object_key, path)
    try:
        session.add(file)
        session.flush()
    except Exception:
        artifacts.delete(file.object_key)
        raise
    return file


def get_file(session: Session, project_id: str, file_id: str) -> File:
    file = session.scalar(select(File).where(File.id == file_id, File.project_id == project_id))
    if file is None:
        raise _not_found(file_id)
    return file


def list_files(
    session: Session,
    project_id: str,
    *,
    after: str | None,
    limit: int,
    newest_first: bool = True,
    purpose: str | None = None,
) -> Page[File]:
    place = tuple_(File.created_at, File.id)
    query = select(File).where(File.project_id == project_id)
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    if after is not None:
        cursor = session.scalar(select(File).where(File.id == after, File.project_id == project_id))
        if cursor is None:
            raise InvalidRequestError(f"after: no file {after!r}", param="after")
        last = (cursor.created_at, cursor.id)
        query = query.where(place < last if newest_first else place > last)
    columns = (File.created_at, File.id)
    return read_page(session, query.order_by(*(column.desc() if newest_first else column for column in columns)), limit)


def delete_file(session: Session, project_id: str, file_id: str) -> str:
    """Delete the row and return the key of the bytes, which go by `delete_bytes` once the deletion is committed.

    Raises:
        NotFoundError: no such file; also for all but one of several that delete it at once.
        ConflictError: a job that has not ended uses it.
    """
    # Locked first: a job that is being made holds the same row until it is committed.
    query = select(File).where(File.id == file_id, File.project_id == project_id).with_for_update()
    file = session.scalar(query)
    if file is None:
        raise _not_found(file_id)
    ended = [status for status in JobStatus if status.is_final]
    uses = or_(Job.training_file == file_id, Job.validation_file == file_id)
    user = session.scalar(select(func.min(Job.id)).where(Job.project_id == project_id, uses, Job.status.not_in(ended)))
    if user is not None:
        raise ConflictError(f"{file_id} is used by {user}, which has not ended; cancel it first", code="file_in_use")
    session.delete(file)
    return file.object_key


def delete_bytes(object_key: str) -> None:
    artifacts.delete(object_key)


def _put(object_key: str, path: Path) -> None:
    try:
        artifacts.put_file(object_key, path)
    except BaseError as bad:
        if f"os error {errno.ENOSPC}" in str(bad):
            raise StorageError("the disk of the object store is full; its operator has to make room") from bad
        raise


def _not_found(file_id: str) -> NotFoundError:
    return NotFoundError(f"no file {file_id!r}", code="file_not_found")
