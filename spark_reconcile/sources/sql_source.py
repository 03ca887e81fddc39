"""Spark data source `outbox_sql`: the rows of one or more statements on MySQL, MariaDB or SQLite, as Arrow batches.

In snapshot mode all statements run in order in one partition and one consistent snapshot; otherwise each is partitioned
by ranges of its range column. No driver jar: PyMySQL and sqlite3 read, in Spark's Python workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, DbApiReader, reading
from spark_reconcile.sources.sql_statements import COLUMNS, INPUT_SCHEMA, NUMBERS, Statement

ROWS_A_PARTITION: Final = 250_000
PARTITIONS_MAX: Final = 64
_SIGNS: Final[dict[type, str]] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_ARROW: Final = pa.schema([(name, pa.int64() if name in NUMBERS else pa.string()) for name in COLUMNS])


@dataclass
class Part(InputPartition):
    """Statements by number, read in order; rows whose range column is in [low, high), None is open."""

    numbers: tuple[int, ...]
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class PushedFilter:
    """A filter of the query that the database evaluates."""

    column: str
    sign: str
    value: str | int


@dataclass(slots=True)
class WhereClause:
    """Accumulates the conditions of a statement, and the values bound in them."""

    conditions: list[str]
    parameters: list[object] = field(default_factory=list)


class SqlSource(DataSource):
    """Options: url, statements (JSON), snapshot and pushdown ("true" or "false"). The schema is INPUT_SCHEMA.

    pushdown is off by default: Spark 4.3 stores the filters pushed to a Python source with the relation, not with the
    scan, so if one query scans one frame twice, the last pushed filters apply to both, and rows vanish without an
    error. A cached frame is safe only until Spark melts a union of unions, and does not know the cached part again.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "outbox_sql"

    def schema(self) -> str:
        """The common columns of all inputs."""
        return INPUT_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - ours alone
        """Returns a reader that plans the partitions and reads them."""
        statements = msgspec.json.decode(self.options["statements"].encode(), type=list[Statement])
        reader = PushingSqlReader if self.options.get("pushdown") == "true" else SqlReader
        return reader(DatabaseAddress.of(self.options["url"]), statements, snapshot=self.options["snapshot"] == "true")


class SqlReader(DataSourceReader):
    """Plans the partitions, and reads one."""

    def __init__(self, address: DatabaseAddress, statements: list[Statement], *, snapshot: bool) -> None:
        self._address = address
        self._statements = statements
        self._snapshot = snapshot
        self._pushed: list[PushedFilter] = []

    def partitions(self) -> Sequence[InputPartition]:
        """One partition for the snapshot, or ranges of each statement."""
        indexes = [index for index, statement in enumerate(self._statements) if self._wanted(statement)]
        if self._snapshot or not indexes:
            return [Part(tuple(indexes))]
        with reading(self._address) as reader:
            return [part for index in indexes for part in self._ranges(reader, index)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields Arrow batches of one partition."""
        if not isinstance(partition, Part):
            raise TypeError("not a partition of this source")
        with reading(self._address) as reader:
            reader.begin_snapshot()
            for index in partition.numbers:
                yield from self._read(reader, self._statements[index], partition)

    def _read(self, reader: DbApiReader, statement: Statement, part: Part) -> Iterator[pa.RecordBatch]:
        where_clause = self._where_clause(statement)
        for bound, sign in ((part.low, ">="), (part.high, "<")):
            if bound is not None:
                # The first range includes the rows without a value.
                nothing = f" OR {statement.range_by} IS NULL" if sign == "<" and part.low is None else ""
                where_clause.conditions.append(f"({statement.range_by} {sign} ?{nothing})")
                where_clause.parameters.append(bound)
        named = list(statement.columns)
        selected = ", ".join(statement.columns[name] for name in named)
        # The names were checked against the database's catalog; the values are bound.
        sql = f"SELECT {selected} FROM {statement.table}{_where(where_clause.conditions)}"  # noqa: S608
        try:
            for batch in reader.batches(sql, where_clause.parameters):
                yield _arrow(statement, named, batch)
        except ConfigurationError as error:
            raise ConfigurationError(f"table {statement.table}: {error}") from error

    def _ranges(self, reader: DbApiReader, index: int) -> list[Part]:
        """Returns equal ranges, open at both ends, so that rows inserted meanwhile are not missed."""
        statement = self._statements[index]
        count = min(statement.rows_about // ROWS_A_PARTITION + 1, PARTITIONS_MAX)
        if statement.range_by is None or count == 1:
            return [Part((index,))]
        where_clause = self._where_clause(statement)
        bounds_sql = f"MIN({statement.range_by}), MAX({statement.range_by})"
        sql = f"SELECT {bounds_sql} FROM {statement.table}{_where(where_clause.conditions)}"  # noqa: S608
        ((low, high),) = reader.rows(sql, where_clause.parameters)
        if low is None or int(high) - int(low) < count:
            return [Part((index,))]
        step = (int(high) - int(low)) // count + 1
        bounds = [int(low) + step * part_number for part_number in range(1, count)]
        return [Part((index,), start, end) for start, end in zip([None, *bounds], [*bounds, None], strict=True)]

    def _where_clause(self, statement: Statement) -> WhereClause:
        where_clause = WhereClause(list(statement.where), list(statement.parameters))
        for pushed in self._pushed:
            if pushed.column in statement.columns:
                where_clause.conditions.append(f"{statement.columns[pushed.column]} {pushed.sign} ?")
                where_clause.parameters.append(pushed.value)
        return where_clause

    def _wanted(self, statement: Statement) -> bool:
        """Whether rows of this statement can match the pushed filters on constants."""
        constants = {**statement.constants, "input_kind": str(statement.input_kind)}
        return all(
            pushed.column in statement.columns or (pushed.sign == "=" and constants.get(pushed.column) == pushed.value)
            for pushed in self._pushed
        )


class PushingSqlReader(SqlReader):
    """Lets the database evaluate pushed filters. For frames that are scanned once in a query, see SqlSource."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - PySpark's name
        """Accept comparisons with a column for the database; return the other filters to Spark."""
        for spark_filter in filters:
            pushed = _pushed(spark_filter)
            if pushed is not None:
                self._pushed.append(pushed)
            if pushed is None or isinstance(pushed.value, str):
                yield spark_filter  # the database's collation may treat more values as equal than Spark


def _pushed(spark_filter: Filter) -> PushedFilter | None:
    sign = _SIGNS.get(type(spark_filter))
    if sign is None:
        return None
    path, value = spark_filter.attribute, spark_filter.value  # type: ignore[attr-defined]
    text = len(path) == 1 and path[0] in COLUMNS and path[0] not in NUMBERS
    if text and sign == "=" and isinstance(value, str):
        return PushedFilter(path[0], sign, value)
    if len(path) == 1 and path[0] in NUMBERS and isinstance(value, int):
        return PushedFilter(path[0], sign, value)
    return None


def _where(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _arrow(statement: Statement, named: list[str], batch: list[tuple[Any, ...]]) -> pa.RecordBatch:
    values = dict(zip(named, zip(*batch, strict=True), strict=True))
    constants = {**statement.constants, "input_kind": str(statement.input_kind)}
    arrays = []
    for column in _ARROW:
        if column.name in values:
            arrays.append(pa.array(values[column.name], type=column.type))
        elif column.name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[column.name], column.type), len(batch)))
        else:
            arrays.append(pa.nulls(len(batch), column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=_ARROW)
