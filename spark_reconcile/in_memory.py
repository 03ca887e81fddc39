"""Frames of few rows, in this process: the methods of a Spark DataFrame that judging asks for, run by SQLite.

A query of Spark's costs some tenths of a second whatever is in it, and two looks at a few thousand rows are dozens of
them. The expressions are the very same texts, so there is one model and two engines; `dialect` says what differs.
Frames are lazy as Spark's are: each names its parents, and what is run is one statement. It knows no rule.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from spark_reconcile.dialect import add_functions, translated

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Row, SparkSession

_ROWS_AT_ONCE: Final = 10_000
_TYPES: Final = {"bigint": "INTEGER", "int": "INTEGER", "string": "TEXT", "boolean": "INTEGER"}


class Memory:
    """A database in memory, in the place of a Spark session. One thread uses it, and closes it."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._numbers = count()
        add_functions(self._connection)

    def close(self) -> None:
        """Let go of all rows; idempotent."""
        self._connection.close()

    def createDataFrame(self, rows: Sequence[tuple[Any, ...]], schema: str) -> FewRows:  # noqa: N802 - Spark's name
        """Rows of `schema`, as Spark writes it: names and types."""
        columns = dict(one.split() for one in schema.split(", "))
        return self._filled(columns, iter(rows))

    def fetched(self, frame: DataFrame) -> FewRows:
        """A Spark frame's rows, few."""
        return self.of_arrow(frame.toArrow())

    def of_arrow(self, table: pa.Table) -> FewRows:
        """An Arrow table's rows: texts, whole numbers and booleans."""
        import pyarrow as pa

        kinds = {pa.string(): "string", pa.large_string(): "string", pa.int64(): "bigint", pa.int32(): "int",
                 pa.bool_(): "boolean", pa.null(): "string"}  # fmt: skip
        columns = {field.name: kinds[field.type] for field in table.schema}
        batches = table.to_batches(max_chunksize=_ROWS_AT_ONCE)
        values = (zip(*(column.to_pylist() for column in batch.columns), strict=True) for batch in batches)
        return self._filled(columns, (row for batch in values for row in batch))

    def name(self) -> str:
        """A name that is not taken."""
        return f"f{next(self._numbers)}"

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement; its rows."""
        return self._connection.execute(statement).fetchall()

    def _filled(self, columns: Mapping[str, str], rows: Iterator[tuple[Any, ...]]) -> FewRows:
        table = self.name()
        self.run(
            f"create table {table} ({', '.join(f'{_quoted(one)} {_TYPES[kind]}' for one, kind in columns.items())})"
        )
        marks = ", ".join("?" * len(columns))
        self._connection.executemany(f"insert into {table} values ({marks})", rows)  # noqa: S608 - names of our own
        return FewRows(self, f"select * from {table}", tuple(columns))  # noqa: S608


class FewRows:
    """Rows in memory as a query over its parents; nothing runs before rows are asked for, or kept."""

    def __init__(self, memory: Memory, query: str, columns: Sequence[str], parents: Sequence[FewRows] = ()) -> None:
        self._memory = memory
        self._name = memory.name()
        self._query = query
        self._parents = tuple(parents)
        self.columns = list(columns)

    @property
    def sparkSession(self) -> Memory:  # noqa: N802 - Spark's name
        """Where it stands."""
        return self._memory

    def selectExpr(self, *expressions: str) -> FewRows:  # noqa: N802 - Spark's name
        """As Spark's."""
        named: list[tuple[str, str]] = []
        for one in expressions:
            value, _, name = one.rpartition(" as ")
            named += [(name, one) for name in self.columns] if one == "*" else [(name.strip("`"), value or name)]
        chosen = [_quoted(name) if one == "*" else f"{translated(one)} as {_quoted(name)}" for name, one in named]
        return self._on(f"select {', '.join(chosen)} from {self._name}", [name for name, _ in named])  # noqa: S608

    def select(self, *names: str) -> FewRows:
        """As Spark's, of names alone."""
        return self._on(f"select {_listed(names)} from {self._name}", names)  # noqa: S608

    def drop(self, *names: str) -> FewRows:
        """As Spark's."""
        return self.select(*(name for name in self.columns if name not in names))

    def where(self, condition: str) -> FewRows:
        """As Spark's."""
        return self._on(f"select * from {self._name} where {translated(condition)}", self.columns)  # noqa: S608

    def withColumnsRenamed(self, names: Mapping[str, str]) -> FewRows:  # noqa: N802 - Spark's name
        """As Spark's."""
        renamed = [names.get(one, one) for one in self.columns]
        chosen = (f"{_quoted(one)} as {_quoted(name)}" for one, name in zip(self.columns, renamed, strict=True))
        return self._on(f"select {', '.join(chosen)} from {self._name}", renamed)  # noqa: S608

    def distinct(self) -> FewRows:
        """As Spark's."""
        return self._on(f"select distinct * from {self._name}", self.columns)  # noqa: S608

    def limit(self, rows: int) -> FewRows:
        """As Spark's."""
        return self._on(f"select * from {self._name} limit {rows}", self.columns)  # noqa: S608

    def orderBy(self, *names: str) -> FewRows:  # noqa: N802 - Spark's name
        """As Spark's: nulls come first."""
        return self._on(f"select * from {self._name} order by {_listed(names)}", self.columns)  # noqa: S608

    def hint(self, _: str) -> FewRows:
        """Nothing is far from here."""
        return self

    def unionByName(self, other: FewRows) -> FewRows:  # noqa: N802 - Spark's name
        """As Spark's."""
        if set(other.columns) != set(self.columns):
            raise ValueError(f"not the same columns: {self.columns} and {other.columns}")
        query = f"select * from {self._name} union all select {_listed(self.columns)} from {other._name}"  # noqa: S608
        return self._on(query, self.columns, other)

    def join(self, other: FewRows, on: str | Sequence[str], how: str = "inner") -> FewRows:
        """As Spark's, `inner`, `left`, `left_semi` and `left_anti`, on columns of the same names."""
        keys = [on] if isinstance(on, str) else list(on)
        if how in {"left_semi", "left_anti"}:
            found = f"({_listed(keys)}) in (select {_listed(keys)} from {other._name})"  # noqa: S608
            # Of a key that is null nothing is known: it is not among the others.
            kept = f"{found} is true" if how == "left_semi" else f"{found} is not true"
            names = [*keys, *(name for name in self.columns if name not in keys)]
            return self._on(f"select {_listed(names)} from {self._name} where {kept}", names, other)  # noqa: S608
        other = other._indexed(keys)
        mine, theirs = ([name for name in frame.columns if name not in keys] for frame in (self, other))
        placed = [*(("l", name) for name in (*keys, *mine)), *(("r", name) for name in theirs)]
        chosen = ", ".join(f"{side}.{_quoted(name)}" for side, name in placed)
        same = " and ".join(f"l.{_quoted(name)} = r.{_quoted(name)}" for name in keys)
        joined = {"inner": "join", "left": "left join"}[how]
        query = f"select {chosen} from {self._name} l {joined} {other._name} r on {same}"  # noqa: S608, SLF001
        return self._on(query, [name for _, name in placed], other)

    def grouped(self, *names: str, **values: str) -> FewRows:
        """As groupBy().agg(): of each group `values`, aggregates by their names."""
        chosen = [*map(_quoted, names), *(f"{translated(one)} as {_quoted(name)}" for name, one in values.items())]
        by = f" group by {_listed(names)}" if names else ""
        return self._on(f"select {', '.join(chosen)} from {self._name}{by}", [*names, *values])  # noqa: S608

    def persist(self) -> FewRows:
        """Worked out now, and kept."""
        if not self._parents:
            return self
        table = self._memory.name()
        self._memory.run(f"create table {table} as {self._statement()}")
        return FewRows(self._memory, f"select * from {table}", self.columns)  # noqa: S608

    localCheckpoint = persist  # noqa: N815 - Spark's name

    def unpersist(self) -> None:
        """Rows are let go of with their memory."""

    def rows(self) -> list[tuple[Any, ...]]:
        """Its rows."""
        return self._memory.run(self._statement())

    def collect(self) -> list[Row]:
        """Its rows, with their names."""
        from pyspark.sql import Row

        named = Row(*self.columns)
        return [named(*row) for row in self.rows()]

    def count(self) -> int:
        """How many rows."""
        ((rows,),) = self.grouped(n="count(*)").rows()
        return int(rows)

    def isEmpty(self) -> bool:  # noqa: N802 - Spark's name
        """Whether there is no row."""
        return not self.limit(1).rows()

    def _indexed(self, keys: Sequence[str]) -> FewRows:
        """Kept, and found by these keys: what is not kept may be worked out for each row that it is joined with."""
        kept = self.persist()
        table = kept._query.rpartition(" ")[2]  # noqa: SLF001 - of this very class
        self._memory.run(f"create index if not exists {table}_{'_'.join(keys)} on {table} ({_listed(keys)})")
        return kept

    def _on(self, query: str, columns: Sequence[str], *others: FewRows) -> FewRows:
        return FewRows(self._memory, query, columns, (self, *others))

    def _statement(self) -> str:
        found: dict[str, str] = {}
        self._ancestors(found)
        query = found.pop(self._name)
        named = ", ".join(f"{name} as ({query})" for name, query in found.items())
        return f"with {named} {query}" if named else query

    def _ancestors(self, found: dict[str, str]) -> None:
        if self._name not in found:
            for parent in self._parents:
                parent._ancestors(found)  # noqa: SLF001 - of this very class
            found[self._name] = self._query


@contextmanager
def in_memory() -> Iterator[Memory]:
    """A memory that is closed at the end."""
    memory = Memory()
    try:
        yield memory
    finally:
        memory.close()


def as_spark(frame: FewRows) -> DataFrame:
    """The same, for whoever takes frames of Spark's and asks for no more than these methods."""
    return cast("DataFrame", frame)


def few(frame: object) -> FewRows | None:
    """The frame, if its rows are here."""
    return frame if isinstance(frame, FewRows) else None


def grouped(frame: DataFrame, *names: str, **values: str) -> DataFrame:
    """`frame.groupBy(names).agg(values)`, of either engine: aggregates as texts, by their names."""
    here = few(frame)
    if here is not None:
        return as_spark(here.grouped(*names, **values))
    from pyspark.sql.functions import expr

    return frame.groupBy(*names).agg(*(expr(value).alias(name) for name, value in values.items()))


def nothing_of(like: DataFrame, frame: DataFrame) -> DataFrame:
    """No row, with the columns of `frame`, where `like` is."""
    here = few(like)
    if here is None:
        return frame.where("false")
    return as_spark(here.sparkSession.createDataFrame([], ", ".join(f"{name} string" for name in frame.columns)))


def to_spark(session: SparkSession, frame: DataFrame, schema: str) -> DataFrame:
    """Few rows as a frame of Spark's; `schema`, as Spark writes it, names their columns. What Spark has stays there."""
    here = few(frame)
    if here is None:
        return frame
    names = [one.split()[0] for one in schema.split(", ")]
    return session.createDataFrame(here.select(*names).rows(), schema)


def to_arrow(frame: FewRows, schema: str) -> pa.Table:
    """Few rows in columns; `schema`, as Spark writes it, names them."""
    import pyarrow as pa

    kinds = {"string": pa.string(), "bigint": pa.int64(), "int": pa.int32(), "boolean": pa.bool_()}
    fields = [one.split() for one in schema.split(", ")]
    columns = list(zip(*frame.select(*(name for name, _ in fields)).rows(), strict=True)) or [()] * len(fields)
    arrays = [
        pa.array([None if one is None else bool(one) for one in column] if kind == "boolean" else column, kinds[kind])
        for column, (_, kind) in zip(columns, fields, strict=True)
    ]
    return pa.Table.from_arrays(arrays, names=[name for name, _ in fields])


def beside(frame: DataFrame, other: DataFrame) -> DataFrame:
    """`other` where `frame` stands: few rows are brought to few rows."""
    here = few(frame)
    return other if here is None or few(other) else as_spark(here.sparkSession.fetched(other))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(_quoted, names))


def _quoted(name: str) -> str:
    """Not in double quotes: what SQLite does not know in these is a text."""
    return f"`{name}`"
