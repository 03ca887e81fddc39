"""Spark data source `outbox_sql`: a table on MySQL, MariaDB or SQLite, read in ranges of one integer column.

Reads only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from spark_reconcile.database import Place, quoted, rows


@dataclass
class Range(InputPartition):
    """Rows whose range column is within [low, high); None is open. A range without a low end has the nulls too."""

    low: int | None
    high: int | None


class SqlSource(DataSource):
    """Options: url, table, schema (or empty), where (JSON object: column -> value), range_column, partitions.

    The columns read are those of the schema that the reader is given; integers are read as they are, all else as text.
    """

    @classmethod
    def name(cls) -> str:
        return "outbox_sql"

    def schema(self) -> StructType:
        raise ValueError("give the schema: spark.read.format('outbox_sql').schema(...)")

    def reader(self, schema: StructType) -> DataSourceReader:
        return SqlReader(dict(self.options), schema)


class SqlReader(DataSourceReader):
    """Plans the ranges, and reads one."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._place = Place.of(options["url"])
        self._table = quoted(self._place, options.get("schema") or None, options["table"])
        self._where: dict[str, Any] = json.loads(options.get("where", "{}"))
        self._range_column = options.get("range_column") or None
        self._partitions = int(options.get("partitions", "1"))
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Equal ranges between the least and the greatest value; one open range where they are of no use."""
        if self._range_column is None or self._partitions <= 1:
            return [Range(None, None)]
        column = quoted(self._place, self._range_column)
        condition, parameters = self._condition(Range(None, None))
        statement = f"SELECT MIN({column}), MAX({column}) FROM {self._table}{condition}"  # noqa: S608 - checked names
        low, high = next(rows(self._place, statement, parameters))[0]
        if low is None or high - low < self._partitions:
            return [Range(None, None)]
        step = (high - low) // self._partitions + 1
        bounds = [low + step * number for number in range(1, self._partitions)]
        # Open at both ends: a row that comes meanwhile is read by the first or last range, not by none.
        return [Range(a, b) for a, b in zip([None, *bounds], [*bounds, None], strict=True)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one range."""
        if not isinstance(partition, Range):
            raise TypeError("not a partition of this source")
        columns = ", ".join(quoted(self._place, field.name) for field in self._schema.fields)
        condition, parameters = self._condition(partition)
        statement = f"SELECT {columns} FROM {self._table}{condition}"  # noqa: S608 - checked names, bound values
        arrow = to_arrow_schema(self._schema)
        for batch in rows(self._place, statement, parameters):
            arrays = [
                pa.array([_fit(value, field.type) for value in values], type=field.type)
                for values, field in zip(zip(*batch, strict=True), arrow, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=arrow)

    def _condition(self, part: Range) -> tuple[str, list[Any]]:
        terms = [f"{quoted(self._place, column)} = ?" for column in self._where]
        parameters: list[Any] = list(self._where.values())
        if self._range_column is not None:
            column = quoted(self._place, self._range_column)
            if part.low is not None:
                terms.append(f"{column} >= ?")
                parameters.append(part.low)
            if part.high is not None:
                nulls = f" OR {column} IS NULL" if part.low is None else ""
                terms.append(f"({column} < ?{nulls})")
                parameters.append(part.high)
        return (f" WHERE {' AND '.join(terms)}" if terms else ""), parameters


def _fit(value: Any, kind: pa.DataType) -> Any:
    if value is None or pa.types.is_integer(kind):
        return value
    return value.decode() if isinstance(value, bytes) else str(value)
