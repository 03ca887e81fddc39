"""Tables of a given revision, as a database shows them, with rows: they upgrade to head, and every row stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, MetaData, Table, insert, select
from sqlalchemy.schema import CreateSchema

from outbox.migrate.schema_upgrade import current, head, upgrade
from outbox.store.database import open_engine
from outbox.store.schema import OutboxTables, outbox_tables
from outbox_core.common.table_place import VERSION_TABLE, TablePlace
from tests.fixtures.databases import Database
from tests.golden.make_schema import BETWEEN, FOLDER
from tests.migrations.test_migrations import differences

REVISION = "0003"
"""Of the files."""
ROWS: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / "rows.json").read_text())
on_the_shown_kinds = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("mysql", marks=pytest.mark.mysql)], indirect=True
)


def written(name: str) -> list[dict[str, Any]]:
    """The rows of a table as they are in the database: bodies are written in the file as hexadecimal digits."""
    return [{**row, "body": bytes.fromhex(row["body"])} if name == "message" else row for row in ROWS[name]]


def fill(connection: Connection, place: TablePlace) -> None:
    """Make the tables by the statements of the file, and put the rows into them as the tables are."""
    if place.schema is not None:
        connection.execute(CreateSchema(place.schema))
        connection.exec_driver_sql(f"USE {connection.dialect.identifier_preparer.quote(place.schema)}")
    for statement in (FOLDER / f"schema_{connection.dialect.name}.sql").read_text().split(BETWEEN):
        connection.exec_driver_sql(statement)
    found = MetaData(schema=place.schema)
    found.reflect(connection)
    made = {table.name: table for table in found.tables.values()}
    for name in ROWS:
        table = made[table_of(outbox_tables(place), name).name]
        assert set(ROWS[name][0]) == set(table.columns.keys()), name
        connection.execute(insert(table), written(name))
    connection.execute(insert(made[VERSION_TABLE]), [{"version_num": REVISION}])


def table_of(tables: OutboxTables, name: str) -> Table:
    """The table of today that is called so in the file."""
    table = getattr(tables, name)
    assert isinstance(table, Table)
    return table


@pytest.fixture
def schema(engine: Engine, database: Database) -> str | None:
    """The schema of the tables, filled."""
    with engine.begin() as connection:
        fill(connection, database.place)
    return database.schema


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """An engine on the database."""
    engine = open_engine(database.url)
    yield engine
    engine.dispose()


@on_the_shown_kinds
def test_the_tables_upgrade_to_head_with_their_rows(engine: Engine, database: Database, schema: str | None) -> None:
    with engine.connect() as connection:
        assert current(connection, schema=schema) == REVISION

    assert upgrade(engine, schema=schema) == head()

    tables = outbox_tables(database.place)
    with engine.connect() as connection:
        assert differences(connection, database.place) == []
        for name in ROWS:
            table = table_of(tables, name)
            statement = select(*(table.c[column] for column in ROWS[name][0])).order_by(*table.primary_key.columns)
            found = [dict(row) for row in connection.execute(statement).mappings()]
            assert found == written(name), name
