"""SourceDatabase: the questions of the proof whose answers differ by database, each asked once. Opens no connection but
by open().

One class, so that whoever adds a database answers it in one file, beside mysql.py and sqlite.py; dbapi_reader.py then
lists that file. The SDK has a port of its own (outbox.store.databases), which this package does not know: what reads
must not err as what writes does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult

from outbox_core.common.table_namespace import TableNamespace

CONNECT_SECONDS: Final = 10
READ_SECONDS: Final = 600
DATE: Final = "date"
"""The type of columns that have days, and no time of the day."""
TIMES: Final = ("datetime", "timestamp", DATE)
"""What the types of columns with times begin with."""
INTEGERS: Final = ("int", "bigint", "mediumint", "smallint", "tinyint", "integer")
"""What the types of columns with whole numbers begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What a URL says of a database: of a file, the path alone, in `database`."""

    database: str
    host: str = ""
    port: int = 0
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Query:
    """A statement with `?` for each bound value, and the values."""

    statement: str
    parameters: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class TimeBounds:
    """A column of times as it is compared with bounds, the condition that it has no true time, and the bounds."""

    column: str
    nothing: str
    bounds: Sequence[str | int]


class SourceDatabase(ABC):
    """One database. Stateless, so thread-safe; two of a class are equal, as Spark's workers get theirs by pickle."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    # -- connections -------------------------------------------------------------------------------------------------

    schemes: frozenset[str]
    """What its URLs begin with, without a driver."""

    is_file: bool
    """Whether it is a file, without schemas and without a server: its identity is the file's."""

    quote: str
    """The mark on both sides of a name, doubled inside it."""

    driver_error: type[Exception]
    """What its driver raises."""

    @abstractmethod
    def address(self, url: SplitResult) -> Address | None:
        """Returns what a URL of one of its schemes says; None if it lacks something. Raises ConfigurationError for an
        option that is not understood.
        """

    @abstractmethod
    def shown(self, address: Address) -> str:
        """Returns the address for messages: without user and password."""

    @abstractmethod
    def tables_at(self, schema: str | None, *, current: str) -> TableNamespace:
        """Returns where the outbox's tables are, as outbox.store.table_placement has it. Raises ConfigurationError if
        there is neither a named schema nor a current one, where there are schemas.
        """

    @abstractmethod
    def open(self, address: Address, *, writes: bool = False) -> Any:
        """Opens a DB-API connection: read-only, if it can be, and without a transaction; `writes`: one that writes, and
        whose transaction begin_write() begins. Raises the driver's error or OSError.
        """

    @abstractmethod
    def begin_snapshot(self, cursor: Any) -> None:
        """Begin a transaction whose statements all see the database as of now."""

    @abstractmethod
    def begin_write(self, cursor: Any) -> None:
        """Begin a short transaction of repairs, which waits for producers and lets their rows through."""

    @abstractmethod
    def for_driver(self, statement: str) -> str:
        """Returns a statement with `?` for each bound value as its driver takes it."""

    # -- errors ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def is_table_missing(self, error: Exception) -> bool:
        """Returns whether a table, column or database is missing."""

    @abstractmethod
    def is_access_denied(self, error: Exception) -> bool:
        """Returns whether the user, its password or a grant was refused."""

    @abstractmethod
    def undecodable_column(self, error: Exception) -> str | None:
        """Returns the column whose text is not UTF-8, if that is what the error says."""

    @abstractmethod
    def is_unsupported(self, error: Exception) -> bool:
        """Returns whether the server does not know a statement of replica_statements()."""

    @abstractmethod
    def is_not_granted(self, error: Exception) -> bool:
        """Returns whether the user lacks the privilege for a statement of replica_statements()."""

    # -- what a server says of itself --------------------------------------------------------------------------------

    version_query: str | None
    """Selects the server's version; None where there is no replica."""

    @abstractmethod
    def replica_statements(self, version: str) -> Sequence[str]:
        """Returns the statements of which the first that is supported has one row for each source of this replica."""

    read_only_query: str | None
    """Selects 0 or OFF where the server takes writes of its users; None where it always does."""

    identity_query: Query | None
    """Selects names and values that tell this server from others, whatever its URL; None of a file."""

    # -- the catalog; `schema` None: none is named -------------------------------------------------------------------

    @abstractmethod
    def columns_query(self, table: str, schema: str | None) -> Query:
        """Selects the names and types of a table's columns, in their order; nothing if there is no such table."""

    @abstractmethod
    def tables_query(self, schema: str | None) -> Query:
        """Selects the names of a schema's tables."""

    @abstractmethod
    def leading_index_query(self, table: str, column: str, schema: str | None) -> Query | None:
        """Selects a row if an index of the table begins with this column; None where an index is of no use for it."""

    @abstractmethod
    def collation_query(self, table: str, column: str, schema: str | None) -> Query | None:
        """Selects a text column's character set and collation, empty or null of others; None where texts are compared
        byte by byte.
        """

    @abstractmethod
    def row_count_query(self, table: str, schema: str | None, *, quoted_table: str) -> Query:
        """Selects the approximate number of a table's rows; cheap."""

    # -- expressions -------------------------------------------------------------------------------------------------

    now_us: str
    """The database's own UTC clock, in microseconds since the epoch."""

    from_nothing: str
    """What stands between a SELECT without a table and its WHERE."""

    @abstractmethod
    def milli(self, column: str) -> str:
        """Returns whole microseconds as milliseconds, rounded down."""

    @abstractmethod
    def whole_number(self, expression: str) -> str:
        """Returns a number as one of 64 bits."""

    @abstractmethod
    def text(self, column: str) -> str:
        """Returns the text of a column of any type."""

    @abstractmethod
    def key_text(self, column: str, kind: str) -> str:
        """Returns the text of a column of this type as the business publishes it: of a whole number, its digits."""

    @abstractmethod
    def hex_digits(self, column: str) -> str:
        """Returns the bytes of a column as hexadecimal digits, in either case."""

    @abstractmethod
    def joined(self, parts: Sequence[str], *, by: str) -> str:
        """Returns texts joined by another one."""

    @abstractmethod
    def collated(self, expression: str, *, charset: str, collation: str) -> str:
        """Returns a bound text as it is compared under a collation of collation_query()."""

    @abstractmethod
    def time_ms(self, column: str, kind: str) -> str | None:
        """Returns a column of times that are no numbers as milliseconds since the epoch, null for a day that there is
        not; None for a type that has no times.
        """

    @abstractmethod
    def time_unit_ms(self, column: str, kind: str) -> str:
        """Returns the unit of such a time as it is written, in milliseconds and at least one: what is written is
        rounded.
        """

    @abstractmethod
    def time_bounds(
        self, column: str, kind: str, bounds_ms: Sequence[int], *, latest_ms: int, is_sought: bool
    ) -> TimeBounds:
        """Returns such a column as it is compared with bounds in milliseconds: bare where an index on it can serve.
        `is_sought`: an index begins with it. `latest_ms`: no time is later.
        """
