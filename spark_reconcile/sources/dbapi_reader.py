"""Reads databases by DB-API: connections by URL, checked names, translated errors. Independent of Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, OutboxError, SchemaMissing
from outbox_core.common.table_namespace import TableNamespace
from spark_reconcile.sources.databases.mysql import MySqlSource
from spark_reconcile.sources.databases.source_database import Address, Query, SourceDatabase
from spark_reconcile.sources.databases.sqlite import SqliteSource

BATCH_ROWS: Final = 10_000
_DATABASES: Final[tuple[SourceDatabase, ...]] = (SqliteSource(), MySqlSource())
"""Those that are read."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseAddress(Address):
    """A database, parsed from a SQLAlchemy URL. Its text has no user and no password."""

    backend: SourceDatabase

    @staticmethod
    def of(url: str) -> DatabaseAddress:
        """Raises ConfigurationError for anything but MySQL, MariaDB and a SQLite file."""
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018 - it is read here, where it raises
        except ValueError as error:
            raise ConfigurationError(f"a source's url cannot be taken apart: {error}") from error
        kind = parts.scheme.partition("+")[0]
        for database in _DATABASES:
            address = database.address(parts) if kind in database.schemes else None
            if address is not None:
                return DatabaseAddress(
                    backend=database, **{part.name: getattr(address, part.name) for part in fields(address)}
                )
        raise ConfigurationError(
            "a source's url is mysql+pymysql://user@host/database or sqlite:///file.db, not "
            f"{parts.scheme or 'nothing'}://..."
        )

    def __str__(self) -> str:
        return self.backend.shown(self)

    def schema_of(self, schema: str | None) -> str | None:
        """Returns the schema of the outbox's tables: the named one, else the business's own database; None on SQLite,
        which has none. Raises ConfigurationError if there is neither.
        """
        return self._tables_at(schema).schema

    def outbox_table(self, name: str, *, schema: str | None) -> str:
        """Returns the name of one of the outbox's tables in this schema."""
        return self._tables_at(schema).named(name)

    def _tables_at(self, schema: str | None) -> TableNamespace:
        return self.backend.tables_at(schema, current=self.database)


class DbApiReader:
    """One open connection that reads. Statements hold `?` for each bound value."""

    def __init__(self, address: DatabaseAddress, connection: Any) -> None:
        self.address = address
        self._connection = connection

    def begin_snapshot(self) -> None:
        """Begin a consistent snapshot: all later statements see the database as of now."""
        with closing(self._connection.cursor()) as cursor:
            self.address.backend.begin_snapshot(cursor)

    def batches(self, statement: str, parameters: Sequence[object] = ()) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the rows of a statement in batches, never all of them in memory."""
        with translated(self.address), closing(self._connection.cursor()) as cursor:
            cursor.execute(self.address.backend.for_driver(statement), tuple(parameters))
            while batch := cursor.fetchmany(BATCH_ROWS):
                yield list(batch)

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Returns all rows of a statement that has few."""
        return [row for batch in self.batches(statement, parameters) for row in batch]

    def now_ms(self) -> int:
        """Returns the time of the database's clock, UTC."""
        ((now,),) = self.rows(f"SELECT {self.address.backend.now_us}")
        return int(now) // 1000

    def replica_status(self) -> list[dict[str, Any]] | None:
        """Returns a status row for each source of this replica; None if the user lacks the privilege."""
        database = self.address.backend
        if database.version_query is None:
            return []
        ((version,),) = self.rows(database.version_query)
        statements = database.replica_statements(str(version))
        try:
            return next((status for statement in statements if (status := self._named(statement)) is not None), None)
        except database.driver_error as error:
            if database.is_not_granted(error):
                return None
            raise _translate(error, self.address) from error

    def read_only(self) -> bool:
        """Whether the server rejects writes of its users, as a replica should."""
        if self.address.backend.read_only_query is None:
            return False
        ((flag,),) = self.rows(self.address.backend.read_only_query)
        return str(flag).upper() not in {"0", "OFF"}

    def _named(self, statement: str) -> list[dict[str, Any]] | None:
        """Returns rows as dictionaries, since columns differ by version; None if the statement is not supported."""
        with closing(self._connection.cursor()) as cursor:
            try:
                cursor.execute(statement)
            except self.address.backend.driver_error as error:
                if self.address.backend.is_unsupported(error):
                    return None
                raise
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def identity(self) -> tuple[str, ...]:
        """Returns the identity of this server, or of this file, independent of its url."""
        query = self.address.backend.identity_query
        if query is None:
            with translated(self.address):
                stat = Path(self.address.database).stat()
            return str(stat.st_dev), str(stat.st_ino)
        variables = self._asked(query)
        return tuple(sorted(f"{name}={value}" for name, value in variables))

    def columns(self, table: str, *, schema: str | None) -> Mapping[str, str]:
        """Returns the columns of a table, and their types in lower case; empty if there is no such table."""
        columns = self._asked(self.address.backend.columns_query(table, schema or self.address.database))
        return {str(name): str(kind).lower() for name, kind in columns}

    def leads_index(self, table: str, column: str, *, schema: str | None) -> bool:
        """Whether an index of a table begins with this column; no file is asked."""
        query = self.address.backend.leading_index_query(table, column, schema or self.address.database)
        return query is not None and bool(self._asked(query))

    def collation(self, table: str, column: str, *, schema: str | None) -> tuple[str, str]:
        """Returns the character set and the collation of a column; empty if it is no text, or compared by its bytes."""
        query = self.address.backend.collation_query(table, column, schema or self.address.database)
        rows = [] if query is None else self._asked(query)
        charset, collation = rows[0] if rows else ("", "")
        return str(charset or ""), str(collation or "")

    def tables(self, *, schema: str | None) -> list[str]:
        """Returns the tables of a schema, sorted."""
        rows = self._asked(self.address.backend.tables_query(schema or self.address.database))
        return sorted(str(name) for (name,) in rows)

    def rows_about(self, table: str, *, schema: str | None) -> int:
        """Returns the approximate number of rows of a table; cheap, an estimate on a server."""
        query = self.address.backend.row_count_query(
            table, schema or self.address.database, quoted_table=quoted(self.address, table)
        )
        counted = self._asked(query)
        return int(counted[0][0]) if counted else 0

    def _asked(self, query: Query) -> list[tuple[Any, ...]]:
        return self.rows(query.statement, query.parameters)


@contextmanager
def reading(address: DatabaseAddress) -> Iterator[DbApiReader]:
    """Opens a read-only connection. Raises DatabaseUnavailable, or ConfigurationError if access is denied."""
    with translated(address):
        connection = address.backend.open(address)
    with closing(connection):
        yield DbApiReader(address, connection)


@contextmanager
def writing(address: DatabaseAddress) -> Iterator[Any]:
    """Opens a DB-API connection in a transaction, committed at the end; for repairs only. Raises like reading()."""
    with translated(address):
        connection = address.backend.open(address, writes=True)
        with closing(connection), closing(connection.cursor()) as cursor:
            address.backend.begin_write(cursor)
            yield cursor
            connection.commit()


@contextmanager
def translated(address: DatabaseAddress) -> Iterator[None]:
    """Translates driver errors to our errors, with the cure; the cause stays attached."""
    try:
        yield
    except (address.backend.driver_error, OSError) as error:
        raise _translate(error, address) from error


def checked(name: str) -> str:
    """Returns the name of a table or column if it is safe to quote. Raises ConfigurationError."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is not a name of a table or column: letters, digits, _ and $ only")
    return name


def quoted(address: DatabaseAddress, *names: str | None) -> str:
    """Returns names, quoted for this database and joined by dots; None is left out.

    The last one is a table's or a column's, and checked; a database before it may have any name, `my-shop` for
    instance. For statements of DbApiReader, and of SourceDatabase.for_driver().
    """
    mark = address.backend.quote
    *databases, last = (name for name in names if name is not None)
    quotable = [*(name.replace(mark, mark * 2) for name in databases), checked(last)]
    return ".".join(f"{mark}{name}{mark}" for name in quotable)


def _translate(error: Exception, address: DatabaseAddress) -> OutboxError:
    text = str(error.args[-1] if error.args else error).splitlines()[0]
    if address.backend.is_table_missing(error):
        return SchemaMissing(f"a table or column is missing in {address} ({text}); run: outbox db upgrade --url URL")
    undecodable = address.backend.undecodable_column(error)
    if undecodable is not None:
        return ConfigurationError(
            f"a text of {undecodable} is not UTF-8 in {address}, so it equals no message's key: say with key_format "
            "how the business writes it, or leave such rows out by the rule's where"
        )
    if address.backend.is_access_denied(error):
        return ConfigurationError(f"{address} refuses this user ({text}); grant SELECT, or check the url's user")
    return DatabaseUnavailable(f"cannot read {address} ({text}); check the url and that the database runs")
