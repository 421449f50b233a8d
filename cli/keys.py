"""`burnish keys`: the keys of the service, made and revoked by whoever can reach its database."""

import contextlib
import os
from collections.abc import Iterator

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from cli.embedded import find_running_postgres
from cli.errors import SetupError
from store.keys import FIRST_PROJECT, list_keys, make_key, revoke_key
from store.models import Project
from store.session import open_session
from store.settings import get_settings
from training.jsonlines import printable


def create_key(name: str) -> str:
    """A new key; its text cannot be read again."""
    with _open() as session:
        project_id = session.scalar(select(Project.id).where(Project.name == FIRST_PROJECT))
        if project_id is None:
            raise SetupError("this database has no project yet; the first `burnish up` makes one")
        return make_key(session, project_id, name)


def describe_keys() -> list[str]:
    with _open() as session:
        return [
            f"{key.id}  {'revoked' if key.revoked_at else 'valid  '}  {printable(key.name)}"
            for key in list_keys(session)
        ]


def revoke(id_or_key: str) -> str:
    """The id of the key, which is refused from now on."""
    with _open() as session:
        return revoke_key(session, id_or_key).id


@contextlib.contextmanager
def _open() -> Iterator[Session]:
    """A transaction on the database that is named, else on that of an `up` that runs with this data folder."""
    settings = get_settings()
    if not settings.database_url:
        folder = settings.data_dir.resolve() / "postgres"
        url = find_running_postgres(folder)
        if url is None:
            raise SetupError(
                f"no database runs in {folder}: start `burnish up` first, or name one with BURNISH_DATABASE_URL"
            )
        os.environ["BURNISH_DATABASE_URL"] = url
        get_settings.cache_clear()
    try:
        with open_session() as session:
            yield session
    except SQLAlchemyError as bad:
        raise SetupError(f"the database: {str(bad).splitlines()[0]}") from bad
