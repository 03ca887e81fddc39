"""Operations on Spark DataFrames that all steps share: literal rows, groups with aggregates in SQL, unions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
    return session.createDataFrame(table)


def grouped(frame: DataFrame, *names: str, **values: str) -> DataFrame:
    """Returns a row for each group by the columns `names`, with `values`: aggregates in SQL, by column name."""
    from pyspark.sql.functions import expr

    return frame.groupBy(*names).agg(*(expr(value).alias(name) for name, value in values.items()))


def union(*frames: DataFrame) -> DataFrame:
    """Returns the rows of all these frames (at least one) with equal columns; duplicates are kept (UNION ALL)."""
    return reduce(lambda one, other: one.unionByName(other), frames)


def gathered(frame: DataFrame, *, rows: int, rows_max: int) -> DataFrame:
    """Returns the same rows, in one partition if there are `rows_max` or fewer; `rows`: how many there are, roughly.

    Few rows take less time than a task for each of many partitions, and are joined and grouped without a shuffle.
    """
    return frame.coalesce(1) if rows <= rows_max else frame
