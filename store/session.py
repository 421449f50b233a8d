"""The database connection of this process and its transactions."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from store.errors import SettingError
from store.settings import get_settings

AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeoutError)
"""What a database that is away raises."""


def sqlalchemy_url(url: str) -> str:
    """The operator's `postgresql://` URL in the form that names our driver."""
    scheme, found, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg") or not found:
        shown = url.split("@")[-1]
        raise SettingError(f"BURNISH_DATABASE_URL has to begin with postgresql://, got {shown!r}")
    return f"postgresql+psycopg://{rest}"


def storable(text: str) -> str:
    """Text as PostgreSQL takes it: no NUL, no half of a surrogate pair, both shown as escapes."""
    return text.replace("\0", "\\u0000").encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def get_engine() -> Engine:
    # Every statement is short here; one that is not is stuck, and must not hold a worker or a request for ever.
    return create_engine(
        sqlalchemy_url(get_settings().database_url),
        json_serializer=_to_json,
        pool_pre_ping=True,
        pool_size=10,
        max_overflow=30,
        pool_timeout=10,
        connect_args={
            "connect_timeout": 5,
            "options": "-c statement_timeout=30s -c lock_timeout=15s -c idle_in_transaction_session_timeout=60s",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        },
    )


@contextmanager
def open_session() -> Iterator[Session]:
    """One transaction: committed at the end of the block, rolled back when it raises."""
    with Session(get_engine(), expire_on_commit=False) as session, session.begin():
        yield session


def _to_json(value: Any) -> str:
    """JSON for a JSONB column, which refuses a NUL and half a surrogate pair in its texts."""
    text = json.dumps(value, allow_nan=False)
    if "\\u0000" in text or "\\ud" in text:
        text = json.dumps(_storable_json(value), allow_nan=False)
    return text


def _storable_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {storable(name): _storable_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable_json(item) for item in value]
    return storable(value) if isinstance(value, str) else value


def ping_database() -> None:
    """Raises when the database does not answer."""
    with open_session() as session:
        session.execute(text("SELECT 1"))
