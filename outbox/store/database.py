"""Database engines with the settings that the outbox needs, and the translation of driver errors.

No tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.store.database_url import read_url
from outbox.store.databases.database_port import WRITE_LOCK_FIRST, Failure
from outbox.store.databases.supported import EXAMPLE_URLS, database_named, database_of, failure_of, known_database
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, OutboxError, SchemaMissing
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)
T = TypeVar("T")

_POOL_PINGS: Final = "outbox_pool_pings"
"""The execution option of engines whose pool pings a connection before it lends it, as those that open_engine makes."""

CONFLICT_RETRIES_MAX: Final = 3
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
    except that SQLite is switched to real transactions (see Sqlite.prepare_engine). Raises ConfigurationError for an
    unsupported database.
    """
    if isinstance(database, AsyncEngine):
        engine = database.sync_engine
    elif isinstance(database, Engine):
        engine = database
    else:
        engine = _create(database)
    database_of(engine.dialect).prepare_engine(engine)
    return engine


def background_engine(engine: Engine) -> Engine:
    """Returns a second engine on the database with its own pool: background work never takes a business connection.

    Its connections have the settings of Database.prepare_background, and leave a server that became read-only. They are
    made by the same driver, connect_args and creator as the given engine's; those of an async driver are for an
    AsyncBackground.
    """
    second = Engine(engine.pool.recreate(), engine.dialect, engine.url)
    is_pinged = engine.get_execution_options().get(_POOL_PINGS, False)
    database_of(engine.dialect).prepare_background(second, is_pinged=is_pinged)
    event.listen(second, "handle_error", _leave_read_only_server)
    return second


def writing_engine(engine: Engine) -> Engine:
    """Returns the engine for transactions that write: on SQLite they acquire the write lock when they begin."""
    return engine.execution_options(**{WRITE_LOCK_FIRST: True})


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


def is_duplicate(error: DBAPIError) -> bool:
    """Returns whether there is a row of this key. An IntegrityError may also say that a row breaks another rule."""
    return failure_of(error.orig) is Failure.DUPLICATE_KEY


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


def ask_driver(connection: Connection, query: str, *parameters: str | None) -> list[Any]:
    """Returns the rows of a query by the driver alone: nothing of SQLAlchemy's may begin a transaction for it. `query`
    is as SQLAlchemy compiles it, with each % doubled for the drivers that format parameters into it.

    Raises DBAPIError where the connection is lost, as SQLAlchemy does for a statement of its own: else the rollback
    that follows fails with an error that says nothing and hides this one, which a driver tells its first user alone.
    Raises the driver's error for any other.
    """
    dialect: Any = connection.dialect
    driver_error = dialect.loaded_dbapi.Error
    with closing(connection.connection.cursor()) as cursor:
        try:
            cursor.execute(query, parameters)
            return list(cursor.fetchall())
        except driver_error as error:
            if not dialect.is_disconnect(error, connection.connection, cursor):
                raise
            connection.invalidate(error)
            raise DBAPIError.instance(
                query, parameters, error, driver_error, connection_invalidated=True, dialect=dialect
            ) from error


def is_autocommit(connection: Connection) -> bool:
    """Returns whether each statement commits by itself. No I/O."""
    database = known_database(connection.dialect)
    if database is None:
        return connection.engine.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    return database.is_autocommit(connection)


def _create(database: URL | str) -> Engine:
    url = read_url(database)
    product = database_named(url.get_backend_name())  # before its driver is looked for, which would not help
    try:
        options = {_POOL_PINGS: True} if product.pings else {}
        arguments = product.connect_arguments(url)
        is_async = url.get_dialect().is_async
        # SQLAlchemy's own ping serves sync drivers alone: that of 2.0 fails on asyncmy and aiomysql, at each checkout.
        pings_itself = product.pings and not is_async
        engine = create_engine(url, pool_pre_ping=pings_itself, execution_options=options, **arguments)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigurationError(f"not a database URL that can work ({error}); use one like {EXAMPLE_URLS}") from error
    if is_async:
        product.replace_ended(engine.pool, engine.dialect)
    event.listen(engine, "handle_error", _leave_read_only_server)
    return engine


def _leave_read_only_server(context: ExceptionContext) -> None:
    # After a switch-over by DNS the demoted primary answers every ping of the pool: only a new connection finds the new
    # primary. A disconnect makes the pool replace all connections that are older than this error.
    error = context.sqlalchemy_exception
    if isinstance(error, DBAPIError) and is_read_only(error):
        context.is_disconnect = True
