"""What SQLite does differently."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    Insert,
    Select,
    Table,
    event,
    func,
    insert,
    literal_column,
    select,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, Dialect, ExceptionContext
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool

from outbox.store.databases.database_port import NO_OPTIONS, WRITE_LOCK_FIRST, Database, Failure, Write
from outbox_core.common.errors import ConfigurationError
from outbox_core.common.table_namespace import SQLITE_NAMESPACE, TableNamespace

_BUSY_TIMEOUT_MS: Final = 30_000
_FAILURES: Final[Mapping[str, Failure]] = {
    "no such table": Failure.TABLE_MISSING,
    "has no column named": Failure.TABLE_MISSING,
    "unable to open database file": Failure.FILE_UNREACHABLE,
    "UNIQUE constraint failed": Failure.DUPLICATE_KEY,
}
"""By a part of the error's text: a missing table has no number of its own."""


class Sqlite(Database):
    """SQLite: one file, one writer, texts compared byte by byte and types that bound nothing."""

    names: frozenset[str] = frozenset({"sqlite"})
    products: tuple[str, ...] = ("SQLite",)
    example_url: str = "sqlite:///file.db"
    sync_drivers: Mapping[str, str] = {"aiosqlite": "sqlite"}
    paramstyle: Literal["qmark"] = "qmark"
    tables_a_statement_max: int = 400  # of at most 500 SELECTs in a compound
    reads_snapshots: bool = False

    # -- the tables' namespace, and whose they are ---------------------------------------------------------------------

    has_schemas: bool = False
    default_port: None = None

    def namespace(self, schema: str | None, *, current: str | None) -> TableNamespace:
        return SQLITE_NAMESPACE

    def file_of(self, connection: Connection) -> str:
        with closing(connection.connection.cursor()) as cursor:
            cursor.execute("PRAGMA database_list")
            files: list[tuple[Any, ...]] = list(cursor.fetchall())
        return next(str(Path(file).resolve()) for _, name, file in files if name == "main")

    def read_only_flag(self) -> ColumnElement[Any]:
        return literal_column("0")

    def case_folding_flag(self) -> ColumnElement[Any]:
        return literal_column("0")

    def account(self, user: str, *, host: str) -> str:
        raise ConfigurationError("SQLite has no users: whoever may write the file has every grant")

    def grant(self, privileges: str, *, schema: str, table: str | None, account: str, makes: bool = False) -> str:
        return self.account(account, host="")  # which raises

    # -- types -------------------------------------------------------------------------------------------------------

    table_options: Mapping[str, Any] = NO_OPTIONS

    def ascii_type(self, length: int) -> None:
        return None

    def unicode_type(self, length: int) -> None:
        return None

    def long_text_type(self) -> None:
        return None

    def body_type(self) -> None:
        return None

    # -- expressions -------------------------------------------------------------------------------------------------

    def now_us(self) -> ColumnElement[int]:
        # Its clock is exact to the millisecond.
        return literal_column("(CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER) * 1000)", BigInteger())

    def least(self, first: Any, second: Any) -> ColumnElement[Any]:
        return func.min(first, second)

    def greatest(self, first: Any, second: Any) -> ColumnElement[Any]:
        return func.max(first, second)

    # -- statements --------------------------------------------------------------------------------------------------

    def by_primary_key(self, statement: Write, dialect: Dialect) -> Write:
        return statement

    def along_index(self, statement: Select[Any], table: FromClause, index: str, dialect: Dialect) -> Select[Any]:
        return statement

    def insert_missing(self, table: Table) -> Insert:
        return insert(table).prefix_with("OR IGNORE")

    def insert_or_advance(
        self, table: Table, values: Mapping[str, Any], *, key: str, advanced: str, by: ColumnElement[Any]
    ) -> Insert:
        statement = sqlite.insert(table).values(values)
        column = table.c[advanced]
        return statement.on_conflict_do_update(
            index_elements=[key], set_={advanced: func.max(column + by, statement.excluded[advanced])}
        )

    def union_part(self, statement: Select[Any], name: str) -> Any:
        return select(statement.subquery(name))  # it accepts no parentheses with a LIMIT

    # -- the INSERT of messages --------------------------------------------------------------------------------------

    def sent_text(self, text: str) -> str:
        return text

    def stored_text(self, parameter: ColumnElement[Any]) -> ColumnElement[Any]:
        return parameter

    def sent_body(self, body: bytes) -> bytes | str:
        return body

    def stored_body(self, parameter: ColumnElement[Any]) -> ColumnElement[Any]:
        return parameter

    # -- sessions ----------------------------------------------------------------------------------------------------

    pings: bool = False
    locks_when_begun: bool = True

    def connect_arguments(self, url: URL) -> dict[str, Any]:
        return {}

    def timeout_options(self, url: URL, *, connect_seconds: int, statement_seconds: int) -> Mapping[str, str]:
        return NO_OPTIONS

    def prepare_engine(self, engine: Engine) -> None:
        """Give it BEGIN, savepoints inside it, WAL, a busy timeout.

        The driver's legacy mode begins a transaction late and commits it when the first savepoint is released, which
        would commit half a business transaction. With WRITE_LOCK_FIRST the write lock is acquired first; other
        transactions begin as is SQLite's default, so that read-only ones do not wait. An engine may begin its
        transactions in a listener of its own, as SQLAlchemy's manual shows, and may set the driver's `autocommit`.
        """
        if isinstance(engine.pool, StaticPool | SingletonThreadPool):
            raise ConfigurationError(
                "an SQLite database in memory cannot be shared with the sender's thread; use a file: sqlite:///file.db"
            )
        if not event.contains(engine, "begin", _begin):
            event.listen(engine, "connect", _set_pragmas)
            event.listen(engine, "begin", _begin)
            event.listen(engine, "handle_error", _refuse_second_begin)
            if engine.dialect.is_async:
                event.listen(engine, "do_connect", _leave_out_autocommit)

    def prepare_background(self, engine: Engine, *, is_pinged: bool) -> None:
        event.listen(engine, "begin", _begin)
        engine.update_execution_options(**{WRITE_LOCK_FIRST: True})

    def replace_ended(self, pool: Pool, dialect: Dialect) -> None:
        pass

    def pin_connections(self, pool: Pool | Engine) -> None:
        pass

    def bound_lock_waits(self, driver_connection: Any, seconds: int) -> None:
        pass

    def short_table_waits(self, connection: Connection, seconds: int) -> AbstractContextManager[None]:
        return nullcontext()

    def is_autocommit(self, connection: Connection) -> bool:
        # prepare_engine begins real transactions whatever the driver's mode; an engine that asks for none is taken at
        # its word.
        return connection.engine.get_execution_options().get("isolation_level") == "AUTOCOMMIT"

    def take_write_lock(self, connection: Connection) -> None:
        if not connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
            return
        connection.exec_driver_sql("ROLLBACK")
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except BaseException:
            connection.exec_driver_sql("BEGIN")  # who goes on after this error must not write outside of a transaction
            raise

    # -- the limits of a server ----------------------------------------------------------------------------------------

    statement_bytes_query: None = None
    storage_engine_query: None = None
    open_transactions: str = "a process that has the file open"

    # -- the effects of statements on their transaction ----------------------------------------------------------------

    ends_transaction: None = None
    may_end_transaction: None = None
    runs_several_statements: bool = False
    begins_by_itself: bool = False
    transaction_status: Mapping[str, Callable[[Any], bool]] = {
        "pysqlite": lambda connection: connection.in_transaction,
        "aiosqlite": lambda connection: connection.driver_connection.in_transaction,
    }

    def begin_before_rows(self, connection: Connection, cursor: Any) -> None:
        # As the servers and its driver's own mode do before a row is written: behind a COMMIT by hand the row would
        # stand at once, whatever becomes of the Session and its messages.
        driver_connection: Any = connection.connection.driver_connection
        if not driver_connection.in_transaction:  # the COMMIT may have failed
            cursor.execute("BEGIN")

    # -- errors ------------------------------------------------------------------------------------------------------

    def failure(self, driver_error: BaseException) -> Failure | None:
        if driver_error.args and isinstance(driver_error.args[0], int):
            return None  # an error of MySQL's, with its number: the text may be that of a trigger of the business's
        error_text = str(driver_error)
        return next((failure for part, failure in _FAILURES.items() if part in error_text), None)

    def has_rolled_back(
        self, driver_error: BaseException | None, connection: Connection, status_shows_end: Callable[[], bool]
    ) -> bool:
        # Errors of OR ROLLBACK, ON CONFLICT ROLLBACK, RAISE(ROLLBACK) and of a full disk do, which no text says.
        return status_shows_end()


def _set_pragmas(connection: Any, _record: object) -> None:
    _switch_off_autocommit(connection)
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
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
    _switch_off_autocommit(driver_connection)  # of a connection from before prepare_engine
    if not driver_connection.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if locks_first else "BEGIN")
    elif locks_first:  # a listener of the engine's own has begun it
        SQLITE.take_write_lock(connection)


def _refuse_second_begin(context: ExceptionContext) -> None:
    connection = context.connection
    is_beginning = connection is not None and not connection.in_transaction()
    if is_beginning and "within a transaction" in str(context.original_exception):
        raise ConfigurationError(
            "this engine has a listener that begins its transactions, and the outbox's had begun this one: add it "
            "before the Outbox, Inbox or consumer is made on the engine, which then leaves the BEGIN to it"
        ) from context.original_exception


SQLITE: Final = Sqlite()
