"""Real servers for all tests: one PostgreSQL and one Valkey a session, in a temporary folder, ended with it."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from cli.embedded import embedded_postgres, embedded_valkey
from store import artifacts, queue, session, settings
from store.migrate import upgrade
from store.models import Base

_broker_numbers = itertools.count(1)

# Tests share two cores with each other and with trainers: one thread each is fastest for models this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Servers:
    postgres_url: str
    valkey_url: str

    def make_broker(self) -> str:
        """A URL of the session's broker with a database of its own."""
        return self.valkey_url.removesuffix("/0") + f"/{next(_broker_numbers)}"

    def make_database(self, name: str) -> str:
        """A new, empty database on the session's server."""
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.postgres_url.replace("/postgres?", f"/{name}?")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    with (
        embedded_postgres(folder / "postgres", durable=False) as postgres,
        embedded_valkey(folder / "valkey") as valkey,
    ):
        yield Servers(postgres, valkey)


@pytest.fixture(scope="session")
def migrated_url(servers: Servers) -> str:
    url = servers.make_database("store_tests")
    upgrade(url)
    return url


@pytest.fixture
def database(
    migrated_url: str, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[settings.Settings]:
    """An empty, migrated database, and this process's settings pointing to it."""
    monkeypatch.setenv("BURNISH_DATABASE_URL", migrated_url)
    monkeypatch.setenv("BURNISH_BROKER_URL", servers.valkey_url)
    monkeypatch.setenv("BURNISH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("BURNISH_HOST_NAME", "alpha")
    cached = (settings.get_settings, session.get_engine, queue.get_celery, artifacts.get_object_store)
    for function in cached:
        function.cache_clear()
    # A request of the test before may just be reading its own settings, and would leave them in the cache.
    while settings.get_settings().data_dir != tmp_path / "data":
        settings.get_settings.cache_clear()
    with session.open_session() as opened:
        for table in reversed(Base.metadata.sorted_tables):
            opened.execute(table.delete())
    yield settings.get_settings()
    session.get_engine().dispose()
    for function in cached:
        function.cache_clear()
