"""Database engines with the settings that the outbox needs, and the translation of driver errors.

No tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, Dialect, ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool

from outbox.store.database_url import read_url
from outbox.store.databases.port import Failure
from outbox.store.databases.supported import database_named, database_of, failure_of
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, OutboxError, SchemaMissing
from outbox_core.common.mysql_session import pin_session
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)
T = TypeVar("T")

SQLITE_BUSY_TIMEOUT_MS: Final = 30_000
CONNECT_TIMEOUT_SECONDS: Final = 10

WRITE_LOCK_FIRST: Final = "outbox_write_lock_first"
"""The execution option of Connections whose transactions take SQLite's write lock when they begin (BEGIN IMMEDIATE).

A transaction that reads first cannot become a writer after another one has written: it fails immediately with "database
is locked". One that begins as a writer waits for the lock.
"""

_POOL_PINGS: Final = "outbox_pool_pings"
"""The execution option of engines whose pool pings a connection before it lends it, as those that open_engine makes."""
_IS_NEW: Final = "outbox.is_new"

MYSQL_DIALECTS: Final = frozenset({"mysql", "mariadb"})
CONFLICT_RETRIES_MAX: Final = 3
BACKGROUND_LOCK_WAIT_SECONDS: Final = 5
"""How long background work waits for a lock on a row or table, whatever the server's setting: it is then retried, by
when at least an operator's transaction must have ended."""
_CONFLICTS: Final = frozenset({Failure.CONFLICT, Failure.LOCK_WAIT_TIMEOUT})
_SCHEMA_MISSING: Final = frozenset({Failure.DATABASE_MISSING, Failure.TABLE_MISSING})
_MENDABLE: Final = _SCHEMA_MISSING | {
    Failure.LOGIN_REFUSED,
    Failure.PRIVILEGE_MISSING,
    Failure.READ_ONLY_SERVER,
    Failure.READ_ONLY_TRANSACTION,
    Failure.STATEMENT_TOO_LARGE,
}


def open_engine(database: Engine | AsyncEngine | URL | str) -> Engine:
    """Returns the synchronous Engine of an engine or URL, with the settings that the outbox needs.

    A URL makes a new engine, whose connections leave a server that became read-only. An engine is used unchanged,
    except that SQLite is switched to real transactions (see prepare_sqlite). Raises ConfigurationError for an
    unsupported database.
    """
    if isinstance(database, AsyncEngine):
        engine = database.sync_engine
    elif isinstance(database, Engine):
        engine = database
    else:
        engine = _create(database)
    database_of(engine.dialect)
    if engine.dialect.name == "sqlite":
        prepare_sqlite(engine)
    return engine


def background_engine(engine: Engine) -> Engine:
    """Returns a second engine on the database with its own pool: background work never takes a business connection.

    On MySQL its connections are READ COMMITTED, whatever the business's isolation level: our DELETE and UPDATE must
    never lock a gap that a producer's INSERT needs. They use utf8mb4, or keys would be read back as question marks,
    wait BACKGROUND_LOCK_WAIT_SECONDS for a lock at most, have the session variables on which our statements depend
    (pin_session), and leave a server that became read-only. They are made by the
    same driver, connect_args and creator as the given engine's; those of an async driver are for an AsyncBackground.
    A connection that the server has ended, since it was idle for too long, is replaced before it is used.
    """
    pool = engine.pool.recreate()
    if engine.dialect.name in MYSQL_DIALECTS:
        pin_connections(pool)
        event.listen(pool, "connect", partial(_prepare_background, engine.dialect))
        if not engine.get_execution_options().get(_POOL_PINGS, False):
            event.listen(pool, "checkout", partial(_replace_if_ended, engine.dialect))
    second = Engine(pool, engine.dialect, engine.url)
    event.listen(second, "handle_error", _leave_read_only_server)
    if engine.dialect.name == "sqlite":
        event.listen(second, "begin", _begin)
        second.update_execution_options(**{WRITE_LOCK_FIRST: True})
    return second


def pin_connections(pool: Pool | Engine) -> None:
    """Pin the session variables of all connections that it makes, before anybody's first statement there."""
    # In front: SQLAlchemy asks the first connection of a dialect its own questions, which a server may refuse as well.
    event.listen(pool, "connect", _pin, insert=True)


def _pin(connection: Any, _record: object) -> None:
    with closing(connection.cursor()) as cursor:
        pin_session(cursor)


def writing_engine(engine: Engine) -> Engine:
    """Returns the engine for transactions that write: on SQLite they acquire the write lock when they begin."""
    return engine.execution_options(**{WRITE_LOCK_FIRST: True})


def prepare_sqlite(engine: Engine) -> None:
    """Give SQLite real transactions: BEGIN, savepoints inside it, WAL, a busy timeout.

    The driver's legacy mode begins a transaction late and commits it when the first savepoint is released, which would
    commit half a business transaction. With WRITE_LOCK_FIRST the write lock is acquired first; other transactions
    begin as is SQLite's default, so that read-only ones do not wait. An engine may begin its transactions in a listener
    of its own, as SQLAlchemy's manual shows, and may set the driver's `autocommit`. Idempotent. Raises
    ConfigurationError for a database in memory.
    """
    if isinstance(engine.pool, StaticPool | SingletonThreadPool):
        raise ConfigurationError(
            "an SQLite database in memory cannot be shared with the sender's thread; use a file: sqlite:///file.db"
        )
    if not event.contains(engine, "begin", _begin):
        event.listen(engine, "connect", _set_sqlite_pragmas)
        event.listen(engine, "begin", _begin)
        event.listen(engine, "handle_error", _refuse_second_begin)
        if engine.dialect.is_async:
            event.listen(engine, "do_connect", _leave_out_autocommit)


@contextmanager
def database_errors(url: URL) -> Iterator[None]:
    """Translate driver errors of background work and commands; the cause stays attached."""
    try:
        yield
    except (DBAPIError, PoolTimeoutError) as error:
        raise translate(error, url) from error


def retry_conflicts(transaction: Callable[[], T]) -> T:
    """Run a short transaction, and retry it after a conflict with another one, for which the server rolled it back.

    Only for repeatable functions, which begin and end their transaction themselves and have no other effect. A lost
    connection is not a conflict: it is unknown whether a COMMIT in flight was done, so it is never retried here.
    """
    for _ in range(CONFLICT_RETRIES_MAX):
        try:
            return transaction()
        except DBAPIError as error:
            if not is_conflict(error):
                raise
            logger.info("transaction_repeated", extra={"code": error_code(error)})
    return transaction()


_CHECK_SERVER: Final = "check host, port and that it runs"
_GRANTS: Final = (
    "SELECT, INSERT, UPDATE, DELETE; for `outbox db upgrade` CREATE, ALTER, INDEX and DROP as well; "
    "for a reconciliation SELECT alone, there and on the business's schema"
)


def translate(error: DBAPIError | PoolTimeoutError, url: URL) -> OutboxError:
    """Translates a driver's error to ours, with the cure. The only table of errors' texts."""
    shown = _shown(url)
    if isinstance(error, PoolTimeoutError):
        return DatabaseUnavailable(f"no free connection to {shown}; raise the pool size or lower the load")
    failure = failure_of(error.orig)
    server_text = str(error.orig).splitlines()[0] if str(error.orig) else type(error.orig).__name__
    match failure:
        case Failure.DATABASE_MISSING | Failure.TABLE_MISSING:
            return _missing(failure, server_text, url)
        case Failure.LOGIN_REFUSED:
            return ConfigurationError(
                f"the database refused the user or its password at {shown} ({server_text}); "
                "check both, and the hosts from which this user may connect"
            )
        case Failure.PRIVILEGE_MISSING:
            return ConfigurationError(
                f"the user lacks a privilege at {shown} ({server_text}); check its grants on the outbox's schema: "
                f"{_GRANTS}"
            )
        case Failure.READ_ONLY_TRANSACTION:
            return ConfigurationError(
                f"this transaction of {shown} is READ ONLY ({server_text}); begin one that writes, and check "
                "transaction_read_only"
            )
        case Failure.READ_ONLY_SERVER:
            return DatabaseUnavailable(
                f"the database {shown} is read-only, so a replica or a primary that is being switched over "
                f"({server_text}); give the URL of the primary"
            )
        case Failure.LOG_FORMAT:
            return ConfigurationError(
                f"{shown} cannot log READ COMMITTED transactions ({server_text}); set binlog_format to ROW or MIXED "
                "there"
            )
        case Failure.STATEMENT_TOO_LARGE:
            return ConfigurationError(
                f"a statement was too large for {shown} ({server_text}); raise max_allowed_packet there"
            )
    if is_unreachable(error):
        in_file = failure is Failure.FILE_UNREACHABLE
        cure = "check that its folder is there and may be written to" if in_file else _CHECK_SERVER
        return DatabaseUnavailable(f"cannot reach the database {shown} ({server_text}); {cure}")
    return DatabaseUnavailable(f"the database {shown} failed a statement ({server_text})")


def _shown(url: URL) -> str:
    """Returns the URL for messages: without its password, and without options, which are mostly our own time-outs."""
    return url.set(query={}).render_as_string(hide_password=True)


def _missing(failure: Failure, server_text: str, url: URL) -> SchemaMissing:
    """Returns the error for a missing database of the URL, or for missing tables."""
    shown = _shown(url)
    if failure is Failure.DATABASE_MISSING and url.database and f"'{url.database}'" in server_text:
        return SchemaMissing(
            f"there is no database {url.database!r} at {shown}; create it, or name one that there is "
            "(with --schema, `outbox db upgrade` also takes a URL that names none, and ends with a slash)"
        )
    return SchemaMissing(
        f"the outbox tables are missing or too old in {shown} ({server_text}); run: outbox db upgrade --url URL"
    )


def error_code(error: DBAPIError) -> int | None:
    """Returns the server's error number, if the driver gives one."""
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def is_conflict(error: DBAPIError) -> bool:
    """Returns whether the server rolled a transaction back for another one, or had it wait for too long."""
    return failure_of(error.orig) in _CONFLICTS


def is_schema_missing(error: DBAPIError) -> bool:
    """Returns whether the error means that a table, schema or column of ours is missing."""
    return failure_of(error.orig) in _SCHEMA_MISSING


def is_read_only(error: DBAPIError) -> bool:
    """Returns whether the error means that this server rejects writes: a replica, or a primary in a switch-over."""
    return failure_of(error.orig) is Failure.READ_ONLY_SERVER


def is_unreachable(error: BaseException | None) -> bool:
    """Returns whether no connection was free, the server did not answer, or it ended the connection: another statement
    would fail as well.
    """
    if not isinstance(error, DBAPIError):
        return isinstance(error, PoolTimeoutError)
    failure = failure_of(error.orig)
    return failure in {Failure.UNREACHABLE, Failure.FILE_UNREACHABLE} or error.connection_invalidated


def is_mendable(error: DBAPIError) -> bool:
    """Returns whether translate() gives a cure that the driver's text lacks: tables, privileges, a read-only server."""
    return failure_of(error.orig) in _MENDABLE


def is_autocommit(connection: Connection) -> bool:
    """Returns whether each statement commits by itself. No I/O.

    The driver knows, where it can be asked: an option that SQLAlchemy refused, as in the middle of a transaction, stays
    among the connection's.
    """
    driver_connection = connection.connection.dbapi_connection
    if connection.dialect.name not in MYSQL_DIALECTS or driver_connection is None:
        # SQLite: prepare_sqlite begins real transactions whatever the driver's mode; an engine that asks for none is
        # taken at its word.
        return connection.engine.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    try:
        return connection.dialect.detect_autocommit_setting(driver_connection)
    except NotImplementedError:
        return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"


def _create(database: URL | str) -> Engine:
    url = read_url(database)
    database_named(url.get_backend_name())  # before its driver is looked for, which would not help
    try:
        arguments: dict[str, Any] = {}
        is_bounded = "connect_timeout" in url.query  # an argument would override the URL
        if url.get_backend_name() in MYSQL_DIALECTS and url.get_driver_name() == "pymysql" and not is_bounded:
            arguments["connect_args"] = {"connect_timeout": CONNECT_TIMEOUT_SECONDS}
        pings = url.get_backend_name() in MYSQL_DIALECTS
        options = {_POOL_PINGS: True} if pings else {}
        engine = create_engine(url, pool_pre_ping=pings, execution_options=options, **arguments)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigurationError(
            f"not a database URL that can work ({error}); use one like mysql+pymysql://user@host/database "
            "or sqlite:///file.db"
        ) from error
    event.listen(engine, "handle_error", _leave_read_only_server)
    return engine


def _leave_read_only_server(context: ExceptionContext) -> None:
    # After a switch-over by DNS the demoted primary answers every ping of the pool: only a new connection finds the new
    # primary. A disconnect makes the pool replace all connections that are older than this error.
    error = context.sqlalchemy_exception
    if isinstance(error, DBAPIError) and is_read_only(error):
        context.is_disconnect = True


def _replace_if_ended(dialect: Dialect, connection: Any, record: Any, _fairy: object) -> None:
    if record.info.pop(_IS_NEW, False):
        return
    try:
        if dialect.is_async:
            # SQLAlchemy 2.0.43 calls ping() of asyncmy and aiomysql as PyMySQL's is called: 1.2's needs no argument,
            # theirs does, and each checkout failed with a TypeError.
            connection.ping(reconnect=False)
        else:
            dialect.do_ping(connection)
    except dialect.loaded_dbapi.Error as error:
        raise DisconnectionError("the server has ended this connection") from error  # the pool opens another one


def _prepare_background(dialect: Dialect, connection: Any, record: Any) -> None:
    record.info[_IS_NEW] = True
    with closing(connection.cursor()) as cursor:
        # Again: a pool inherits the listeners of the business's engine, and these were called behind the first pin.
        pin_session(cursor)
        cursor.execute(
            f"SET SESSION innodb_lock_wait_timeout = {BACKGROUND_LOCK_WAIT_SECONDS}, "
            f"SESSION lock_wait_timeout = {BACKGROUND_LOCK_WAIT_SECONDS}"
        )
    # Set on the dialect, so that even an AUTOCOMMIT engine has transactions here: archiving and removing a row are one.
    dialect.set_isolation_level(connection, "READ COMMITTED")
    if hasattr(connection, "set_character_set"):  # for both server and driver; a URL may have charset=latin1
        connection.set_character_set("utf8mb4")
    elif dialect.is_async:
        connection.run_async(_speak_utf8mb4)
    connection.commit()


async def _speak_utf8mb4(driver_connection: Any) -> None:
    # asyncmy 0.2.18 uses an attribute that its character set lacks: there the URL's character set stays. All that the
    # sender reads and writes is ASCII, except the broker's error texts.
    with suppress(AttributeError):
        await driver_connection.set_charset("utf8mb4")


def _set_sqlite_pragmas(connection: Any, _record: object) -> None:
    _switch_off_autocommit(connection)
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_MS}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
    finally:
        cursor.close()


def _switch_off_autocommit(driver_connection: Any) -> None:
    # Since Python 3.12: with True COMMIT and ROLLBACK do nothing, with False a transaction is always open already.
    legacy = getattr(sqlite3, "LEGACY_TRANSACTION_CONTROL", None)
    if legacy is not None and getattr(driver_connection, "autocommit", legacy) != legacy:
        driver_connection.autocommit = True  # it ends the transaction in which nothing has happened yet
        driver_connection.autocommit = legacy


def _leave_out_autocommit(_dialect: Dialect, _record: object, _arguments: object, options: dict[str, Any]) -> None:
    options.pop("autocommit", None)  # aiosqlite has no attribute for it


def _begin(connection: Connection) -> None:
    locks_first = connection.get_execution_options().get(WRITE_LOCK_FIRST, False)
    driver_connection: Any = connection.connection.driver_connection
    _switch_off_autocommit(driver_connection)  # of a connection from before prepare_sqlite
    if not driver_connection.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if locks_first else "BEGIN")
    elif locks_first:  # a listener of the engine's own has begun it
        take_write_lock(connection)


def _refuse_second_begin(context: ExceptionContext) -> None:
    connection = context.connection
    is_beginning = connection is not None and not connection.in_transaction()
    if is_beginning and "within a transaction" in str(context.original_exception):
        raise ConfigurationError(
            "this engine has a listener that begins its transactions, and the outbox's had begun this one: add it "
            "before the Outbox, Inbox or consumer is made on the engine, which then leaves the BEGIN to it"
        ) from context.original_exception


def take_write_lock(connection: Connection) -> None:
    """Begin a transaction anew, with SQLite's write lock, that has only just begun and has no statement yet.

    SQLAlchemy 2.0 cannot tell the engine beforehand: its Sessions have no execution options. Costs two statements.

    Elsewhere, and where the driver begins transactions by itself, this does nothing. Raises OperationalError where the
    lock is not free in time.
    """
    if connection.dialect.name != "sqlite" or not connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
        return
    connection.exec_driver_sql("ROLLBACK")
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except BaseException:
        connection.exec_driver_sql("BEGIN")  # who goes on after this error must not write outside of a transaction
        raise
