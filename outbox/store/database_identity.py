"""Compares the databases of connections with that of an outbox, by what the databases say of themselves, and the
business's database with the owner of a named schema.

A URL does not say where a connection leads: `creator`, `connect_args`, option files and proxies do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sqlalchemy import Connection, Engine, select
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from outbox.store.database import ask_driver, is_schema_missing
from outbox.store.databases.database_port import Failure
from outbox.store.databases.supported import database_of, failure_of, known_database
from outbox.store.schema import outbox_tables
from outbox.store.table_placement import connect_once, table_namespace, tables_missing
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable
from outbox_core.common.table_namespace import TableNamespace

_KEY: Final = "outbox.identity"
_NOT_THERE: Final = frozenset({Failure.DATABASE_MISSING, Failure.TABLE_MISSING, Failure.PRIVILEGE_MISSING})
"""The server's answers where another outbox's tables are, or none."""
_TAKES_WRITES: Final = frozenset({"0", "OFF", "FALSE"})
"""What Database.read_only_flag() is on a server that is no follower."""


@dataclass(frozen=True, slots=True)
class _Identity:
    """The id of the tables, None without any; whether the server only reads, as a follower does."""

    id: str | None
    reads: bool = False


class DatabaseIdentity:
    """Tells whether connections of other pools reach the tables of one engine's outbox. Thread-safe.

    On MySQL and MariaDB it is a random id that `upgrade` writes beside the tables, read at the tables' own place: the
    same on each node and by each way to it, before a failover and after it. A byte copy on another server has it, too,
    and is not told apart. SQLite's is the file.
    """

    def __init__(self, engine: Engine, *, schema: str | None) -> None:
        """`schema`: as the user names it. No I/O."""
        self._engine = engine
        self._schema = schema

    def is_of(self, connection: Connection) -> bool:
        """Returns whether the connection reaches the tables. Asks each connection of another pool once.

        Raises SchemaMissing or ConfigurationError if the engine's database has no tables, and DatabaseUnavailable.
        """
        if connection.engine.pool is self._engine.pool:
            return True
        if known_database(connection.dialect) is not database_of(self._engine.dialect):
            return False
        return self._read(connection).id == self._own

    def is_follower(self, connection: Connection) -> bool:
        """Returns whether the connection of another pool reaches a copy of the tables that takes no writes."""
        return (
            connection.engine.pool is not self._engine.pool and self.is_of(connection) and self._read(connection).reads
        )

    @cached_property
    def _own(self) -> str:
        connect_once(self._engine)
        with self._engine.connect() as connection:
            own = self._read(connection).id
            if own is None:
                raise tables_missing(connection, self._schema)
        return own

    def _read(self, connection: Connection) -> _Identity:
        file = database_of(connection.dialect).file_of(connection)
        if file is not None:
            return _Identity(file)
        connect_once(self._engine)
        namespace = table_namespace(self._engine.dialect, self._schema)
        identities: dict[TableNamespace, _Identity] = connection.info.setdefault(_KEY, {})
        # A follower is asked each time: once it is the primary, its connections stay and it takes writes.
        if namespace not in identities or identities[namespace].reads:
            identities[namespace] = _identity_at(connection, namespace)
        return identities[namespace]


def _identity_at(connection: Connection, namespace: TableNamespace) -> _Identity:
    identity = outbox_tables(namespace).identity
    read_only_flag = database_of(connection.dialect).read_only_flag()
    question = str(select(identity.c.id, read_only_flag).compile(dialect=connection.dialect))
    driver_error: type[Exception] = connection.dialect.loaded_dbapi.Error
    try:
        rows = ask_driver(connection, question)
    except driver_error as error:
        if failure_of(error) not in _NOT_THERE:
            raise DatabaseUnavailable(f"a connection did not say which database it is on ({error})") from error
        return _Identity(None)
    row = next(iter(rows), None)
    return _Identity(None) if row is None else _Identity(str(row[0]), reads=str(row[1]).upper() not in _TAKES_WRITES)


# -- to whom a named schema belongs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchemaOwner:
    """The business's database to which a named schema belongs: None where nobody has said it yet (decision 118)."""

    name: str | None = None
    is_shared: bool = False
    folds_case: bool = False
    """Whether the server takes names that differ in case alone for one (Database.case_folding_flag)."""

    def admits(self, business: str | None) -> bool:
        """Returns whether the service in this database may use the schema.

        Who is in no database admits to none: a compensator without grants on the business's tables cannot be in it.
        """
        if self.is_shared or self.name is None or not business:
            return True
        return self.name.casefold() == business.casefold() if self.folds_case else self.name == business


def owner_of(connection: Connection, namespace: TableNamespace) -> SchemaOwner:
    """Returns to whom the schema belongs; nobody has said it of the business's own database, or of older tables."""
    if namespace.schema is None or namespace.prefix:
        return SchemaOwner()
    identity = outbox_tables(namespace).identity
    folds = database_of(connection.dialect).case_folding_flag()
    question = select(identity.c.owner, identity.c.is_shared, folds).where(identity.c.number == 1).limit(1)
    try:
        row = connection.execute(question).first()
    except DBAPIError as error:
        if is_schema_missing(error):
            return SchemaOwner()
        raise
    return SchemaOwner() if row is None else SchemaOwner(row[0], is_shared=bool(row[1]), folds_case=bool(row[2]))


def refuse_stranger(connection: Connection, dialect: Dialect, schema: str | None) -> None:
    """Raise ConfigurationError if a schema belongs to another database than that of the engine with this dialect.

    The connection may be another engine's, as a session's may. For use before the first work on a schema: it is asked
    once by each process, not by each transaction.
    """
    namespace, business = table_namespace(dialect, schema), dialect.default_schema_name
    owner = owner_of(connection, namespace)
    if not owner.admits(business):
        raise stranger_refused(namespace, owner=owner, business=business)


def stranger_refused(namespace: TableNamespace, *, owner: SchemaOwner, business: str | None) -> ConfigurationError:
    """Returns the error of whoever would use the schema of another database."""
    upgrade = f"outbox db upgrade --schema {namespace.schema}"
    return ConfigurationError(
        f"the schema {namespace.schema} belongs to the database {owner.name}, and this service is in {business}: the "
        f"compensator of either would send what both publish. If both are to share it: {upgrade} --shared. If not, "
        f"give {business} a place of its own: another schema, or none, which is its own database. Where {business} "
        f"has taken the place of {owner.name}, as a copy under another name does: {upgrade} --owner {business}"
    )


class StrangerCheck:
    """Refuses strangers in schemas until they were all admitted once. Thread-safe: at worst it asks twice."""

    def __init__(self, dialect: Dialect, schemas: Sequence[str | None]) -> None:
        """`schemas`: as the user names them. No I/O."""
        self._dialect = dialect
        self._schemas = schemas
        self._is_done = False

    def run(self, connection: Connection) -> None:
        """Raise ConfigurationError as refuse_stranger() does. No I/O once it has succeeded."""
        if self._is_done:
            return
        for schema in self._schemas:
            refuse_stranger(connection, self._dialect, schema)
        self._is_done = True
