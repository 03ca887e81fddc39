"""The grants that each role needs on MySQL and MariaDB, table by table. Runs none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, assert_never

from sqlalchemy import Connection

from outbox.alembic import is_of_outbox
from outbox.store.schema import OutboxTables, message_table_names, outbox_tables
from outbox.store.table_placement import table_place, tables_in
from outbox_core.common.table_place import VERSION_TABLE, TablePlace

_WRITE: Final = "SELECT, INSERT, UPDATE, DELETE"
_MAKE: Final = "CREATE, ALTER, INDEX, DROP"


class Role(StrEnum):
    """A user of the database: what it does with the outbox's tables."""

    APP = "app"
    COMPENSATOR = "compensator"
    RECONCILIATION = "reconciliation"
    MIGRATE = "migrate"


def grants(connection: Connection, role: Role, *, schema: str | None, user: str, host: str) -> list[str]:
    """Returns the statements, for the tables that there are now; those of `migrate` also for tables to be made.

    Only `app` gets business tables: those of the connection's database. Raises ConfigurationError without a place.
    """
    place = table_place(connection.dialect, schema)
    account = f"{_text(user)}@{_text(host)}"
    return [
        f"GRANT {privileges} ON {'.'.join(name if name == '*' else _quoted(name) for name in names)} TO {account};"
        for *names, privileges in _needed(connection, role, place)
    ]


def _needed(connection: Connection, role: Role, place: TablePlace) -> Iterator[tuple[str, str, str]]:
    """Yields databases, tables and privileges."""
    tables, database = outbox_tables(place), str(place.schema)
    messages = message_table_names(connection, place)
    match role:
        case Role.APP:
            yield from _of_app(tables, messages, database)
            business = connection.dialect.default_schema_name
            for name in sorted(_business_tables(connection, business)):
                yield str(business), name, _WRITE
        case Role.COMPENSATOR:
            yield from _of_compensator(tables, messages, database)
        case Role.RECONCILIATION:
            for name in (*messages, tables.archive.name, tables.inbox.name, tables.order_head.name):
                yield database, name, "SELECT"
        case Role.MIGRATE if place.prefix:
            outbox_names = {table.name for table in tables.metadata.sorted_tables} | {*messages, VERSION_TABLE}
            for name in sorted(outbox_names):
                yield database, name, f"{_MAKE}, {_WRITE}"
        case Role.MIGRATE:
            yield database, "*", f"{_MAKE}, {_WRITE}"
        case _:
            assert_never(role)


def _of_app(tables: OutboxTables, messages: Sequence[str], database: str) -> Iterator[tuple[str, str, str]]:
    yield from ((database, name, _WRITE) for name in messages)
    yield database, tables.archive.name, "SELECT, INSERT"
    yield database, tables.inbox.name, "SELECT, INSERT"
    yield database, tables.order_head.name, "SELECT, INSERT, UPDATE"
    yield database, tables.order_queue.name, "SELECT, INSERT, DELETE"
    yield database, tables.identity.name, "SELECT"


def _of_compensator(tables: OutboxTables, messages: Sequence[str], database: str) -> Iterator[tuple[str, str, str]]:
    yield from ((database, name, "SELECT, UPDATE, DELETE") for name in messages)
    yield database, tables.archive.name, "SELECT, INSERT, DELETE"
    yield from ((database, table.name, "SELECT, DELETE") for table in (tables.inbox, tables.order_head))
    yield database, tables.order_queue.name, "SELECT, DELETE"
    yield from ((database, table.name, _WRITE) for table in (tables.instance, tables.lease))
    yield from ((database, name, "SELECT") for name in (tables.identity.name, VERSION_TABLE))


def _business_tables(connection: Connection, business: str | None) -> set[str]:
    """Returns the tables of the connection's database that are not ours."""
    if business is None:
        return set()
    place = table_place(connection.dialect, business)
    outbox_names = {table.name for table in outbox_tables(place).metadata.sorted_tables}
    split = set(message_table_names(connection, place))
    existing = tables_in(connection, business)
    return {name for name in existing - outbox_names - split if not is_of_outbox(name, ())}


def _quoted(name: str) -> str:
    doubled = name.replace("`", "``")  # by hand: SQLAlchemy also doubles %, which no driver undoes here
    return f"`{doubled}`"


def _text(value: str) -> str:
    doubled = value.replace("\\", "\\\\").replace("'", "''")
    return f"'{doubled}'"
