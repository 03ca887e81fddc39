"""What the outbox needs of a database: engines set up right, the database's clock, driver errors in our words.

No tables.

Only the database's UTC clock decides when a row is due and when a lease ends: application hosts disagree with each
other, and step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar, cast

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    Table,
    Update,
    create_engine,
    event,
    literal_column,
    text,
)
from sqlalchemy.engine import URL, Dialect
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool

from outbox.store.database_url import read_url
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, OutboxError, SchemaMissing

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
Write = TypeVar("Write", Update, Delete)

SQLITE_BUSY_TIMEOUT_MS: Final = 30_000
CONNECT_TIMEOUT_SECONDS: Final = 10

WRITE_LOCK_FIRST: Final = "outbox_write_lock_first"
"""The execution option of Connections whose transactions take SQLite's write lock when they begin (BEGIN IMMEDIATE).

A transaction that reads first cannot become a writer once another one has written: it fails at once, with "database is
locked". One that begins as a writer waits for its turn.
"""

MYSQL_DIALECTS: Final = frozenset({"mysql", "mariadb"})
CONFLICT_RETRIES_MAX: Final = 3
BACKGROUND_LOCK_WAIT_SECONDS: Final = 5
"""How long background work waits for a row's or a table's lock, whatever the server allows: at least a transaction of
an operator's must be over by the next try."""
DEADLOCK: Final = 1213
LOCK_WAIT_TIMEOUT: Final = 1205
NO_SUCH_INDEX: Final = 1176
RECORD_CHANGED: Final = 1020  # MariaDB with innodb_snapshot_isolation, the default from 11.6.2 on
ROLLED_BACK_AT_COMMIT: Final = 3101  # group replication: another member changed the row first
CONFLICTS: Final = frozenset({DEADLOCK, LOCK_WAIT_TIMEOUT, RECORD_CHANGED, ROLLED_BACK_AT_COMMIT})
_NO_SUCH_DATABASE: Final = 1049
_NO_SUCH_TABLE: Final = frozenset({1146, _NO_SUCH_DATABASE, 1054})  # no such table, no such database, no such column
_ACCESS_DENIED: Final = frozenset({1044, 1045, 1142, 1143, 1227, 1370, 1698})
_OPTION_FORBIDS: Final = 1290  # --read-only, but other options as well
_READ_ONLY_SERVER: Final = frozenset({1836, 1874})
_READ_ONLY_TRANSACTION: Final = 1792
_PACKET_TOO_LARGE: Final = 1153
_STATEMENT_BINLOG: Final = 1665
_CANNOT_OPEN: Final = "unable to open database file"
_CHECK_SERVER: Final = "check host, port and that it runs"
_UNREACHABLE: Final = frozenset({2002, 2003, 2005, 2006, 2013, 2055, 1040, 1053, 1927, 3024, 4031})

_NOW_US: Final = {
    # Unlike NOW() and UNIX_TIMESTAMP(NOW(6)), independent of the session's time zone and of daylight saving.
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "sqlite": "(CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER) * 1000)",
}


def now_us(dialect: Dialect) -> ColumnElement[int]:
    """The database's own UTC clock, microseconds since the Unix epoch (SQLite: to the millisecond)."""
    name = "mysql" if dialect.name in MYSQL_DIALECTS else dialect.name
    return literal_column(_NOW_US[name], BigInteger())


def by_primary_key(statement: Write, dialect: Dialect) -> Write:
    """An UPDATE or DELETE that MySQL and MariaDB are told to find its rows for by the primary key.

    Left alone they read the whole table where the keys are a good part of it (and MariaDB for a list of one pair), and
    a DELETE then waits for rows that strangers have not committed yet.
    """
    if dialect.name not in MYSQL_DIALECTS:
        return statement
    hinted = statement.with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect.name)
    if isinstance(hinted, Delete):
        # A hint is allowed in the multi-table form alone: DELETE table FROM table FORCE INDEX ...
        name = dialect.identifier_preparer.format_table(cast("Table", hinted.table))
        return hinted.prefix_with(text(name))
    return hinted


def open_engine(database: Engine | AsyncEngine | URL | str) -> Engine:
    """The synchronous Engine behind whatever names a database, fit for the outbox.

    A URL makes a new engine. An engine is used as it is, except that SQLite is switched to real transactions (see
    prepare_sqlite). Raises ConfigurationError for what cannot work.
    """
    if isinstance(database, AsyncEngine):
        engine = database.sync_engine
    elif isinstance(database, Engine):
        engine = database
    else:
        engine = _create(database)
    if engine.dialect.name not in MYSQL_DIALECTS | {"sqlite"}:
        raise ConfigurationError(
            f"the outbox runs on MySQL, MariaDB and SQLite, not on {engine.dialect.name}; "
            "use a URL like mysql+pymysql://user@host/database or sqlite:///file.db"
        )
    if engine.dialect.name == "sqlite":
        prepare_sqlite(engine)
    return engine


def background_engine(engine: Engine) -> Engine:
    """A second engine on the same database with a pool of its own: background work never takes a business connection.

    On MySQL its connections are READ COMMITTED, whatever those of the business are: a DELETE or UPDATE of ours must
    never lock a gap that a producer's INSERT needs. They speak utf8mb4, or keys would be read back as question marks,
    and wait BACKGROUND_LOCK_WAIT_SECONDS for a lock at most. They are made as those of the business are, by its driver,
    connect_args and creator; an async driver's are for an AsyncBackground.
    """
    pool = engine.pool.recreate()
    if engine.dialect.name in MYSQL_DIALECTS:
        event.listen(pool, "connect", partial(_prepare_background, engine.dialect))
    second = Engine(pool, engine.dialect, engine.url)
    if engine.dialect.name == "sqlite":
        event.listen(second, "begin", _begin)
        second.update_execution_options(**{WRITE_LOCK_FIRST: True})
    return second


def writing_engine(engine: Engine) -> Engine:
    """The engine, for transactions that write: on SQLite they take the write lock when they begin."""
    return engine.execution_options(**{WRITE_LOCK_FIRST: True})


def prepare_sqlite(engine: Engine) -> None:
    """Give SQLite real transactions: BEGIN, savepoints inside it, WAL, a busy timeout.

    The driver's legacy mode begins a transaction late and commits it when the first savepoint is released, which would
    commit half a business transaction. The write lock is taken first where WRITE_LOCK_FIRST is set; other transactions
    begin as SQLite's do, so that those that only read wait for nobody. Idempotent. Raises ConfigurationError for a
    database in memory.
    """
    if isinstance(engine.pool, StaticPool | SingletonThreadPool):
        raise ConfigurationError(
            "an SQLite database in memory cannot be shared with the sender's thread; use a file: sqlite:///file.db"
        )
    if not event.contains(engine, "begin", _begin):
        event.listen(engine, "connect", _set_sqlite_pragmas)
        event.listen(engine, "begin", _begin)


@contextmanager
def database_errors(url: URL) -> Iterator[None]:
    """Translate driver errors at the edge of background work and commands; the cause stays attached."""
    try:
        yield
    except (DBAPIError, PoolTimeoutError) as error:
        raise translate(error, url) from error


def retry_conflicts(transaction: Callable[[], T]) -> T:
    """Run a short transaction of our own again when it lost a conflict with another one: the server has rolled it back.

    Only for what may be repeated: it begins and ends its transaction itself, and has no other effect. A lost
    connection is no conflict: whether a COMMIT in flight was done is unknown, so it is never repeated here.
    """
    for _ in range(CONFLICT_RETRIES_MAX):
        try:
            return transaction()
        except DBAPIError as error:
            if error_code(error) not in CONFLICTS:
                raise
            logger.info("transaction_repeated", extra={"code": error_code(error)})
    return transaction()


def translate(error: DBAPIError | PoolTimeoutError, url: URL) -> OutboxError:
    """A driver's error in our words, with the cure. The one table of what which code means."""
    shown = _shown(url)
    if isinstance(error, PoolTimeoutError):
        return DatabaseUnavailable(f"no free connection to {shown}; raise the pool size or lower the load")
    code = error_code(error)
    said = str(error.orig).splitlines()[0] if str(error.orig) else type(error.orig).__name__
    if is_schema_missing(error):
        return _missing(code, said, url)
    if code in _ACCESS_DENIED:
        return ConfigurationError(
            f"the database refused the user or a privilege at {shown} ({said}); "
            "check the user and its password; the grants of each role are in docs/guides/databases.md"
        )
    if code == _READ_ONLY_TRANSACTION:
        return ConfigurationError(
            f"this transaction of {shown} is READ ONLY ({said}); begin one that writes, and check transaction_read_only"
        )
    if is_read_only(error):
        return DatabaseUnavailable(
            f"the database {shown} is read-only, so a replica or a primary that is being switched over ({said}); "
            "give the URL of the primary"
        )
    if code == _STATEMENT_BINLOG:
        return ConfigurationError(
            f"{shown} cannot log READ COMMITTED transactions ({said}); set binlog_format to ROW or MIXED there"
        )
    if code == _PACKET_TOO_LARGE:
        return ConfigurationError(f"a statement was too large for {shown} ({said}); raise max_allowed_packet there")
    if code in _UNREACHABLE or error.connection_invalidated or _CANNOT_OPEN in said:
        cure = "check that its folder is there and may be written to" if _CANNOT_OPEN in said else _CHECK_SERVER
        return DatabaseUnavailable(f"cannot reach the database {shown} ({said}); {cure}")
    return DatabaseUnavailable(f"the database {shown} failed a statement ({said})")


def _shown(url: URL) -> str:
    """The URL for people: without its password, and without options, which are mostly our own time-outs."""
    return url.set(query={}).render_as_string(hide_password=True)


def _missing(code: int | None, said: str, url: URL) -> SchemaMissing:
    """The database that the URL itself names, or our tables."""
    shown = _shown(url)
    if code == _NO_SUCH_DATABASE and url.database and f"'{url.database}'" in said:
        return SchemaMissing(
            f"there is no database {url.database!r} at {shown}; create it, or name one that there is "
            "(`outbox db upgrade` also takes a URL that names none, and ends with a slash)"
        )
    return SchemaMissing(
        f"the outbox tables are missing or too old in {shown} ({said}); run: outbox db upgrade --url URL"
    )


def error_code(error: DBAPIError) -> int | None:
    """The server's error number, where the driver gives one."""
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def is_schema_missing(error: DBAPIError) -> bool:
    """Whether the error says that a table, schema or column of ours is not there."""
    said = str(error.orig)
    return error_code(error) in _NO_SUCH_TABLE or "no such table" in said or "has no column named" in said


def is_read_only(error: DBAPIError) -> bool:
    """Whether the error says that this server takes no writes: a replica, or a primary in a switch-over."""
    code = error_code(error)
    return code in _READ_ONLY_SERVER or (code == _OPTION_FORBIDS and "read" in str(error.orig).lower())


def is_mendable(error: DBAPIError) -> bool:
    """Whether translate() names a cure that the driver's words hide: tables, privileges, a read-only server."""
    code = error_code(error)
    return (
        is_schema_missing(error)
        or is_read_only(error)
        or code in _ACCESS_DENIED
        or code in {_READ_ONLY_TRANSACTION, _PACKET_TOO_LARGE}
    )


def is_autocommit(connection: Connection) -> bool:
    """Whether each statement commits by itself, because of the connection's options or the engine's. No I/O."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    driver_connection = connection.connection.dbapi_connection
    if connection.dialect.name not in MYSQL_DIALECTS or driver_connection is None:
        return False  # SQLite: prepare_sqlite begins real transactions whatever the driver's mode
    try:
        return connection.dialect.detect_autocommit_setting(driver_connection)
    except NotImplementedError:
        return False


def _create(database: URL | str) -> Engine:
    url = read_url(database)
    try:
        arguments: dict[str, Any] = {}
        is_bounded = "connect_timeout" in url.query  # an argument would win over what the URL says
        if url.get_backend_name() in MYSQL_DIALECTS and url.get_driver_name() == "pymysql" and not is_bounded:
            arguments["connect_args"] = {"connect_timeout": CONNECT_TIMEOUT_SECONDS}
        return create_engine(url, pool_pre_ping=url.get_backend_name() in MYSQL_DIALECTS, **arguments)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigurationError(
            f"not a database URL that can work ({error}); use one like mysql+pymysql://user@host/database "
            "or sqlite:///file.db"
        ) from error


def _prepare_background(dialect: Dialect, connection: Any, _record: object) -> None:
    # By the dialect, so that an engine in AUTOCOMMIT has transactions here: an archive row and its removal are one.
    dialect.set_isolation_level(connection, "READ COMMITTED")
    if hasattr(connection, "set_character_set"):  # both the server's end and the driver's; URLs may say charset=latin1
        connection.set_character_set("utf8mb4")
    elif dialect.is_async:
        connection.run_async(_speak_utf8mb4)
    with closing(connection.cursor()) as cursor:
        cursor.execute(
            f"SET SESSION innodb_lock_wait_timeout = {BACKGROUND_LOCK_WAIT_SECONDS}, "
            f"SESSION lock_wait_timeout = {BACKGROUND_LOCK_WAIT_SECONDS}, "
            # Without the mode of MariaDB's under which '' is NULL; the one in its place is about DDL. All others are
            # kept: the dialect quotes names as ANSI_QUOTES says.
            "SESSION sql_mode = REPLACE(@@SESSION.sql_mode, 'EMPTY_STRING_IS_NULL', 'NO_ENGINE_SUBSTITUTION')"
        )
    connection.commit()


async def _speak_utf8mb4(driver_connection: Any) -> None:
    # asyncmy 0.2.18 asks its character set for an attribute that it lacks: there the URL's character set stays. What
    # the sender reads and writes is ASCII, but for reasons of the broker's.
    with suppress(AttributeError):
        await driver_connection.set_charset("utf8mb4")


def _set_sqlite_pragmas(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_MS}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
    finally:
        cursor.close()


def _begin(connection: Connection) -> None:
    first = connection.get_execution_options().get(WRITE_LOCK_FIRST, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if first else "BEGIN")


def same_database(one: Engine, other: Engine) -> bool:
    """Whether two engines speak to the same database server and schema, as far as their URLs tell."""
    return _pool(one) is _pool(other) or _place(one.url) == _place(other.url)


def _pool(engine: Engine) -> Pool:
    return engine.pool


def _place(url: URL) -> tuple[object, ...]:
    backend = "mysql" if url.get_backend_name() in MYSQL_DIALECTS else url.get_backend_name()
    return (backend, url.host, url.port, url.database if backend == "sqlite" else None)
