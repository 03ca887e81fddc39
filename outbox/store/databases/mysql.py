"""What MySQL and MariaDB do differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, Final, Literal, cast

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    FromClause,
    Insert,
    Select,
    Table,
    TextClause,
    event,
    func,
    insert,
    literal_column,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import URL, Dialect
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import Pool
from sqlalchemy.types import TypeEngine

from outbox.store.databases.database_port import (
    BACKGROUND_LOCK_WAIT_SECONDS,
    NO_OPTIONS,
    Database,
    Failure,
    Write,
)
from outbox_core.common.mysql_session import pin_session
from outbox_core.common.table_namespace import TableNamespace, namespace_among

_UTF8: Final = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}

_CONNECT_TIMEOUT_SECONDS: Final = 10
_IS_NEW: Final = "outbox.is_new"
_IN_TRANSACTION: Final = 1
"""SERVER_STATUS_IN_TRANS, of the status that the protocol has in the answers without rows."""

_DEADLOCK: Final = 1213
_LOCK_WAIT_TIMEOUT: Final = 1205
_RECORD_CHANGED: Final = 1020  # MariaDB with innodb_snapshot_isolation, the default from 11.6.2 on
_OPTION_FORBIDS: Final = 1290  # --read-only, but other options as well
_CODES: Final[Mapping[Failure, frozenset[int]]] = {
    # 3101 is of group replication: another member changed the row first.
    Failure.CONFLICT: frozenset({_DEADLOCK, _RECORD_CHANGED, 3101}),
    Failure.LOCK_WAIT_TIMEOUT: frozenset({_LOCK_WAIT_TIMEOUT}),
    Failure.UNREACHABLE: frozenset({2002, 2003, 2005, 2006, 2013, 2055, 1040, 1053, 1927, 3024, 4031}),
    Failure.DATABASE_MISSING: frozenset({1049}),
    Failure.TABLE_MISSING: frozenset({1146, 1054}),
    Failure.INDEX_MISSING: frozenset({1176}),
    Failure.LOGIN_REFUSED: frozenset({1045, 1698}),
    Failure.PRIVILEGE_MISSING: frozenset({1044, 1142, 1143, 1227, 1370}),
    Failure.READ_ONLY_SERVER: frozenset({1836, 1874}),
    Failure.READ_ONLY_TRANSACTION: frozenset({1792}),
    Failure.STATEMENT_TOO_LARGE: frozenset({1153}),
    Failure.LOG_FORMAT: frozenset({1665}),
    Failure.SAVEPOINT_MISSING: frozenset({1305}),
    Failure.DUPLICATE_KEY: frozenset({1062, 1586}),
    Failure.ALTERED_BESIDE: frozenset({1050, 1060, 1061, 1684}),
}
_FAILURES: Final[Mapping[int, Failure]] = {code: failure for failure, codes in _CODES.items() for code in codes}
_ENDS_TRANSACTION: Final = frozenset(
    {
        _DEADLOCK,
        _RECORD_CHANGED,
        1206,  # the lock table is full
        1053,  # the server is shutting down
        1153,  # larger than max_allowed_packet: the server closes the connection
        3169,  # the session was killed
    }
)


class MySql(Database):
    """MySQL and MariaDB: one protocol, one storage engine."""

    names: frozenset[str] = frozenset({"mysql", "mariadb"})
    products: tuple[str, ...] = ("MySQL", "MariaDB")
    example_url: str = "mysql+pymysql://user@host/database"
    sync_drivers: Mapping[str, str] = {"asyncmy": "mysql+pymysql", "aiomysql": "mysql+pymysql"}
    paramstyle: Literal["format"] = "format"
    tables_a_statement_max: int = 2_048
    reads_snapshots: bool = True

    # -- the tables' namespace, and whose they are ---------------------------------------------------------------------

    has_schemas: bool = True
    default_port: int = 3306

    def namespace(self, schema: str | None, *, current: str | None) -> TableNamespace:
        return namespace_among(schema, current=current)

    def file_of(self, connection: Connection) -> None:
        return None

    def read_only_flag(self) -> ColumnElement[Any]:
        return literal_column("@@global.read_only")

    def case_folding_flag(self) -> ColumnElement[Any]:
        return literal_column("@@lower_case_table_names")

    def account(self, user: str, *, host: str) -> str:
        return f"{_quoted_text(user)}@{_quoted_text(host)}"

    def grant(self, privileges: str, *, schema: str, table: str | None, account: str, makes: bool = False) -> str:
        granted = f"CREATE, ALTER, INDEX, DROP, {privileges}" if makes else privileges
        name = "*" if table is None else _quoted_name(table)
        return f"GRANT {granted} ON {_quoted_name(schema)}.{name} TO {account};"

    # -- types -------------------------------------------------------------------------------------------------------

    table_options: Mapping[str, Any] = {
        f"{name}_{option}": value
        for name in ("mysql", "mariadb")
        for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
    }

    def ascii_type(self, length: int) -> TypeEngine[Any]:
        return mysql.VARCHAR(length, charset="ascii", collation="ascii_bin")

    def unicode_type(self, length: int) -> TypeEngine[Any]:
        return mysql.VARCHAR(length, **_UTF8)

    def long_text_type(self) -> TypeEngine[Any]:
        return mysql.MEDIUMTEXT(**_UTF8)

    def body_type(self) -> TypeEngine[Any]:
        return mysql.LONGBLOB()

    # -- expressions -------------------------------------------------------------------------------------------------

    def now_us(self) -> ColumnElement[int]:
        # Unlike NOW() and UNIX_TIMESTAMP(NOW(6)), independent of the session's time zone and of daylight saving.
        return literal_column("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))", BigInteger())

    def least(self, first: Any, second: Any) -> ColumnElement[Any]:
        return func.least(first, second)

    def greatest(self, first: Any, second: Any) -> ColumnElement[Any]:
        return func.greatest(first, second)

    # -- statements --------------------------------------------------------------------------------------------------

    def by_primary_key(self, statement: Write, dialect: Dialect) -> Write:
        # Without the hint they read the whole table if the keys are a large part of it (MariaDB also for a list of one
        # pair), and a DELETE then waits for rows that other transactions have not committed yet, and two settlements
        # can deadlock.
        hinted = statement.with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect.name)
        if isinstance(hinted, Delete):
            # A hint is allowed only in the multi-table form: DELETE table FROM table FORCE INDEX ...
            table = cast("Table", hinted.table)
            return hinted.prefix_with(_name_in_sql(dialect, table))
        return hinted

    def along_index(self, statement: Select[Any], table: FromClause, index: str, dialect: Dialect) -> Select[Any]:
        return statement.with_hint(table, f"FORCE INDEX ({index})", dialect.name)

    def insert_missing(self, table: Table) -> Insert:
        return insert(table).prefix_with("IGNORE")

    def insert_or_advance(
        self, table: Table, values: Mapping[str, Any], *, key: str, advanced: str, by: ColumnElement[Any]
    ) -> Insert:
        statement = mysql.insert(table).values(values)
        column = table.c[advanced]
        return statement.on_duplicate_key_update({advanced: func.greatest(column + by, statement.inserted[advanced])})

    def union_part(self, statement: Select[Any], name: str) -> Any:
        return statement.self_group()  # a sub-query of FROM would be materialized

    # -- the INSERT of messages --------------------------------------------------------------------------------------

    # Hexadecimal digits. Drivers differ in how they escape bytes: asyncmy writes backslashes, which have no effect
    # under NO_BACKSLASH_ESCAPES, so that a quote in a key would be SQL.

    def sent_text(self, text: str) -> str:
        return text.encode().hex()

    def stored_text(self, parameter: ColumnElement[Any]) -> ColumnElement[Any]:
        return func.convert(_unhex(parameter).op("USING")(literal_column("utf8mb4")))

    def sent_body(self, body: bytes) -> bytes | str:
        return body.hex()

    def stored_body(self, parameter: ColumnElement[Any]) -> ColumnElement[Any]:
        # An empty body's digits are NULL under EMPTY_STRING_IS_NULL (MariaDB).
        return func.coalesce(_unhex(parameter), literal_column("x''"))

    # -- sessions ----------------------------------------------------------------------------------------------------

    pings: bool = True
    locks_when_begun: bool = False

    def connect_arguments(self, url: URL) -> dict[str, Any]:
        if url.get_driver_name() == "pymysql" and "connect_timeout" not in url.query:  # it would override the URL
            return {"connect_args": {"connect_timeout": _CONNECT_TIMEOUT_SECONDS}}
        return {}

    def timeout_options(self, url: URL, *, connect_seconds: int, statement_seconds: int) -> Mapping[str, str]:
        if url.get_driver_name() != "pymysql":
            return NO_OPTIONS
        statement = str(statement_seconds)
        return {"connect_timeout": str(connect_seconds), "read_timeout": statement, "write_timeout": statement}

    def prepare_engine(self, engine: Engine) -> None:
        pass

    def prepare_background(self, engine: Engine, *, is_pinged: bool) -> None:
        self.pin_connections(engine.pool)
        event.listen(engine.pool, "connect", partial(_prepare_background, engine.dialect))
        if not is_pinged:
            self.replace_ended(engine.pool, engine.dialect)

    def replace_ended(self, pool: Pool, dialect: Dialect) -> None:
        event.listen(pool, "checkout", partial(_replace_if_ended, dialect))

    def pin_connections(self, pool: Pool | Engine) -> None:
        # In front: SQLAlchemy asks the first connection of a dialect its own questions, which a server may refuse.
        event.listen(pool, "connect", _pin, insert=True)

    def bound_lock_waits(self, driver_connection: Any, seconds: int) -> None:
        with driver_connection.cursor() as cursor:
            cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {seconds}")
        driver_connection.commit()

    @contextmanager
    def short_table_waits(self, connection: Connection, seconds: int) -> Iterator[None]:
        previous_seconds = connection.exec_driver_sql("SELECT @@SESSION.lock_wait_timeout").scalar_one()
        connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {seconds:d}")
        try:
            yield
        finally:
            if not connection.invalidated:
                connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {previous_seconds:d}")

    def is_autocommit(self, connection: Connection) -> bool:
        # The driver knows, where it can be asked: an option that SQLAlchemy refused, as in the middle of a transaction,
        # stays among the connection's.
        driver_connection = connection.connection.dbapi_connection
        if driver_connection is None:
            return connection.engine.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
        try:
            return connection.dialect.detect_autocommit_setting(driver_connection)
        except NotImplementedError:
            return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"

    def take_write_lock(self, connection: Connection) -> None:
        pass

    # -- the limits of a server ----------------------------------------------------------------------------------------

    statement_bytes_query: str = "SELECT @@max_allowed_packet LIMIT 1"
    storage_engine_query: str = (
        "SELECT t.engine, e.transactions FROM information_schema.tables t "
        "LEFT JOIN information_schema.engines e ON e.engine = t.engine "
        "WHERE t.table_schema = %s AND t.table_name = %s LIMIT 1"
    )
    open_transactions: str = "information_schema.innodb_trx"

    # -- the effects of statements on their transaction ----------------------------------------------------------------

    # https://dev.mysql.com/doc/refman/8.4/en/implicit-commit.html and
    # https://mariadb.com/kb/en/sql-statements-that-cause-an-implicit-commit/. XA only reads here: the servers reject it
    # inside a transaction that it did not begin, and what it begins ends by SQLAlchemy's own two-phase commit alone.
    ends_transaction: re.Pattern[str] = re.compile(
        r"START\s+TRANSACTION\b"
        r"|(?:CREATE|DROP)\s+(?!(?:OR\s+REPLACE\s+)?TEMPORARY\b)"
        r"|(?:ALTER|RENAME|TRUNCATE|GRANT|REVOKE|FLUSH|RESET|INSTALL|UNINSTALL)\b"
        r"|(?:LOCK|UNLOCK)\s+TABLES?\b"
        r"|(?:ANALYZE|CHECK|OPTIMIZE|REPAIR)\s+(?:NO_WRITE_TO_BINLOG\s+|LOCAL\s+)?TABLES?\b"
        r"|(?:CACHE|LOAD)\s+INDEX\b"
        r"|(?:START|STOP)\s+(?:ALL\s+)?(?:SLAVES?|REPLICAS?)\b|CHANGE\s+(?:MASTER|REPLICATION)\b"
        r"|SET\s+PASSWORD\b"
        r"|SET\b[^;]*\bAUTOCOMMIT\b\s*:?=\s*(?:1|ON|TRUE|DEFAULT)\b",
        re.IGNORECASE,
    )
    # Stored procedures, prepared statements, and MariaDB's compound statements, which run outside of procedures too; in
    # its Oracle mode BEGIN alone opens one. Functions and triggers are left out: the servers let none end a
    # transaction.
    may_end_transaction: re.Pattern[str] = re.compile(
        r"BEGIN\s+(?!WORK\b)\w|(?:CALL|EXECUTE|IF|CASE|WHILE|REPEAT|FOR|LOOP|DECLARE)\b", re.IGNORECASE
    )
    runs_several_statements: bool = True  # asyncmy and aiomysql send several unasked, others where they are told to
    begins_by_itself: bool = True
    # mysqlclient has none, and asyncmy 0.2.18 ignores a status of 0, so that it says "in a transaction" for ever.
    # PyMySQL and aiomysql take no status from an answer with rows: it may be late there, so statements are read as
    # well.
    transaction_status: Mapping[str, Callable[[Any], bool]] = {
        "pymysql": lambda connection: connection.server_status & _IN_TRANSACTION != 0,
        "aiomysql": lambda connection: connection.driver_connection.get_transaction_status(),
        "mysqlconnector": lambda connection: connection.in_transaction,
    }

    def begin_before_rows(self, connection: Connection, cursor: Any) -> None:
        pass

    # -- errors ------------------------------------------------------------------------------------------------------

    def failure(self, driver_error: BaseException) -> Failure | None:
        code = _code(driver_error)
        if code == _OPTION_FORBIDS:
            return Failure.READ_ONLY_SERVER if "read" in str(driver_error).lower() else None
        return None if code is None else _FAILURES.get(code)

    def has_rolled_back(
        self, driver_error: BaseException | None, connection: Connection, status_shows_end: Callable[[], bool]
    ) -> bool:
        # Always for a deadlock's victim; for a lock wait only if it is so configured. Errors of a single statement (a
        # killed query, NOWAIT, a duplicate) leave the transaction open.
        code = _code(driver_error)
        return code in _ENDS_TRANSACTION or (code == _LOCK_WAIT_TIMEOUT and _rolls_back_on_timeout(connection))


def _name_in_sql(dialect: Dialect, table: Table) -> TextClause:
    """Returns a table's name as the server reads it in SQL, quoted where it needs it. SQLAlchemy's own quoting doubles
    % for the driver, which its text() does as well; and there a colon in a name would be a parameter's.
    """
    quote = dialect.identifier_preparer.quote
    name = ".".join(quote(part) for part in (table.schema, table.name) if part is not None)
    if dialect.paramstyle in {"format", "pyformat"}:
        name = name.replace("%%", "%")
    return text(name.replace(":", r"\:"))


def _quoted_name(name: str) -> str:
    doubled = name.replace("`", "``")  # by hand: SQLAlchemy also doubles %, which no driver undoes here
    return f"`{doubled}`"


def _quoted_text(value: str) -> str:
    doubled = value.replace("\\", "\\\\").replace("'", "''")
    return f"'{doubled}'"


def _pin(connection: Any, _record: object) -> None:
    with closing(connection.cursor()) as cursor:
        pin_session(cursor)


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


def _code(driver_error: BaseException | None) -> int | None:
    """Returns the server's error number, if the driver gives one."""
    code = driver_error.args[0] if driver_error is not None and driver_error.args else None
    return code if isinstance(code, int) else None


def _rolls_back_on_timeout(connection: Connection) -> bool:
    cursor: Any = connection.connection.cursor()
    try:
        cursor.execute("SELECT @@innodb_rollback_on_timeout")
        row = cursor.fetchone()
    except connection.dialect.loaded_dbapi.Error:
        return True
    finally:
        cursor.close()
    return bool(row and row[0])


def _unhex(digits: ColumnElement[Any]) -> ColumnElement[Any]:
    # UNHEX reads bytes: under a collation_connection of utf16 or utf32 each digit has a zero before it: all are NULL.
    return func.unhex(func.convert(digits.op("USING")(literal_column("ascii"))))
