"""Operations on Spark DataFrames that all steps share: literal rows, rows computed once, groups with SQL aggregates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


LITERAL_ROWS_MAX: Final = 5_000
"""Up to so many rows of a set are fetched and become literals of the query plans that use it."""


def listed(session: SparkSession, rows: Sequence[Sequence[object]], schema: str) -> DataFrame:
    """Returns these rows as literals in the query plan: they need no job and no Python worker.

    `schema`: as in "name string, size bigint". Thousands of rows at most.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    shape = cast("StructType", StructType.fromDDL(schema))
    columns = list(zip(*rows, strict=True)) or [()] * len(shape)
    arrow = to_arrow_schema(shape)
    table = pa.table([pa.array(values, field.type) for values, field in zip(columns, arrow, strict=True)], arrow)
    return _literals(session, table, lambda: shape)


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Rows that Spark has computed once. `table`: the same rows as literals; None if `frame` is a checkpoint."""

    frame: DataFrame
    table: pa.Table | None

    def count(self) -> int:
        """Returns the number of rows."""
        return self.frame.count() if self.table is None else self.table.num_rows

    def is_empty(self) -> bool:
        """Returns whether there is no row."""
        return self.frame.isEmpty() if self.table is None else not self.table.num_rows

    def rows(self) -> list[tuple[Any, ...]]:
        """Returns the values of each row."""
        if self.table is None:
            return [tuple(row) for row in self.frame.collect()]
        return list(zip(*(column.to_pylist() for column in self.table.columns), strict=True))


def computed(frame: DataFrame, *, is_few: bool) -> ComputedRows:
    """Compute the rows now. Where they are few, one job fetches them, and counting and listing them starts no other;
    else, or if there are more than LITERAL_ROWS_MAX, they are a checkpoint.
    """
    rows = fetched(frame) if is_few else None
    return rows or ComputedRows(frame.localCheckpoint(), None)


def fetched(frame: DataFrame) -> ComputedRows | None:
    """Compute up to LITERAL_ROWS_MAX rows as literals; None: there are more."""
    table = frame.limit(LITERAL_ROWS_MAX + 1).toArrow()
    if table.num_rows > LITERAL_ROWS_MAX:
        return None
    return ComputedRows(_literals(frame.sparkSession, table, lambda: frame.schema), table)


def _literals(session: SparkSession, table: pa.Table, schema: Callable[[], StructType]) -> DataFrame:
    """Returns the table's rows as literals. Spark Connect refuses an empty table without a schema."""
    return session.createDataFrame(table) if table.num_rows else session.createDataFrame(table, schema())


def among(column: str, names: Iterable[str]) -> str:
    """Returns an SQL condition: a column is one of these names, which are checked ones or ours: they have no quote.

    Null for null: sources are asked by it, which a coalesce() would prevent.
    """
    quoted = ", ".join(f"'{name}'" for name in sorted(names))
    return f"{column} in ({quoted})" if quoted else "false"


def grouped(frame: DataFrame, *names: str, **values: str) -> DataFrame:
    """Returns a row for each group by the columns `names`, with `values`: aggregates in SQL, by column name."""
    from pyspark.sql.functions import expr

    return frame.groupBy(*names).agg(*(expr(value).alias(name) for name, value in values.items()))


def union(*frames: DataFrame) -> DataFrame:
    """Returns the rows of all these frames (at least one) with equal columns; duplicates are kept (UNION ALL)."""
    return reduce(lambda merged, frame: merged.unionByName(frame), frames)


def gathered(frame: DataFrame, *, rows: int, rows_max: int) -> DataFrame:
    """Returns the same rows, in one partition if there are `rows_max` or fewer; `rows`: how many there are, roughly.

    Few rows take less time than a task for each of many partitions, and are joined and grouped without a shuffle.
    """
    return frame.coalesce(1) if rows <= rows_max else frame


JOBS_AT_ONCE_MAX: Final = 3


def in_parallel(*jobs: Callable[[], Any]) -> list[Any]:
    """Run Spark jobs concurrently, each from a thread of its own; returns their results in order.

    Those of small data leave most of a cluster idle.
    """
    with ThreadPoolExecutor(max_workers=JOBS_AT_ONCE_MAX, thread_name_prefix="reconcile") as pool:
        return [started.result() for started in [pool.submit(job) for job in jobs]]
