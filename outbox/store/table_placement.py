"""Finds where the outbox's tables are, and selects the message table of a row: the only one, or one of up to 1,024 by
the CRC32 of the key, as business tables are commonly split, so that a message can stand beside the rows that it is of.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.engine import URL, Dialect

from outbox.store.databases.supported import database_of
from outbox.store.schema import TABLES_MAX, plain_message_table_name, split_message_table_name
from outbox_core.common.errors import ConfigurationError, SchemaMissing
from outbox_core.common.table_namespace import FORMER_SCHEMA, SIGNS_OF_SCHEMA, TableNamespace, left_in_former_schema


@dataclass(frozen=True, slots=True, order=True)
class MessageTable:
    """A message table: its schema (None on SQLite) and its name."""

    schema: str | None
    name: str


def table_namespace(dialect: Dialect, schema: str | None) -> TableNamespace:
    """Returns where the outbox's tables are, for all statements of whoever has this dialect's engine.

    The business's own database is the one that the first connection of the engine was in: `creator`, `connect_args` and
    option files decide that too, so a URL does not say, and a later USE of a pooled connection must not. Raises
    ConfigurationError if that is needed and there is none.
    """
    database = database_of(dialect)
    if database.has_schemas and not _is_connected(dialect):
        raise RuntimeError("the engine has not connected yet, so the place of its tables is unknown: connect_once()")
    return database.namespace(schema, current=dialect.default_schema_name)


def is_left_beside(connection: Connection, schema: str | None) -> bool:
    """Returns whether no schema was named and the tables may be in the schema that once was the default: unsent rows
    there would be left behind by whoever began with new tables. For connections that found no tables.
    """
    if schema is not None or not database_of(connection.dialect).has_schemas:
        return False
    if table_namespace(connection.dialect, schema).schema == FORMER_SCHEMA:
        return False
    return tables_in(connection, FORMER_SCHEMA) >= SIGNS_OF_SCHEMA


def is_schema_alone(connection: Connection, schema: str | None) -> bool:
    """Returns whether the connection is in a schema of outbox tables alone, for which it looks among a business's."""
    namespace = table_namespace(connection.dialect, schema)
    if namespace.schema is None or not namespace.prefix:
        return False
    names = tables_in(connection, namespace.schema)
    return names >= SIGNS_OF_SCHEMA and plain_message_table_name(namespace) not in names


def tables_in(connection: Connection, schema: str | None) -> set[str]:
    """Returns the names of all tables of a schema, which may be missing."""
    if schema is None:
        return set(inspect(connection).get_table_names())
    listed = text("SELECT table_name FROM information_schema.tables WHERE table_schema = :schema")
    return set(connection.scalars(listed, {"schema": schema}))


def connect_once(engine: Engine) -> None:
    """Let the engine's dialect learn from a connection what table_namespace() needs, unless it has connected before."""
    if not database_of(engine.dialect).has_schemas or _is_connected(engine.dialect):
        return
    with engine.connect() as connection:
        if not _is_connected(engine.dialect):  # a pool of another engine, with connections that it has made
            engine.dialect.initialize(connection)


def unconnected_dialect(url: URL) -> Dialect:
    """Returns a dialect for statements that nobody runs: it knows the URL's database as though it had connected."""
    create: Callable[..., Dialect] = url.get_dialect()
    dialect = create(paramstyle="named")  # no per cent sign is doubled for a driver
    dialect.default_schema_name = url.database
    dialect.default_isolation_level = "READ COMMITTED"  # any: _is_connected() looks whether there is one
    return dialect


def _is_connected(dialect: Dialect) -> bool:
    # Of what a dialect asks its first connection, this comes after the database's name.
    return getattr(dialect, "default_isolation_level", None) is not None


def tables_missing(connection: Connection, schema: str | None) -> ConfigurationError | SchemaMissing:
    """Returns the error of whoever found no message table in the namespace that `schema` means."""
    namespace = table_namespace(connection.dialect, schema)
    if is_schema_alone(connection, schema):
        return ConfigurationError(
            f"the database {namespace.schema} of the URL is a schema of outbox tables alone, not a business's "
            f"database: name it as the schema (schema=, --schema {namespace.schema}), and none in the URL, which may "
            "end with a slash"
        )
    if is_left_beside(connection, schema):
        return left_in_former_schema(namespace.schema)
    where = (
        "database"
        if namespace.schema is None
        else f"database {namespace.schema}"
        if namespace.prefix
        else f"schema {namespace.schema}"
    )
    option = f" --schema {schema}" if schema is not None and namespace.schema is not None else ""
    return SchemaMissing(
        f"the outbox tables are missing or too old in the {where}; run: outbox db upgrade --url URL{option}"
    )


class Placement:
    """Maps rows to tables. All rows of one key are in one table, so that their order can be kept."""

    def __init__(self, dialect: Dialect, *, schemas: Sequence[str | None], tables: int = 1) -> None:
        """`schemas`: as the user names them; None is the default one. `tables` is the number over all schemas, each
        of which gets an equal range of consecutive numbers. No I/O: before a connection, the numbers of rows' tables
        are known, and not the tables.

        Raises ConfigurationError if the tables cannot be distributed evenly.
        """
        if not schemas or len(set(schemas)) != len(schemas):
            raise ConfigurationError("schemas must be named once each, at least one")
        if not 1 <= tables <= TABLES_MAX or tables % len(schemas):
            raise ConfigurationError(
                f"tables must be 1 to {TABLES_MAX} and a multiple of the number of schemas ({len(schemas)}), "
                f"not {tables}"
            )
        database = database_of(dialect)
        if tables > 1 and not database.has_schemas:
            raise ConfigurationError(f"{database.products[0]} has one message table: leave `tables` at 1")
        self._dialect = dialect
        self._count = tables
        self.schemas: Sequence[str | None] = tuple(schemas)

    @property
    def is_split(self) -> bool:
        """Whether there are several tables."""
        return self._count > 1

    def number(self, key: str) -> int:
        """Returns the number of the table for a message key (for a message without one: its id)."""
        return zlib.crc32(key.encode()) % self._count if self._count > 1 else 0

    @cached_property
    def namespaces(self) -> Sequence[TableNamespace]:
        """Where the tables are, in the order of their schemas. Raises ConfigurationError as table_namespace() does."""
        return tuple(table_namespace(self._dialect, schema) for schema in self.schemas)

    @cached_property
    def tables(self) -> Sequence[MessageTable]:
        """The tables, in the order of their numbers. Raises ConfigurationError as table_namespace() does."""
        return tuple(
            MessageTable(namespace.schema, name) for namespace in self.namespaces for name in self.names_in(namespace)
        )

    def names_in(self, namespace: TableNamespace) -> list[str]:
        """Returns the names of the message tables in one namespace, in the order of their numbers."""
        if not self.is_split:
            return [plain_message_table_name(namespace)]
        tables_per_schema = self._count // len(self.schemas)
        first_number = self.namespaces.index(namespace) * tables_per_schema
        return [
            split_message_table_name(namespace, table_number)
            for table_number in range(first_number, first_number + tables_per_schema)
        ]


def placement_for(dialect: Dialect, schema: str | Sequence[str] | None, tables: int) -> Placement:
    """Returns the placement for schemas (one, several, or None for the default) and a number of tables."""
    return Placement(dialect, schemas=[schema] if schema is None or isinstance(schema, str) else schema, tables=tables)
