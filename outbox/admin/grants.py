"""The grants that each role needs, table by table, where there are users. Runs none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, assert_never

from sqlalchemy import Connection, Table

from outbox.alembic import is_of_outbox
from outbox.store.databases.supported import database_of
from outbox.store.schema import OutboxTables, message_table, message_table_names, outbox_tables
from outbox.store.table_placement import table_namespace, tables_in
from outbox_core.common.table_namespace import VERSION_TABLE, TableNamespace

_WRITE: Final = "SELECT, INSERT, UPDATE, DELETE"


class DatabaseRole(StrEnum):
    """A user of the database: what it does with the outbox's tables."""

    APP = "app"
    COMPENSATOR = "compensator"
    RECONCILIATION = "reconciliation"
    MIGRATE = "migrate"


def grants(connection: Connection, role: DatabaseRole, *, schema: str | None, account: str) -> list[str]:
    """Returns the statements, for the tables that there are now; those of `migrate` also for tables to be made.

    `account`: as Database.account() quotes the user. Only `app` gets business tables: those of the connection's
    database. Raises ConfigurationError without a namespace.
    """
    namespace, database = table_namespace(connection.dialect, schema), database_of(connection.dialect)
    makes = role is DatabaseRole.MIGRATE
    return [
        database.grant(privileges, schema=granted_schema, table=table, account=account, makes=makes)
        for granted_schema, table, privileges in _needed(connection, role, namespace)
    ]


def table_privileges(
    connection: Connection, role: DatabaseRole, *, schema: str | None
) -> Iterator[tuple[Table, tuple[str, ...]]]:
    """Yields the outbox's tables that there are, each with the privileges on its rows that the role needs.

    Raises ConfigurationError without a namespace.
    """
    namespace = table_namespace(connection.dialect, schema)
    tables = {table.name: table for table in outbox_tables(namespace).metadata.sorted_tables}
    tables |= {name: message_table(namespace.schema, name) for name in message_table_names(connection, namespace)}
    present = tables_in(connection, namespace.schema)
    for granted_schema, name, privileges in _needed(connection, role, namespace):
        if granted_schema == namespace.schema and name in tables and name in present:
            yield tables[name], tuple(privileges.split(", "))


def _needed(
    connection: Connection, role: DatabaseRole, namespace: TableNamespace
) -> Iterator[tuple[str, str | None, str]]:
    """Yields schemas, tables (None: all of the schema) and privileges."""
    tables, database = outbox_tables(namespace), str(namespace.schema)
    messages = message_table_names(connection, namespace)
    match role:
        case DatabaseRole.APP:
            yield from _of_app(tables, messages, database)
            business = connection.dialect.default_schema_name
            for name in sorted(_business_tables(connection, business)):
                yield str(business), name, _WRITE
        case DatabaseRole.COMPENSATOR:
            yield from _of_compensator(tables, messages, database)
        case DatabaseRole.RECONCILIATION:
            for name in (*messages, tables.archive.name, tables.inbox.name, tables.order_head.name):
                yield database, name, "SELECT"
        case DatabaseRole.MIGRATE if namespace.prefix:
            outbox_names = {table.name for table in tables.metadata.sorted_tables} | {*messages, VERSION_TABLE}
            for name in sorted(outbox_names):
                yield database, name, _WRITE
        case DatabaseRole.MIGRATE:
            yield database, None, _WRITE
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
    namespace = table_namespace(connection.dialect, business)
    outbox_names = {table.name for table in outbox_tables(namespace).metadata.sorted_tables}
    split = set(message_table_names(connection, namespace))
    existing = tables_in(connection, business)
    return {name for name in existing - outbox_names - split if not is_of_outbox(name, ())}
