"""Spark data source `outbox_broker_log`: the broker's message log or action log, a partition a segment file.

Read in place, running or not, up to the sizes that `survey` took. A torn tail ends the last segment; damage anywhere
else is a row of its own (`damage`), so that the run can name it and refuse. No bodies leave here, only their SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from messaging import journal
from spark_reconcile.sources.segments import Segment

BATCH_ROWS: Final = 16_384
"""A batch ends with the frame that reaches so many rows."""

MESSAGE_SCHEMA: Final = (
    "id string, topic string, message_key string, sequence bigint, body_sha256 string, created_ms bigint, "
    "stored_ms bigint, deliver_at_ms bigint, damage string"
)
ACTION_SCHEMA: Final = (
    "kind string, topic string, consumer_group string, id string, sequence bigint, position bigint, at_ms bigint, "
    "visible_at_ms bigint, attempt bigint, reason string, damage string"
)
_TEXTS: Final = frozenset({"id", "topic", "message_key", "body_sha256", "damage", "kind", "consumer_group", "reason"})

Row = tuple[Any, ...]


@dataclass
class SegmentPart(InputPartition):
    """One segment, by its place in the survey."""

    number: int


class BrokerLogSource(DataSource):
    """Options: log ("messages" or "actions"), segments (JSON of the survey)."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "outbox_broker_log"

    def schema(self) -> str:
        """MESSAGE_SCHEMA or ACTION_SCHEMA."""
        return MESSAGE_SCHEMA if self.options["log"] == "messages" else ACTION_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - ours alone
        """Reads the surveyed segments."""
        segments = msgspec.json.decode(self.options["segments"].encode(), type=list[Segment])
        return LogReader(segments, rows_of=message_rows if self.options["log"] == "messages" else action_rows,
                         columns=[column.split()[0] for column in self.schema().split(", ")])  # fmt: skip


class LogReader(DataSourceReader):
    """Reads the segments of one log."""

    def __init__(
        self, segments: list[Segment], *, rows_of: Callable[[journal.Frame], Iterator[Row]], columns: list[str]
    ) -> None:
        self._segments = segments
        self._rows_of = rows_of
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        """A partition a segment."""
        return [SegmentPart(number) for number in range(len(self._segments))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Arrow batches of one segment; where it is damaged, a last row that says so."""
        if not isinstance(partition, SegmentPart):
            raise TypeError("not a partition of this source")
        segment = self._segments[partition.number]
        arrow = pa.schema([(name, pa.string() if name in _TEXTS else pa.int64()) for name in self._columns])
        batch: list[Row] = []
        try:
            for frame in frames_of(segment):
                batch.extend(self._rows_of(frame))
                if len(batch) >= BATCH_ROWS:
                    yield _arrow(batch, arrow)
                    batch = []
        except (journal.SegmentDamaged, msgspec.MsgspecError, OSError) as error:
            batch.append((*(None for _ in arrow.names[:-1]), f"{segment.path}: {error}"))
        if batch:
            yield _arrow(batch, arrow)


def frames_of(segment: Segment) -> Iterator[journal.Frame]:
    """The frames of a segment up to its surveyed size. Raises SegmentDamaged, also for what a torn tail cannot be."""
    with Path(segment.path).open("rb") as file:
        data = file.read(segment.size_bytes)
    if segment.last and len(data) < journal.HEADER_BYTES:
        return  # a segment that was just being made
    header = journal.SegmentHeader.decode(data[: journal.HEADER_BYTES])
    end = header.first_offset
    for frame in journal.read_frames(memoryview(data)[journal.HEADER_BYTES :], first_offset=header.first_offset):
        end = frame.end
        yield frame
    missing = segment.size_bytes - journal.HEADER_BYTES - (end - header.first_offset)
    if missing and not segment.last:
        raise journal.SegmentDamaged(f"its last {missing} bytes are no whole record, and it is not the last segment")


def message_rows(frame: journal.Frame) -> Iterator[Row]:
    """A stored message as a row of MESSAGE_SCHEMA."""
    one = journal.decode_message(frame.payload)
    if one.copy == journal.FIRED_COPY:
        return  # the same message once more, with its sequence, which the action log tells too
    yield (
        one.id, one.topic, one.key, one.sequence, hashlib.sha256(one.body).hexdigest(), one.created_at_ms,
        one.stored_at_ms, one.deliver_at_ms, None,
    )  # fmt: skip


def action_rows(frame: journal.Frame) -> Iterator[Row]:  # noqa: C901 - one arm an action, no logic
    """An action as rows of ACTION_SCHEMA: one for each message of it, or one where it concerns a whole group."""
    at = frame.offset
    match journal.decode_action(frame.payload):
        case journal.Delivered(topic=topic, group=group, at_ms=at_ms, visible_at_ms=visible, entries=delivered):
            for sequence, id_, _, attempt in delivered:
                yield "delivered", topic, group, id_, sequence, at, at_ms, visible, attempt, None, None
        case journal.Acked(topic=topic, group=group, at_ms=at_ms, entries=entries):
            for sequence, id_ in entries:
                yield "acked", topic, group, id_, sequence, at, at_ms, None, None, None, None
        case journal.Fired(topic=topic, at_ms=at_ms, entries=entries):
            for sequence, id_ in entries:
                yield "fired", topic, None, id_, sequence, at, at_ms, None, None, None, None
        case journal.Canceled(at_ms=at_ms, ids=ids):
            for id_ in ids:
                yield "canceled", None, None, id_, None, at, at_ms, None, None, None, None
        case journal.Requeued(topic=topic, group=group, at_ms=at_ms, entries=requeued, reason=reason):
            for sequence, id_, visible, used in requeued:
                yield "requeued", topic, group, id_, sequence, at, at_ms, visible, used, reason, None
        case journal.Extended(topic=topic, group=group, at_ms=at_ms, visible_at_ms=visible, entries=entries):
            for sequence, id_ in entries:
                yield "extended", topic, group, id_, sequence, at, at_ms, visible, None, None, None
        case journal.Died(topic=topic, group=group, at_ms=at_ms, entries=died, reason=reason):
            for sequence, id_, attempts in died:
                yield "died", topic, group, id_, sequence, at, at_ms, None, attempts, reason, None
        case journal.Redriven(topic=topic, group=group, at_ms=at_ms, entries=entries):
            for sequence, id_ in entries:
                yield "redriven", topic, group, id_, sequence, at, at_ms, at_ms, None, None, None
        case journal.Declared(topic=topic, group=group, at_ms=at_ms, position=position):
            yield "declared", topic, group, None, position, at, at_ms, None, None, None, None
        case journal.Sought(topic=topic, group=group, at_ms=at_ms, position=position):
            yield "sought", topic, group, None, position, at, at_ms, None, None, None, None
        case journal.Paused(topic=topic, group=group, at_ms=at_ms, paused=paused):
            kind = "paused" if paused else "resumed"
            yield kind, topic, group, None, None, at, at_ms, None, None, None, None


def _arrow(batch: list[Row], arrow: pa.Schema) -> pa.RecordBatch:
    columns = zip(*batch, strict=True)
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, arrow, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)
