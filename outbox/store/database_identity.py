"""Compares the databases of connections with that of an outbox, by what the databases say of themselves.

A URL does not say where a connection leads: `creator`, `connect_args`, option files and proxies do.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, literal_column, select
from sqlalchemy.exc import DBAPIError

from outbox.store.database import MYSQL_DIALECTS, NO_SUCH_TABLE, PRIVILEGE_MISSING
from outbox.store.schema import outbox_tables
from outbox.store.table_placement import connect_once, table_place, tables_missing
from outbox_core.common.errors import DatabaseUnavailable
from outbox_core.common.table_place import TablePlace

_KEY: Final = "outbox.identity"
_NOT_THERE: Final = NO_SUCH_TABLE | PRIVILEGE_MISSING
"""The server's answers where another outbox's tables are, or none."""


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
        if (connection.dialect.name in MYSQL_DIALECTS) is not (self._engine.dialect.name in MYSQL_DIALECTS):
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
        if connection.dialect.name not in MYSQL_DIALECTS:
            return _Identity(_file_of(connection))
        connect_once(self._engine)
        place = table_place(self._engine.dialect, self._schema)
        known: dict[TablePlace, _Identity] = connection.info.setdefault(_KEY, {})
        # A follower is asked each time: once it is the primary, its connections stay and it takes writes.
        if place not in known or known[place].reads:
            known[place] = _identity_at(connection, place)
        return known[place]


def _identity_at(connection: Connection, place: TablePlace) -> _Identity:
    """Returns what a server says, by the driver alone: nothing of SQLAlchemy's may begin a transaction for it."""
    identity = outbox_tables(place).identity
    question = str(select(identity.c.id, literal_column("@@global.read_only")).compile(dialect=connection.dialect))
    driver_error: Any = connection.dialect.loaded_dbapi.Error
    with closing(connection.connection.cursor()) as cursor:
        try:
            cursor.execute(question)
            row: Any = cursor.fetchone()
        except driver_error as error:
            if connection.dialect.is_disconnect(error, None, cursor):
                # As SQLAlchemy does for a statement of its own: else the rollback that follows fails with an error that
                # says nothing, and hides this one.
                connection.invalidate(error)
                raise DBAPIError.instance(
                    question, (), error, driver_error, connection_invalidated=True, dialect=connection.dialect
                ) from error
            if not error.args or error.args[0] not in _NOT_THERE:
                raise DatabaseUnavailable(f"a connection did not say which database it is on ({error})") from error
            return _Identity(None)
    return _Identity(None) if row is None else _Identity(str(row[0]), reads=str(row[1]).upper() not in {"0", "OFF"})


def _file_of(connection: Connection) -> str:
    with closing(connection.connection.cursor()) as cursor:
        cursor.execute("PRAGMA database_list")
        files: list[tuple[Any, ...]] = list(cursor.fetchall())
    return next(str(Path(file).resolve()) for _, name, file in files if name == "main")
