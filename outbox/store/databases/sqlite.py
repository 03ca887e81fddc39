"""What SQLite does differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Insert,
    Select,
    Table,
    func,
    insert,
    literal_column,
    select,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Dialect

from outbox.store.databases.port import NO_OPTIONS, Database, Failure, Write

_FAILURES: Final[Mapping[str, Failure]] = {
    "no such table": Failure.TABLE_MISSING,
    "has no column named": Failure.TABLE_MISSING,
    "unable to open database file": Failure.FILE_UNREACHABLE,
}
"""By a part of the error's text: a missing table has no number of its own."""


class Sqlite(Database):
    """SQLite: one file, one writer, texts compared byte by byte and types that bound nothing."""

    names = frozenset({"sqlite"})
    paramstyle: Literal["qmark"] = "qmark"
    tables_a_statement_max = 400  # of at most 500 SELECTs in a compound
    reads_snapshots = False

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

    # -- errors ------------------------------------------------------------------------------------------------------

    def failure(self, driver_error: BaseException) -> Failure | None:
        error_text = str(driver_error)
        return next((failure for part, failure in _FAILURES.items() if part in error_text), None)

    def has_rolled_back(
        self, driver_error: BaseException | None, connection: Connection, status_shows_end: Callable[[], bool]
    ) -> bool:
        # Errors of OR ROLLBACK, ON CONFLICT ROLLBACK, RAISE(ROLLBACK) and of a full disk do, which no text says.
        return status_shows_end()
