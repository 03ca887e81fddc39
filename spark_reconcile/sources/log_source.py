"""Spark data source `outbox_broker_log`: the broker's message log or action log, one partition a segment file.

Logs are read in place, whether or not the broker runs, up to the sizes of `survey`. A torn tail ends the last segment;
other damage is a row of its own (`damage`), so that the run can report it and stop. Bodies are not returned, only their
SHA-256; headers only if their column is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from outbox_core.common.errors import DECODE_ERRORS
from outbox_core.journal import journal
from outbox_core.journal.block import Payloads, SegmentRefused
from spark_reconcile.sources.arrow_decoding import UnusualEncoding, message_columns
from spark_reconcile.sources.broker_logs import (
    ACTION_KINDS,
    HEADER_SCHEMA,
    MESSAGE_KINDS,
    MESSAGE_SCHEMA,
    RUN_SCHEMA,
    STEP_BACK_MS,
    LogSegment,
    Row,
    action_rows,
    frames_found,
    frames_of,
    header_rows,
    message_rows,
    payloads_of,
)

BATCH_ROWS: Final = 16_384
"""A batch ends with the frame, or with the block, that reaches this number of rows."""

_TEXTS: Final = frozenset({"id", "topic", "message_key", "body_sha256", "damage", "kind", "consumer_group", "reason"})
_TIMES: Final = frozenset({"stored_ms", "at_ms"})
_RowsOf = Callable[..., Iterator[Row]]
"""Of a frame."""
_WHOLE: Final[dict[_RowsOf, str]] = {
    message_rows: MESSAGE_SCHEMA, header_rows: HEADER_SCHEMA, action_rows: RUN_SCHEMA,
}  # fmt: skip
"""The columns of the rows that each function returns for a record."""
_Bound = GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual


@dataclass
class SegmentPart(InputPartition):
    """One segment, by its index in the survey."""

    number: int


class BrokerLogSource(DataSource):
    """Options: log ("messages" or "actions"), segments (JSON of the survey), columns (those wanted, with commas
    between; by default all but `headers`), pushdown ("true" or "false").

    Spark does not push columns down to a Python source, so callers request them; `damage` is always included. With
    pushdown, segments outside of the requested times are not opened, and rows of other kinds, topics, groups and ids
    are not decoded. Like outbox_sql, pushdown is for frames that a query scans once.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "outbox_broker_log"

    def schema(self) -> str:
        """MESSAGE_SCHEMA or RUN_SCHEMA, or the requested columns of it, or of HEADER_SCHEMA."""
        whole = _WHOLE[self._rows_of()]
        chosen = [column for column in whole.split(", ") if column.split()[0] in {"damage", *self._wanted()}]
        return ", ".join(chosen) if "columns" in self.options else whole

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - ours alone
        """Returns a reader of the surveyed segments."""
        segments = msgspec.json.decode(self.options["segments"].encode(), type=list[LogSegment])
        reader = PushingLogReader if self.options.get("pushdown") == "true" else LogReader
        columns = [column.split()[0] for column in self.schema().split(", ")]
        return reader(segments, rows_of=self._rows_of(), columns=columns)

    def _wanted(self) -> list[str]:
        return str(self.options.get("columns", "")).split(",")

    def _rows_of(self) -> _RowsOf:
        if self.options["log"] != "messages":
            return action_rows
        return header_rows if "headers" in self._wanted() else message_rows


class LogReader(DataSourceReader):
    """Reads the segments of one log."""

    def __init__(self, segments: list[LogSegment], *, rows_of: _RowsOf, columns: list[str]) -> None:
        self._segments = segments
        self._rows_of = rows_of
        self._columns = columns
        self._names = [column.split()[0] for column in _WHOLE[rows_of].split(", ")]

    def partitions(self) -> Sequence[InputPartition]:
        """One partition a segment."""
        return [SegmentPart(index) for index in range(len(self._segments))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields Arrow batches of one segment; if it is damaged, a last row with the damage."""
        if not isinstance(partition, SegmentPart):
            raise TypeError("not a partition of this source")
        segment = self._segments[partition.number]
        try:
            for batch in self._batches(segment):
                yield self._wanted(batch)
        except (journal.SegmentDamaged, SegmentRefused, OSError, *DECODE_ERRORS) as error:
            nothing = [None] * len(self._names[:-1])
            yield self._arrow([(*nothing, f"{segment.path}: {error}")])

    def _batches(self, segment: LogSegment) -> Iterator[pa.RecordBatch]:
        """Yields the messages of whole blocks by the column; those of unusual encoding, what is behind a damaged block,
        and all actions, frame by frame.
        """
        end, is_messages = 0, self._rows_of is not action_rows
        wanted = MESSAGE_KINDS if is_messages else ACTION_KINDS
        if is_messages:
            for data, found in payloads_of(segment, wanted=wanted, payloads_max=BATCH_ROWS):
                end = found.end
                if found.begins:
                    yield self._by_column(segment, data, found)
        yield from self._in_batches(map(self._rows_of, frames_of(segment, wanted=wanted, start=end)))

    def _in_batches(self, rows_of_frames: Iterable[Iterator[Row]]) -> Iterator[pa.RecordBatch]:
        batch: list[Row] = []
        for rows in rows_of_frames:
            batch.extend(rows)
            if len(batch) >= BATCH_ROWS:
                yield self._arrow(batch)
                batch = []
        if batch:
            yield self._arrow(batch)

    def _by_column(self, segment: LogSegment, data: bytes, found: Payloads) -> pa.RecordBatch:
        try:
            return message_columns(data, found, self._columns)
        except UnusualEncoding:
            frames = frames_found(segment, data, found)
            return self._arrow([row for frame in frames for row in self._rows_of(frame)])

    def _arrow(self, rows: list[Row]) -> pa.RecordBatch:
        """Converts complete rows to the requested columns."""
        columns = dict(zip(self._names, zip(*rows, strict=True) if rows else ([] for _ in self._names), strict=True))
        arrays = [pa.array(columns[name], type=_type(name)) for name in self._columns]
        return pa.RecordBatch.from_arrays(arrays, names=self._columns)

    def _wanted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


class PushingLogReader(LogReader):
    """Evaluates filters that Spark pushes down: segments by time, rows by equality."""

    def __init__(self, segments: list[LogSegment], *, rows_of: _RowsOf, columns: list[str]) -> None:
        super().__init__(segments, rows_of=rows_of, columns=columns)
        self._among: dict[str, frozenset[object]] = {}
        self._low_ms, self._high_ms = 0, 1 << 62

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - PySpark's name
        """Accept equality of texts; bounds of time select segments, and are returned to Spark for the rows."""
        for spark_filter in filters:
            if not self._take(spark_filter):
                yield spark_filter

    def partitions(self) -> Sequence[InputPartition]:
        """One partition for each segment that may have rows of the requested times; other damage is not detected."""
        # A segment ends where the next begins; the last one has no end yet.
        ends = [*(following.created_at_ms for _, following in pairwise(self._segments)), 1 << 62]
        return [
            SegmentPart(index)
            for index, (segment, end_ms) in enumerate(zip(self._segments, ends, strict=True))
            if end_ms + STEP_BACK_MS >= self._low_ms and segment.created_at_ms - STEP_BACK_MS <= self._high_ms
        ]

    def _take(self, spark_filter: Filter) -> bool:
        """Whether this reader evaluates the filter completely."""
        name = (
            spark_filter.attribute[0]
            if isinstance(spark_filter, EqualTo | In | _Bound) and len(spark_filter.attribute) == 1
            else ""
        )
        if isinstance(spark_filter, EqualTo | In) and name in _TEXTS - {"damage"} and name in self._columns:
            values = frozenset(spark_filter.value if isinstance(spark_filter, In) else (spark_filter.value,))
            self._among[name] = self._among.get(name, values) & values
            return True
        if isinstance(spark_filter, _Bound) and name in _TIMES and isinstance(spark_filter.value, int):
            if isinstance(spark_filter, GreaterThan | GreaterThanOrEqual):
                self._low_ms = max(self._low_ms, spark_filter.value)
            else:
                self._high_ms = min(self._high_ms, spark_filter.value)
        return False

    def _wanted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow.compute as pc

        for name, values in self._among.items():
            among = pc.is_in(batch.column(name), value_set=pa.array(sorted(map(str, values)), pa.string()))
            batch = batch.filter(among)
        return batch


def _type(name: str) -> pa.DataType:
    if name == "headers":
        return pa.binary()
    return pa.string() if name in _TEXTS else pa.int64()
