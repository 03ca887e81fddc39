"""Autogenerate in a project's own alembic tree leaves the outbox tables alone; so does the version table's name."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import produce_migrations
from alembic.operations.ops import DropTableOp, ModifyTableOps
from alembic.runtime.migration import MigrationContext
from alembic.runtime.plugins import Plugin
from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, inspect, text
from sqlalchemy.engine import make_url

import outbox.alembic
from outbox.migrate import schema_upgrade, upgrade
from outbox.store.database import open_engine
from tests.fixtures.databases import Database

ROOT = Path(__file__).parents[2]
PLUGIN = "alembic.autogenerate.outbox"
WITHOUT_PLUGIN = ["alembic.autogenerate.*", f"~{PLUGIN}"]
STALE = ["message", "outbox_archive", "order_head"]
"""Tables of the project's own that its metadata has no more; their names are no protection."""


@pytest.fixture(autouse=True)
def plugin() -> None:
    """As alembic registers it by the entry point, where the installation is older than that."""
    with contextlib.suppress(ValueError):
        Plugin.setup_plugin_from_module(outbox.alembic, PLUGIN)


def removals(database: Database, **options: Any) -> list[str]:
    """Upgrade the outbox tables, then autogenerate for a project that knows nothing of them: the tables touched."""
    engine = open_engine(database.url)
    tables = 1 if database.name == "sqlite" else 2
    try:
        upgrade(engine, schema=database.schema, tables=tables)
        with engine.begin() as connection:
            _project_tables(connection)
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=_options(connection, database, options))
            found = produce_migrations(context, MetaData()).upgrade_ops
            assert found is not None
            return sorted(_touched(one) for one in found.ops)
    finally:
        engine.dispose()


def _touched(operation: object) -> str:
    assert isinstance(operation, DropTableOp | ModifyTableOps)
    return operation.table_name


def _project_tables(connection: Connection) -> None:
    metadata = MetaData()
    for name in STALE if connection.dialect.name != "sqlite" else ["message", "order_head"]:
        Table(name, metadata, Column("id", Integer, primary_key=True), Column("note", String(10)))
    metadata.create_all(connection)


def _options(connection: Connection, database: Database, options: dict[str, Any]) -> dict[str, Any]:
    schemas = {None, database.schema, make_url(database.url).database}
    return {
        "include_schemas": True,
        "include_name": lambda name, kind, _parents: kind != "schema" or name in schemas,
        **options,
    }


def project_tables_of(database: Database) -> list[str]:
    return sorted(["message", "order_head"] if database.name == "sqlite" else STALE)


def test_naive_autogenerate_drops_the_outbox_tables(database: Database) -> None:
    found = removals(database, autogenerate_plugins=WITHOUT_PLUGIN)

    assert len(set(found)) >= len(project_tables_of(database)) + 7


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="by-the-plugin"),
        pytest.param(
            {"autogenerate_plugins": WITHOUT_PLUGIN, "include_object": outbox.alembic.include_object}, id="by-the-line"
        ),
    ],
)
def test_autogenerate_touches_no_outbox_table_and_drops_what_is_the_projects_own(
    database: Database, options: dict[str, Callable[..., bool]]
) -> None:
    assert removals(database, **options) == project_tables_of(database)


def test_alembic_finds_the_plugin_by_its_entry_point() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["alembic.plugins"]

    assert declared == {PLUGIN: outbox.alembic.__name__}


def test_the_outbox_lives_beside_the_version_table_of_the_projects_own_tree(mysql_like: Database) -> None:
    schema = make_url(mysql_like.url).database
    engine = open_engine(mysql_like.url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('shop7')"))

    reached = upgrade(engine, schema=schema)

    with engine.connect() as connection:
        assert reached == schema_upgrade.head() == schema_upgrade.current(connection, schema=schema)
        assert connection.scalars(text("SELECT version_num FROM alembic_version")).all() == ["shop7"]
        assert outbox.alembic.VERSION_TABLE in inspect(connection).get_table_names()
    engine.dispose()
