"""Writes schema_mysql.sql and schema_sqlite.sql, the outbox tables at head as these databases show them.

Run as `python -m tests.golden.make_schema URL` with the URL of an empty database on MySQL, or on SQLite. Not for each
new revision: the files stay at the revision of the first release, from which the tests upgrade.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, inspect

from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import open_engine
from outbox.store.schema import outbox_tables
from outbox.store.table_placement import table_place
from outbox_core.common.table_place import VERSION_TABLE, TablePlace

FOLDER: Final = Path(__file__).parent
BETWEEN: Final = ";\n\n"
SCHEMA: Final = "outbox"


def statements(connection: Connection, place: TablePlace) -> list[str]:
    """The statements that make the tables, as the database shows them."""
    names = [one.name for one in outbox_tables(place).metadata.sorted_tables]
    if place.schema is None:
        shown = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC, name"
        return [sql for (sql,) in connection.exec_driver_sql(shown)]
    quote = connection.dialect.identifier_preparer.quote
    return [
        connection.exec_driver_sql(f"SHOW CREATE TABLE {quote(place.schema)}.{quote(name)}").one()[1]
        for name in [*names, VERSION_TABLE]
    ]


def main(url: str) -> None:
    """Upgrade the database, and write its statements."""
    engine = open_engine(url)
    try:
        upgrade(engine, schema=SCHEMA)
        with engine.connect() as connection:
            place = table_place(engine.dialect, SCHEMA)
            assert inspect(connection).has_table(VERSION_TABLE, schema=place.schema)
            made = statements(connection, place)
    finally:
        engine.dispose()
    (FOLDER / f"schema_{engine.dialect.name}.sql").write_text(BETWEEN.join(made) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
