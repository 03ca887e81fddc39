"""Reads databases by DB-API: connections by URL, checked names, translated errors. Independent of Spark."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.cursors import Cursor, SSCursor

from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, OutboxError, SchemaMissing
from outbox_core.common.mysql_session import pin_session
from outbox_core.common.table_place import SQLITE_PLACE, TablePlace, place_among

CONNECT_SECONDS: Final = 10
READ_SECONDS: Final = 600
BATCH_ROWS: Final = 10_000
_QUOTED_OR_VALUE: Final = re.compile(r"`(?:[^`]|``)*`|\?")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,63}", re.ASCII)
_TLS: Final = "ssl_"
_CHECK_HOSTNAME: Final = "ssl_check_hostname"
_FLAGS: Final = {
    **dict.fromkeys(("true", "yes", "on", "y", "t", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "f", "0"), False),
}
"""As SQLAlchemy reads them."""
_PASSED_ON: Final = frozenset({"unix_socket", "ssl_ca", "ssl_cert", "ssl_key", _CHECK_HOSTNAME})
_NOT_NEEDED: Final = frozenset({"charset"})
_NO_SUCH_TABLE: Final = frozenset({1146, 1049, 1054})
_NOT_UTF_8: Final = re.compile(r"Could not decode to UTF-8 column '(.*?)' with text", re.DOTALL)
"""SQLite's; what follows is the value."""
_NOT_UNDERSTOOD: Final = 1064
_NOT_GRANTED: Final = frozenset({1227, 1044, 1045})
_ASKED_OF_MYSQL: Final = ("SHOW REPLICA STATUS", "SHOW SLAVE STATUS")
_ASKED_OF_MARIADB: Final = ("SHOW ALL SLAVES STATUS",)
_IDENTITY: Final = ("server_uuid", "server_uid", "hostname", "port", "server_id", "datadir")
"""MySQL has the first, MariaDB may have the second; the others distinguish older MariaDB servers."""
_ACCESS_DENIED: Final = frozenset({1044, 1045, 1142, 1698})


class Backend(StrEnum):
    """The SQL dialect of a database."""

    MYSQL = "mysql"
    SQLITE = "sqlite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A database, parsed from a SQLAlchemy URL. Its text has no user and no password."""

    backend: Backend
    database: str
    host: str = ""
    port: int = 0
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    options: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(url: str) -> Place:
        """Raises ConfigurationError for anything but MySQL, MariaDB and a SQLite file."""
        try:
            parts = urlsplit(url)
            port = parts.port or 3306
        except ValueError as error:
            raise ConfigurationError(f"a source's url cannot be taken apart: {error}") from error
        kind = parts.scheme.partition("+")[0]
        if kind == "sqlite" and parts.path.strip("/"):
            return Place(backend=Backend.SQLITE, database=unquote(parts.path.removeprefix("/")))
        if kind in {"mysql", "mariadb"} and parts.hostname:
            return Place(
                backend=Backend.MYSQL,
                database=unquote(parts.path.strip("/")),
                host=parts.hostname,
                port=port,
                user=unquote(parts.username or ""),
                password=unquote(parts.password or ""),
                options=_options(parts.query),
            )
        raise ConfigurationError(
            "a source's url is mysql+pymysql://user@host/database or sqlite:///file.db, not "
            f"{parts.scheme or 'nothing'}://..."
        )

    def __str__(self) -> str:
        if self.backend is Backend.SQLITE:
            return self.database
        socket = dict(self.options).get("unix_socket")
        address = f"{self.host}:{self.port}" if socket is None else f"{self.host} ({socket})"
        return f"{address}/{self.database}"

    def schema_of(self, schema: str | None) -> str | None:
        """Returns the schema of the outbox's tables: the named one, else the business's own database; None on SQLite,
        which has none. Raises ConfigurationError if there is neither.
        """
        return self._tables_at(schema).schema

    def outbox_table(self, name: str, *, schema: str | None) -> str:
        """Returns the name of one of the outbox's tables in this schema."""
        return self._tables_at(schema).named(name)

    def _tables_at(self, schema: str | None) -> TablePlace:
        return SQLITE_PLACE if self.backend is Backend.SQLITE else place_among(schema, current=self.database)


class DbApiReader:
    """One open connection that reads. Statements hold `?` for each bound value."""

    def __init__(self, place: Place, connection: Any) -> None:
        self.place = place
        self._connection = connection

    def begin_snapshot(self) -> None:
        """Begin a consistent snapshot: all later statements see the database as of now."""
        with closing(self._connection.cursor()) as cursor:
            if self.place.backend is Backend.SQLITE:
                cursor.execute("BEGIN")
                cursor.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the first read takes the snapshot
            else:
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")

    def batches(self, statement: str, parameters: Sequence[object] = ()) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the rows of a statement in batches, never all of them in memory."""
        if self.place.backend is Backend.MYSQL:
            statement = for_driver(statement)
        with translated(self.place), closing(self._connection.cursor()) as cursor:
            cursor.execute(statement, tuple(parameters))
            while batch := cursor.fetchmany(BATCH_ROWS):
                yield list(batch)

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Returns all rows of a statement that has few."""
        return [row for batch in self.batches(statement, parameters) for row in batch]

    def now_ms(self) -> int:
        """Returns the time of the database's clock, UTC."""
        ((now,),) = self.rows(f"SELECT {now_us(self.place)}")
        return int(now) // 1000

    def replica_status(self) -> list[dict[str, Any]] | None:
        """Returns a status row for each source of this replica; None if the user lacks the privilege."""
        if self.place.backend is Backend.SQLITE:
            return []
        ((version,),) = self.rows("SELECT VERSION()")
        statements = _ASKED_OF_MARIADB if "mariadb" in str(version).lower() else _ASKED_OF_MYSQL
        try:
            return next((status for statement in statements if (status := self._named(statement)) is not None), None)
        except pymysql.MySQLError as error:
            if error.args and error.args[0] in _NOT_GRANTED:
                return None
            raise _translate(error, self.place) from error

    def read_only(self) -> bool:
        """Whether the server rejects writes of its users, as a replica should."""
        if self.place.backend is Backend.SQLITE:
            return False
        ((flag,),) = self.rows("SELECT @@global.read_only")
        return str(flag).upper() not in {"0", "OFF"}

    def _named(self, statement: str) -> list[dict[str, Any]] | None:
        """Returns rows as dictionaries, since columns differ by version; None if the statement is not supported."""
        with closing(self._connection.cursor()) as cursor:
            try:
                cursor.execute(statement)
            except pymysql.MySQLError as error:
                if error.args and error.args[0] == _NOT_UNDERSTOOD:
                    return None
                raise
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def identity(self) -> tuple[str, ...]:
        """Returns the identity of this server, or of this file, independent of its url."""
        if self.place.backend is Backend.SQLITE:
            with translated(self.place):
                stat = Path(self.place.database).stat()
            return str(stat.st_dev), str(stat.st_ino)
        marks = ", ".join("?" * len(_IDENTITY))
        variables = self.rows(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({marks})", _IDENTITY)
        return tuple(sorted(f"{name}={value}" for name, value in variables))

    def columns(self, table: str, *, schema: str | None) -> Mapping[str, str]:
        """Returns the columns of a table, and their types in lower case; empty if there is no such table."""
        if self.place.backend is Backend.SQLITE:
            columns = self.rows("SELECT name, type FROM pragma_table_info(?)", (table,))
        else:
            columns = self.rows(
                "SELECT column_name, column_type FROM information_schema.columns "
                "WHERE table_schema = ? AND table_name = ? ORDER BY ordinal_position",
                (schema or self.place.database, table),
            )
        return {str(name): str(kind).lower() for name, kind in columns}

    def leads_index(self, table: str, column: str, *, schema: str | None) -> bool:
        """Whether an index of a table begins with this column; SQLite is not asked."""
        if self.place.backend is Backend.SQLITE:
            return False
        rows = self.rows(
            "SELECT 1 FROM information_schema.statistics "
            "WHERE table_schema = ? AND table_name = ? AND column_name = ? AND seq_in_index = 1 LIMIT 1",
            (schema or self.place.database, table, column),
        )
        return bool(rows)

    def collation(self, table: str, column: str, *, schema: str | None) -> tuple[str, str]:
        """Returns the character set and the collation of a column of MySQL or MariaDB; empty if it is no text."""
        rows = self.rows(
            "SELECT character_set_name, collation_name FROM information_schema.columns "
            "WHERE table_schema = ? AND table_name = ? AND column_name = ?",
            (schema or self.place.database, table, column),
        )
        charset, collation = rows[0] if rows else ("", "")
        return str(charset or ""), str(collation or "")

    def tables(self, *, schema: str | None) -> list[str]:
        """Returns the tables of a schema, sorted."""
        if self.place.backend is Backend.SQLITE:
            rows = self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")
        else:
            rows = self.rows(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = ?",
                (schema or self.place.database,),
            )
        return sorted(str(name) for (name,) in rows)

    def rows_about(self, table: str, *, schema: str | None) -> int:
        """Returns the approximate number of rows of a table; cheap, an estimate on MySQL."""
        if self.place.backend is Backend.SQLITE:
            counted = self.rows(f"SELECT count(*) FROM {quoted(self.place, table)}")  # noqa: S608 - a checked name
        else:
            counted = self.rows(
                "SELECT coalesce(table_rows, 0) FROM information_schema.tables "
                "WHERE table_schema = ? AND table_name = ?",
                (schema or self.place.database, table),
            )
        return int(counted[0][0]) if counted else 0


@contextmanager
def reading(place: Place) -> Iterator[DbApiReader]:
    """Opens a read-only connection. Raises DatabaseUnavailable, or ConfigurationError if access is denied."""
    with translated(place):
        connection = _open(place)
    with closing(connection):
        yield DbApiReader(place, connection)


@contextmanager
def writing(place: Place) -> Iterator[Any]:
    """Opens a DB-API connection in a transaction, committed at the end; for repairs only. Raises like reading()."""
    with translated(place):
        if place.backend is Backend.SQLITE:
            uri = f"{Path(place.database).resolve().as_uri()}?mode=rw"
            connection: Any = sqlite3.connect(uri, uri=True, timeout=CONNECT_SECONDS, isolation_level=None)
        else:
            connection = _open(place, autocommit=False, cursorclass=Cursor)
        with closing(connection), closing(connection.cursor()) as cursor:
            if place.backend is Backend.SQLITE:
                cursor.execute("BEGIN IMMEDIATE")
            else:
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            yield cursor
            connection.commit()


@contextmanager
def translated(place: Place) -> Iterator[None]:
    """Translates driver errors to our errors, with the cure; the cause stays attached."""
    try:
        yield
    except (sqlite3.Error, pymysql.MySQLError, OSError) as error:
        raise _translate(error, place) from error


def checked(name: str) -> str:
    """Returns the name of a table or column if it is safe to quote. Raises ConfigurationError."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is not a name of a table or column: letters, digits, _ and $ only")
    return name


def quoted(place: Place, *names: str | None) -> str:
    """Returns names, quoted for this database and joined by dots; None is left out.

    The last one is a table's or a column's, and checked; a database before it may have any name, `my-shop` for
    instance. For statements of DbApiReader, and of for_driver().
    """
    mark = '"' if place.backend is Backend.SQLITE else "`"
    *databases, last = (name for name in names if name is not None)
    quotable = [*(name.replace(mark, mark * 2) for name in databases), checked(last)]
    return ".".join(f"{mark}{name}{mark}" for name in quotable)


def for_driver(statement: str) -> str:
    """Returns a statement with `?` for each bound value as PyMySQL takes it; a database's name may have ? and %."""
    return _QUOTED_OR_VALUE.sub(_for_driver, statement)


def _for_driver(matched: re.Match[str]) -> str:
    return "%s" if matched[0] == "?" else matched[0].replace("%", "%%")


def now_us(place: Place) -> str:
    """Returns SQL for the database's own UTC clock, in microseconds since the epoch."""
    if place.backend is Backend.SQLITE:
        return "(CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER) * 1000)"
    return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"


def _open(place: Place, *, autocommit: bool = True, cursorclass: type[Cursor] = SSCursor) -> Any:
    if place.backend is Backend.SQLITE:
        uri = f"{Path(place.database).resolve().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, timeout=CONNECT_SECONDS, isolation_level=None)
    connection = pymysql.connect(
        host=place.host,
        port=place.port,
        user=place.user,
        password=place.password,
        database=place.database or None,
        charset="utf8mb4",
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        cursorclass=cursorclass,
        autocommit=autocommit,
        **_connect_options(place),
    )
    try:
        with closing(connection.cursor(Cursor)) as cursor:
            pin_session(cursor)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_options(place: Place) -> dict[str, Any]:
    """Returns the url's options as SQLAlchemy passes them on: with `ssl_ca` and the like as keywords of their own,
    PyMySQL encrypts, and verifies no certificate.
    """
    tls: dict[str, Any] = {}
    other_options: dict[str, Any] = {}
    for name, value in place.options:
        if name == _CHECK_HOSTNAME:
            tls["check_hostname"] = _FLAGS[value.lower()]
        elif name.startswith(_TLS):
            tls[name.removeprefix(_TLS)] = value
        else:
            other_options[name] = value
    return {**other_options, "ssl": tls} if tls else other_options


def _options(query: str) -> tuple[tuple[str, str], ...]:
    options = [(name, value) for name, value in parse_qsl(query) if name not in _NOT_NEEDED]
    for name, value in options:
        if name not in _PASSED_ON:
            raise ConfigurationError(
                f"the url's option {name!r} is not understood here; known: {', '.join(sorted(_PASSED_ON))}"
            )
        if name == _CHECK_HOSTNAME and value.lower() not in _FLAGS:
            raise ConfigurationError(f"the url's option {name} is true or false, not {value!r}")
    return tuple(options)


def _translate(error: Exception, place: Place) -> OutboxError:
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = str(error.args[-1] if error.args else error).splitlines()[0]
    if code in _NO_SUCH_TABLE or text.startswith(("no such table", "no such column")):
        return SchemaMissing(f"a table or column is missing in {place} ({text}); run: outbox db upgrade --url URL")
    if not_utf_8 := _NOT_UTF_8.match(text):
        return ConfigurationError(
            f"a text of {not_utf_8[1]} is not UTF-8 in {place}, so it equals no message's key: say with key_format how "
            "the business writes it, or leave such rows out by the rule's where"
        )
    if code in _ACCESS_DENIED:
        return ConfigurationError(f"{place} refuses this user ({text}); grant SELECT, or check the url's user")
    return DatabaseUnavailable(f"cannot read {place} ({text}); check the url and that the database runs")
