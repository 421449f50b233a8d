"""The schema in the migrations and the one in the models are the same, in both directions."""

from alembic.script import ScriptDirectory
from sqlalchemy import Column, Text, create_engine, inspect

from store.migrate import downgrade, list_differences, make_config, upgrade
from store.models import Base, Host
from store.session import sqlalchemy_url
from tests.conftest import Servers


def test_the_migrations_lead_from_nothing_to_the_models_and_back(servers: Servers) -> None:
    url = servers.make_database("migrations")
    upgrade(url)
    engine = create_engine(sqlalchemy_url(url))
    with engine.connect() as connection:
        assert list_differences(connection) == []
    downgrade(url)
    assert inspect(engine).get_table_names() == ["alembic_version"]
    upgrade(url)
    assert set(inspect(engine).get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    engine.dispose()


def test_a_column_that_no_migration_makes_is_found(migrated_url: str) -> None:
    table = Host.__table__
    column: Column[str] = Column("forgotten", Text())
    table.append_column(column)  # type: ignore[attr-defined]
    engine = create_engine(sqlalchemy_url(migrated_url))
    try:
        with engine.connect() as connection:
            differences = list_differences(connection)
    finally:
        table._columns.remove(column)  # type: ignore[attr-defined]
        engine.dispose()
    assert len(differences) == 1
    assert "forgotten" in differences[0]


def test_there_is_one_head(migrated_url: str) -> None:
    with create_engine(sqlalchemy_url(migrated_url)).connect() as connection:
        script = ScriptDirectory.from_config(make_config(connection))
    assert len(script.get_heads()) == 1


def test_two_processes_may_migrate_at_once(servers: Servers) -> None:
    from concurrent.futures import ThreadPoolExecutor

    url = servers.make_database("at_once")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: upgrade(url), range(2))) == [None, None]
