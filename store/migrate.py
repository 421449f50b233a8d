"""Brings the database to the newest schema: `python -m store.migrate`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.autogenerate import produce_migrations
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, NullPool, create_engine, text

import migrations
from store.models import Base
from store.session import sqlalchemy_url
from store.settings import get_settings

_LOCK = 7_206_001
"""Advisory lock: two processes that start at once migrate one after the other."""


def make_config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    return config


def upgrade(database_url: str, revision: str = "head") -> None:
    with _transaction(database_url) as connection:
        command.upgrade(make_config(connection), revision)


def downgrade(database_url: str, revision: str = "base") -> None:
    with _transaction(database_url) as connection:
        command.downgrade(make_config(connection), revision)


def list_differences(connection: Connection) -> list[str]:
    """What the tables lack against the models; empty where they agree."""
    context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
    found = produce_migrations(context, Base.metadata).upgrade_ops
    return [str(diff) for diff in found.as_diffs()] if found is not None else []


@contextmanager
def _transaction(database_url: str) -> Iterator[Connection]:
    with create_engine(sqlalchemy_url(database_url), poolclass=NullPool).begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": _LOCK})
        yield connection


if __name__ == "__main__":
    upgrade(get_settings().database_url)
