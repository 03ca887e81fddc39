"""Which of a schema's message tables have due rows, asked by one statement for all of them. It claims nothing.

A look reads one index entry a table: the pending row that falls due first. So it costs the same however long the
backlog is, it says which table waits longest, and it says until when there is nothing to do: a row's due time is
written when the row is, one lease or one backoff ahead, long before it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Connection,
    FromClause,
    Select,
    String,
    column,
    func,
    literal,
    literal_column,
    select,
    table,
    union_all,
)
from sqlalchemy.engine import Dialect

from outbox.database import now_us
from outbox.schema import RowState

MYSQL_TABLES_A_STATEMENT: Final = 2_048
SQLITE_TABLES_A_STATEMENT: Final = 400
"""SQLite takes 500 SELECTs in a compound at most."""
COUNTED_TABLES_A_STATEMENT: Final = 256


@dataclass(frozen=True, slots=True)
class TableDue:
    """A message table with pending rows, and in how long the first of them falls due (negative: since when it is)."""

    table: str
    due_in_us: int


@dataclass(frozen=True, slots=True)
class TableCounts:
    """How many rows of a message table are pending and parked, each counted up to a bound."""

    table: str
    pending: int
    parked: int


class DueTables:
    """The statements for one set of message tables, compiled once: SQLAlchemy would walk a thousand SELECTs each time.

    Stateless after that, so safe in any thread. It opens no connection and commits nothing.
    """

    def __init__(self, *, dialect: Dialect, schema: str | None, tables: Sequence[str]) -> None:
        """`schema`: as it applies on the dialect, None on SQLite."""
        self.tables = tuple(tables)
        self._dialect = dialect
        self._schema = schema
        self._tables_max = SQLITE_TABLES_A_STATEMENT if dialect.name == "sqlite" else MYSQL_TABLES_A_STATEMENT
        self._looks = self._statements(partial(_first_due, now=now_us(dialect)), self._tables_max)
        self._counts: list[str] = []
        self._counted_up_to = 0

    def look(self, connection: Connection) -> list[TableDue]:
        """The tables that have pending rows, the one that waits longest first. One statement, no lock."""
        found = [
            TableDue(self.tables[number], int(due_in_us))
            for statement in self._looks
            for number, due_in_us in connection.exec_driver_sql(statement)
        ]
        return sorted(found, key=lambda one: (one.due_in_us, one.table))

    def count(self, connection: Connection, *, rows_max: int) -> list[TableCounts]:
        """The tables' rows by state, each counted up to `rows_max`: never a walk over millions."""
        if self._counted_up_to != rows_max:
            tables_max = min(COUNTED_TABLES_A_STATEMENT, self._tables_max)
            self._counts = self._statements(partial(_count, rows_max=rows_max), tables_max)
            self._counted_up_to = rows_max
        return [
            TableCounts(self.tables[number], pending, parked)
            for statement in self._counts
            for number, pending, parked in connection.exec_driver_sql(statement)
        ]

    def _statements(self, build: Callable[[int, FromClause], Select[Any]], tables_max: int) -> list[str]:
        """One SELECT a table, so many of them in a statement, as text without parameters."""
        messages = [(number, _message(self._schema, name)) for number, name in enumerate(self.tables)]
        parts = [self._part(number, build(number, message)) for number, message in messages]
        return [self._text(parts[first : first + tables_max]) for first in range(0, len(parts), tables_max)]

    def _text(self, parts: Sequence[Any]) -> str:
        return str(union_all(*parts).compile(dialect=self._dialect, compile_kwargs={"literal_binds": True}))

    def _part(self, number: int, one: Select[Any]) -> Any:
        # MySQL would write each sub-query of FROM into a table of its own; SQLite takes no brackets with a LIMIT.
        return select(one.subquery(f"t{number}")) if self._dialect.name == "sqlite" else one.self_group()


def _message(schema: str | None, name: str) -> FromClause:
    """A message table with no more columns than are asked for here: to define all of them a thousand times is slow."""
    return table(name, column("state", String()), column("due_at_us", BigInteger()), schema=schema).alias("m")


def _first_due(number: int, message: FromClause, *, now: Any) -> Select[Any]:
    """One row at most: the table's number, and in how long its first pending row falls due."""
    return (
        select(literal_column(str(number)).label("n"), (message.c.due_at_us - now).label("due_in_us"))
        .where(message.c.state == RowState.PENDING)
        .order_by(message.c.due_at_us)
        .limit(1)
    )


def _count(number: int, message: FromClause, *, rows_max: int) -> Select[Any]:
    """One row: the table's number and its bounded counts."""

    def bounded(state: RowState) -> Any:
        inner = select(literal(1)).select_from(message).where(message.c.state == state).limit(rows_max).subquery()
        return select(func.count()).select_from(inner).scalar_subquery()

    return select(
        literal_column(str(number)).label("n"),
        bounded(RowState.PENDING).label("pending"),
        bounded(RowState.PARKED).label("parked"),
    )
