"""Queries which of a schema's message tables have due rows, by one statement for all of them: a query a table would be
a thousand queries a poll of idle tables. Claims nothing.

It reads one row a table: the pending one that falls due first, from a given due time on (LowWaterMarks in source.py)
and up to some time ahead. So its cost does not depend on the backlog, it returns which table waits longest, and until
when there is nothing to do: a row's due time is written with the row, one lease or one backoff ahead, long before it
comes. An age threshold instead ("older than a minute") is either slow or races the live sender (qmq#153,
wolverine#585).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnClause,
    Connection,
    FromClause,
    Integer,
    Select,
    String,
    bindparam,
    column,
    literal_column,
    select,
    table,
    union_all,
)
from sqlalchemy.engine import Dialect

from outbox.store.bounded_counts import count_rows, oldest_wanted_age_us, retrying_rows, sample_pending
from outbox.store.databases.supported import database_of
from outbox.store.prepared_statements import HintedStatement, prepare
from outbox.store.schema import RowState, along_due_index

COUNTED_TABLES_A_STATEMENT: Final = 256
_PENDING: Final = literal_column(f"'{RowState.PENDING.value}'", String())
_PARKED: Final = literal_column(f"'{RowState.PARKED.value}'", String())
_NO_TABLE: Final = -1
_EVERYWHERE: Final[Mapping[str, int]] = {}
_EVER_US: Final = 10**17
"""Three thousand years."""


@dataclass(frozen=True, slots=True)
class TableDue:
    """A message table with pending rows: when the first of them falls due, and in how long (negative: how long it has
    been due).
    """

    table: str
    due_at_us: int
    due_in_us: int


@dataclass(frozen=True, slots=True)
class DuePoll:
    """Result of a poll: the database's clock, and the tables that have pending rows, the longest due first.

    `whole`: the poll covered all rows, whatever their due time.
    """

    now_us: int
    due: Sequence[TableDue]
    whole: bool


@dataclass(frozen=True, slots=True)
class TableCounts:
    """How many rows of a message table are pending, of those retrying (see bounded_counts.py), and parked, each counted
    up to a limit; and for how long the oldest pending message has been wanted.
    """

    table: str
    pending: int
    retrying: int
    parked: int
    oldest_due_age_us: int


class DueTables:
    """The statements for one set of message tables, compiled once: SQLAlchemy would visit a thousand SELECTs each time.

    Stateless after that, so safe in any thread. Opens no connection and commits nothing.
    """

    def __init__(self, *, dialect: Dialect, schema: str | None, tables: Sequence[str]) -> None:
        """`schema`: of the tables' namespace, None on SQLite."""
        self.tables = tuple(tables)
        self._dialect = dialect
        self._schema = schema
        self._database = database_of(dialect)
        self._polls = self._poll_statements()
        self._counts: list[HintedStatement] = []
        self._counted_up_to = 0

    def poll(self, connection: Connection, *, from_us: Mapping[str, int] = _EVERYWHERE, ahead_us: int = 0) -> DuePoll:
        """Returns the tables with pending rows that fall due at `from_us` or later, if given for a table, and at the
        latest `ahead_us` from now; without `from_us`, all rows are covered. One statement, no lock.
        """
        values: dict[str, object] = {
            _parameter(table_index): from_us.get(name, 0) for table_index, name in enumerate(self.tables)
        }
        values["ahead_us"] = ahead_us if from_us else _EVER_US
        clocks, due = list[int](), list[TableDue]()
        for statement in self._polls:
            due_by_index = {
                int(table_index): int(us)
                for table_index, us, _ in map(tuple[Any, ...], statement.run(connection, values))
            }
            clocks.append(clock := due_by_index.pop(_NO_TABLE))
            due += [TableDue(self.tables[table_index], us, us - clock) for table_index, us in due_by_index.items()]
        due.sort(key=lambda table_due: (table_due.due_in_us, table_due.table))
        return DuePoll(min(clocks, default=0), due, whole=not from_us)

    def count(self, connection: Connection, *, rows_max: int) -> list[TableCounts]:
        """Count the tables' rows by state, each up to `rows_max`: never a scan of millions."""
        if self._counted_up_to != rows_max:
            self._counts = self._count_statements(rows_max)
            self._counted_up_to = rows_max
        return [
            TableCounts(self.tables[table_index], pending, retrying, parked, max(0, age_us or 0))
            for statement in self._counts
            for table_index, pending, retrying, parked, age_us in map(tuple[Any, ...], statement.run(connection, {}))
        ]

    def _count_statements(self, rows_max: int) -> list[HintedStatement]:
        """One SELECT a table, at most COUNTED_TABLES_A_STATEMENT in a statement."""
        tables_max = min(COUNTED_TABLES_A_STATEMENT, self._database.tables_a_statement_max)
        hinted, plain = (
            [
                prepare(self._dialect, union_all(*parts))
                for parts in self._parts(partial(self._count, rows_max=rows_max, is_hinted=is_hinted), tables_max)
            ]
            for is_hinted in (True, False)
        )
        return [HintedStatement(with_hint, without_hint) for with_hint, without_hint in zip(hinted, plain, strict=True)]

    def _count(self, table_index: int, message: FromClause, *, rows_max: int, is_hinted: bool) -> Select[Any]:
        """One row: the table's number and its bounded counts."""
        pending, parked = message.c.state == _PENDING, message.c.state == _PARKED
        hint = self.tables[table_index] if is_hinted else None
        sample = sample_pending(message, pending, rows_max=rows_max, table=hint, dialect=self._dialect)
        return select(
            literal_column(str(table_index)).label("n"),
            count_rows(message, pending, rows_max=rows_max).label("pending"),
            retrying_rows(sample).label("retrying"),
            count_rows(message, parked, rows_max=rows_max).label("parked"),
            oldest_wanted_age_us(sample, self._database.now_us()).label("age"),
        ).select_from(sample)

    def _poll_statements(self) -> list[HintedStatement]:
        """Like _count_statements(), with a parameter for each table; one more SELECT returns the database's time."""
        now = self._database.now_us()
        clock: Any = select(literal_column(str(_NO_TABLE)).label("n"), now.label("due"), literal_column("0").label("t"))
        hinted, plain = (
            [
                prepare(self._dialect, union_all(*parts, self._part(_NO_TABLE, clock)))
                for parts in self._parts(partial(build, now=now), self._database.tables_a_statement_max - 1)
            ]
            for build in (self._first_due_hinted, _first_due)
        )
        return [HintedStatement(with_hint, without_hint) for with_hint, without_hint in zip(hinted, plain, strict=True)]

    def _first_due_hinted(self, table_index: int, message: FromClause, *, now: Any) -> Select[Any]:
        first_due = _first_due(table_index, message, now=now)
        return along_due_index(first_due, message, table=self.tables[table_index], dialect=self._dialect)

    def _parts(self, build: Callable[[int, FromClause], Select[Any]], tables_max: int) -> list[list[Any]]:
        messages = [(table_index, _message(self._schema, name)) for table_index, name in enumerate(self.tables)]
        selects = [self._part(table_index, build(table_index, message)) for table_index, message in messages]
        return [selects[start : start + tables_max] for start in range(0, len(selects), tables_max)]

    def _part(self, table_index: int, statement: Select[Any]) -> Any:
        return self._database.union_part(statement, f"t{table_index + 1}")


def _message(schema: str | None, name: str) -> FromClause:
    """A message table with only the columns used here: defining all of them a thousand times is slow."""
    columns: tuple[ColumnClause[Any], ...] = (
        column("state", String()),
        column("due_at_us", BigInteger()),
        column("id"),
        column("attempts", Integer()),
        column("created_at_us", BigInteger()),
        column("deliver_at_ms", BigInteger()),
    )
    return table(name, *columns, schema=schema).alias("m")


def _parameter(table_index: int) -> str:
    return f"from_{table_index}"


def _first_due(table_index: int, message: FromClause, *, now: Any) -> Select[Any]:
    """One row at most: the table's number, and when its first pending row falls due.

    No caller reads the attempts. But the index does not contain them, and only for a statement that it does not cover
    do the servers check the range's upper end on entries of deleted rows too, by index condition pushdown.
    """
    from_us, ahead_us = (
        bindparam(_parameter(table_index), type_=BigInteger()),
        bindparam("ahead_us", type_=BigInteger()),
    )
    return (
        select(
            literal_column(str(table_index)).label("n"), message.c.due_at_us.label("due"), message.c.attempts.label("t")
        )
        .where(message.c.state == _PENDING, message.c.due_at_us.between(from_us, now + ahead_us))
        .order_by(message.c.state, message.c.due_at_us, message.c.id)
        .limit(literal_column("1"))
    )
