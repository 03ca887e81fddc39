"""Database: the questions whose answers differ by database, each asked once. Opens no connection.

One class, so that whoever adds a database reads this page from top to bottom and answers it in one file, beside
mysql.py and sqlite.py; supported.py then lists that file. Nothing else of the SDK, of the compensator and of the
revisions asks which database it is on.

What they take for granted of each, and ask no question for: SQLAlchemy has a dialect of it, which knows the schema that
a connection is in (`default_schema_name`) and whether an error is a disconnect; where there are schemas, CREATE SCHEMA
IF NOT EXISTS and information_schema.tables; SAVEPOINT, ROLLBACK TO and RELEASE, whose names are compared without case;
COMMIT, ROLLBACK, BEGIN and END outside of a savepoint end a transaction. And a transaction goes on after a statement of
it that failed, unless has_rolled_back() says otherwise: so an inbox's mark finds out that it is a duplicate, and a
connection that it is on another database, without a savepoint.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar

from sqlalchemy import ColumnElement, Connection, Delete, Engine, FromClause, Insert, Select, Table, Update
from sqlalchemy.engine import URL, Dialect
from sqlalchemy.pool import Pool
from sqlalchemy.types import TypeEngine

from outbox_core.common.table_namespace import TableNamespace

Write = TypeVar("Write", Update, Delete)

WRITE_LOCK_FIRST: Final = "outbox_write_lock_first"
"""The execution option of Connections whose transactions take SQLite's write lock when they begin (BEGIN IMMEDIATE).

A transaction that reads first cannot become a writer after another one has written: it fails immediately with "database
is locked". One that begins as a writer waits for the lock.
"""
BACKGROUND_LOCK_WAIT_SECONDS: Final = 5
"""How long background work waits for a lock on a row or table, whatever the server's setting: it is then retried, by
when at least an operator's transaction must have ended."""


class Failure(StrEnum):
    """What an error of a driver means. An error has one meaning, and none where nobody acts on it."""

    CONFLICT = "conflict"
    """The server rolled the transaction back for another one: the same again may succeed."""
    LOCK_WAIT_TIMEOUT = "lock_wait_timeout"
    """Another transaction held a row or table for too long: a conflict as well."""
    UNREACHABLE = "unreachable"
    """The server did not answer, takes no connection, or ended this one: another statement would fail as well."""
    FILE_UNREACHABLE = "file_unreachable"
    """The database's file cannot be opened."""
    DATABASE_MISSING = "database_missing"
    TABLE_MISSING = "table_missing"
    """A table or a column is missing."""
    INDEX_MISSING = "index_missing"
    """A hint names an index that the table lacks."""
    LOGIN_REFUSED = "login_refused"
    PRIVILEGE_MISSING = "privilege_missing"
    READ_ONLY_SERVER = "read_only_server"
    """A replica, or a primary in a switch-over."""
    READ_ONLY_TRANSACTION = "read_only_transaction"
    STATEMENT_TOO_LARGE = "statement_too_large"
    LOG_FORMAT = "log_format"
    """The server's log of changes cannot hold transactions of our isolation level."""
    SAVEPOINT_MISSING = "savepoint_missing"
    """A statement names a savepoint that the transaction has not, or a stored procedure that there is not."""
    DUPLICATE_KEY = "duplicate_key"
    """There is a row of this primary or unique key; no other rule that a row breaks."""
    ALTERED_BESIDE = "altered_beside"
    """There is a table, column or index of this name, or a table cannot be described while it is altered."""


class Database(ABC):
    """What one database does differently. Stateless, so thread-safe; a statement is for its own dialect alone."""

    names: frozenset[str]
    """SQLAlchemy's names of its dialects, which URLs begin with."""
    products: tuple[str, ...]
    """What its makers call it, for messages: several names where one file is of several."""
    example_url: str
    """A URL of it, for messages."""
    sync_drivers: Mapping[str, str]
    """By SQLAlchemy's name of each async driver, the dialect and driver that reach the same database from a command."""
    paramstyle: Literal["qmark", "format"]
    """The positional style that all its drivers accept in a tuple of parameters."""
    tables_a_statement_max: int
    """How many SELECTs a UNION ALL may have."""
    reads_snapshots: bool
    """Whether a transaction's plain reads may miss what was committed since its first one, and locking reads see it."""

    # -- the tables' namespace, and whose they are ---------------------------------------------------------------------

    has_schemas: bool
    """Whether a server has schemas (MySQL calls them databases): the outbox's tables may then have one of their own,
    and messages may be split over several tables. If so, namespace() is asked once a connection has said which one
    it is in.
    """
    default_port: int | None
    """The port of a URL that names none; None: the database is a file, which the URL's `database` names."""

    @abstractmethod
    def namespace(self, schema: str | None, *, current: str | None) -> TableNamespace:
        """Returns where the outbox's tables are: `schema` is the one that the user names, if any, `current` the one
        that a new connection of the business is in. Raises ConfigurationError if there is neither, where there are
        schemas.
        """

    @abstractmethod
    def file_of(self, connection: Connection) -> str | None:
        """Returns the resolved path of the file that a connection has open, which is the identity of its database;
        asked by the driver alone, so that no transaction begins. None on a server, without I/O: a row of the tables
        tells them from others by whatever node or address they are reached.
        """

    @abstractmethod
    def read_only_flag(self) -> ColumnElement[Any]:
        """Returns the server's flag that it takes no writes, as a follower: 0, OFF or false where it takes some.
        Selected beside the row of file_of(), in one statement.
        """

    @abstractmethod
    def case_folding_flag(self) -> ColumnElement[Any]:
        """Returns the server's flag that it takes names of schemas that differ in case alone for one: 0 where not."""

    @abstractmethod
    def account(self, user: str, *, host: str) -> str:
        """Returns a user, quoted as grant() names it; `host`: where it connects from, for a server that distinguishes
        users by that. Raises ConfigurationError where there are no users.
        """

    @abstractmethod
    def grant(self, privileges: str, *, schema: str, table: str | None, account: str, makes: bool = False) -> str:
        """Returns the statement, with its semicolon, that grants an account() SELECT, INSERT, UPDATE, DELETE or several
        of these on a table; None: on all tables of the schema, those that are yet to be made as well. `makes`: and to
        create, alter, index and drop.
        """

    # -- types -------------------------------------------------------------------------------------------------------

    table_options: Mapping[str, Any]
    """The options of SQLAlchemy's Table for each of ours: transactions, and the comparison of texts byte by byte."""

    @abstractmethod
    def ascii_type(self, length: int) -> TypeEngine[Any] | None:
        """Returns the type of up to `length` ASCII characters that are compared byte by byte; None: the generic type
        is one, as below.
        """

    @abstractmethod
    def unicode_type(self, length: int) -> TypeEngine[Any] | None:
        """Returns the type of up to `length` characters of Unicode that are compared byte by byte."""

    @abstractmethod
    def long_text_type(self) -> TypeEngine[Any] | None:
        """Returns the type of Unicode texts of up to 16 MB."""

    @abstractmethod
    def body_type(self) -> TypeEngine[Any] | None:
        """Returns the type of bytes as long as a body may be."""

    # -- expressions -------------------------------------------------------------------------------------------------

    @abstractmethod
    def now_us(self) -> ColumnElement[int]:
        """Returns the database's UTC clock, microseconds since the Unix epoch, whatever the session's time zone.

        It alone decides when a row is due and when a lease ends: clocks of application hosts differ, and step.
        """

    @abstractmethod
    def least(self, first: Any, second: Any) -> ColumnElement[Any]:
        """Returns the lesser of two values; NULL where one is."""

    @abstractmethod
    def greatest(self, first: Any, second: Any) -> ColumnElement[Any]:
        """Returns the greater of two values; NULL where one is."""

    # -- statements --------------------------------------------------------------------------------------------------

    @abstractmethod
    def by_primary_key(self, statement: Write, dialect: Dialect) -> Write:
        """Returns an UPDATE or DELETE of rows named by their primary keys such that it reads, locks and waits for no
        others.
        """

    @abstractmethod
    def along_index(self, statement: Select[Any], table: FromClause, index: str, dialect: Dialect) -> Select[Any]:
        """Returns a SELECT such that it scans this index of the table in its order, so that LIMIT ends the scan. May
        fail with the error of a missing index where the table has none of this name.
        """

    @abstractmethod
    def insert_missing(self, table: Table) -> Insert:
        """Returns an INSERT that leaves out rows whose keys are there already."""

    @abstractmethod
    def insert_or_advance(
        self, table: Table, values: Mapping[str, Any], *, key: str, advanced: str, by: ColumnElement[Any]
    ) -> Insert:
        """Returns an INSERT of one row that, where its `key` is there, advances the column `advanced` of that row: by
        `by`, and at least to the value that it would have inserted. The row is locked until the transaction ends.
        """

    @abstractmethod
    def union_part(self, statement: Select[Any], name: str) -> Any:
        """Returns a SELECT with a LIMIT of its own as a part of a UNION ALL; `name` is unique among the parts."""

    # -- the INSERT of messages --------------------------------------------------------------------------------------

    @abstractmethod
    def sent_text(self, text: str) -> str:
        """Returns what the driver is given for a text, such that stored_text() stores it whatever the connection's
        character set, SQL mode and driver's escapes are.
        """

    @abstractmethod
    def stored_text(self, parameter: ColumnElement[Any]) -> ColumnElement[Any]:
        """Returns the text of a parameter of sent_text(); NULL for NULL."""

    @abstractmethod
    def sent_body(self, body: bytes) -> bytes | str:
        """Returns what the driver is given for a body, which stored_body() stores as it is."""

    @abstractmethod
    def stored_body(self, parameter: ColumnElement[Any]) -> ColumnElement[Any]:
        """Returns the bytes of a parameter of sent_body(), an empty body's as well."""

    # -- sessions ----------------------------------------------------------------------------------------------------

    pings: bool
    """Whether a server may end a connection that nobody uses, so that a pool asks it before it lends it."""
    locks_when_begun: bool
    """Whether a transaction that will write takes the write lock when it begins (see WRITE_LOCK_FIRST)."""

    @abstractmethod
    def connect_arguments(self, url: URL) -> dict[str, Any]:
        """Returns arguments of create_engine() that bound how long a new connection may take, unless the URL does."""

    @abstractmethod
    def timeout_options(self, url: URL, *, connect_seconds: int, statement_seconds: int) -> Mapping[str, str]:
        """Returns options of the URL with which its driver gives up a new connection, and a statement that the server
        does not answer, after so long; none where the driver has no such options.
        """

    @abstractmethod
    def prepare_engine(self, engine: Engine) -> None:
        """Give an engine of the business real transactions, with savepoints inside them, where its driver has others.
        Idempotent. Raises ConfigurationError where it cannot serve several threads.
        """

    @abstractmethod
    def prepare_background(self, engine: Engine, *, is_pinged: bool) -> None:
        """Give an engine with a pool of its own what background work needs, whatever the business's settings are.

        READ COMMITTED: our DELETE and UPDATE must never lock a gap that a producer's INSERT needs. Unicode in both
        directions, or keys would be read back as question marks. Waits of BACKGROUND_LOCK_WAIT_SECONDS at most; the
        session variables of pin_connections(). A connection that the server has ended, since it was idle for too long,
        is replaced before it is used; `is_pinged`: the pool does so already.
        """

    @abstractmethod
    def replace_ended(self, pool: Pool, dialect: Dialect) -> None:
        """Have a pool ask a connection before it lends it, and replace one that the server has ended, since it was idle
        for too long: as SQLAlchemy's own ping does, on every driver.
        """

    @abstractmethod
    def pin_connections(self, pool: Pool | Engine) -> None:
        """Pin the session variables on which our statements depend on all connections that it makes, before anybody's
        first statement there.
        """

    @abstractmethod
    def bound_lock_waits(self, driver_connection: Any, seconds: int) -> None:
        """Have a new connection of background work wait for a row's lock for so long at most."""

    @abstractmethod
    def short_table_waits(self, connection: Connection, seconds: int) -> AbstractContextManager[None]:
        """Limits the waits of the session's DDL for tables to this time inside the block."""

    @abstractmethod
    def is_autocommit(self, connection: Connection) -> bool:
        """Returns whether each statement commits by itself. No I/O."""

    @abstractmethod
    def take_write_lock(self, connection: Connection) -> None:
        """Begin a transaction anew, with the write lock, that has only just begun and has no statement yet; where only
        rows are locked, and where the driver begins transactions by itself, this does nothing.

        SQLAlchemy 2.0 cannot tell the engine beforehand: its Sessions have no execution options. Raises
        OperationalError where the lock is not free in time.
        """

    # -- the limits of a server ----------------------------------------------------------------------------------------

    statement_bytes_query: str | None
    """Selects the most bytes that a statement may have on this connection, in one row, for the driver's cursor; None:
    as many as a body that the outbox takes.
    """
    storage_engine_query: str | None
    """Selects the storage engine of a table, and "YES" if it keeps transactions, by schema and name as two parameters
    of the driver's cursor; no row where there is no such table. None: all tables keep them.
    """
    open_transactions: str
    """Where an operator finds the open transaction that keeps an upgrade waiting for a table, for messages."""

    # -- the effects of statements on their transaction ----------------------------------------------------------------

    ends_transaction: re.Pattern[str] | None
    """Matches the beginning of statements that end a transaction, with an implicit commit for instance, besides COMMIT,
    ROLLBACK, BEGIN and END; a transaction that has messages refuses them before they are sent.
    """
    may_end_transaction: re.Pattern[str] | None
    """Matches the beginning of statements that run others which are not in their text, as stored procedures do, and may
    end a transaction with them: a savepoint of ours tells it afterwards. Matched before `ends_transaction`.
    """
    runs_several_statements: bool
    """Whether a driver sends several statements in one text, of which a later one may end the transaction."""
    begins_by_itself: bool
    """Whether a statement behind the end of a transaction begins the next one, by the server or the driver; if not,
    begin_before_rows() does before rows are written.
    """
    transaction_status: Mapping[str, Callable[[Any], bool]]
    """By SQLAlchemy's name of the driver, whether its connection (as the pool has it) is in a transaction, by what the
    driver knows: no I/O. Leave out drivers that err: with a transaction that is taken for open, one that has ended
    loses messages; without a status, what ends a transaction past SQLAlchemy is seen later, or by errors alone.
    """

    @abstractmethod
    def begin_before_rows(self, connection: Connection, cursor: Any) -> None:
        """Begin a transaction by the driver's cursor, if its connection has none: a statement has ended one, and what
        follows shall be in another. Called only where none begins by itself.
        """

    # -- errors ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def failure(self, driver_error: BaseException) -> Failure | None:
        """Returns what an error means; None: nothing that anybody acts on, or it is another database's."""

    @abstractmethod
    def has_rolled_back(
        self, driver_error: BaseException | None, connection: Connection, status_shows_end: Callable[[], bool]
    ) -> bool:
        """Returns whether an error that left the connection open has ended the whole transaction, and not its statement
        alone. `status_shows_end` asks the driver's status, without I/O. A database that must ask its server does so on
        this connection by the driver alone; where that fails, the connection is lost and the transaction with it.
        """


NO_OPTIONS: Final[Mapping[str, Any]] = {}
