"""Spark data sources `outbox_broker_messages` and `outbox_broker_actions`: the broker's logs, a partition a segment.

Read in place, running or not: a segment is read up to the size it had when the job began, and a torn tail ends it. A
flipped bit raises SegmentDamaged, which fails the job: no verdict is better than a wrong one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from messaging import journal

BATCH_ROWS: Final = 10_000

MESSAGES_SCHEMA: Final = (
    "id string, topic string, key string, sequence bigint, body_sha256 string, "
    "created_at_ms bigint, stored_at_ms bigint, deliver_at_ms bigint"
)
ACTIONS_SCHEMA: Final = (
    "kind string, topic string, group string, id string, sequence bigint, "
    "at_ms bigint, visible_at_ms bigint, attempt int, reason string"
)


@dataclass
class SegmentPart(InputPartition):
    """One segment, up to a size."""

    path: str
    size: int


class BrokerMessages(DataSource):
    """Option: data (the broker's data folder). One row a stored message, without its body."""

    @classmethod
    def name(cls) -> str:
        return "outbox_broker_messages"

    def schema(self) -> str:
        return MESSAGES_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return LogReader(Path(self.options["data"]) / "messages", schema, message_rows)


class BrokerActions(DataSource):
    """Option: data (the broker's data folder).

    One row a message an action, and one for each declaration of a group: its sequence is the first the group is owed.
    """

    @classmethod
    def name(cls) -> str:
        return "outbox_broker_actions"

    def schema(self) -> str:
        return ACTIONS_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return LogReader(Path(self.options["data"]) / "actions", schema, action_rows)


class LogReader(DataSourceReader):
    """Reads the segments of one log."""

    def __init__(self, folder: Path, schema: StructType, rows_of: Callable[[bytes], Iterator[tuple[Any, ...]]]) -> None:
        self._folder = str(folder)
        self._schema = schema
        self._rows_of = rows_of

    def partitions(self) -> Sequence[InputPartition]:
        """A partition a segment."""
        paths = journal.segment_paths(Path(self._folder))
        return [SegmentPart(str(path), path.stat().st_size) for path in paths]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one segment."""
        if not isinstance(partition, SegmentPart):
            raise TypeError("not a partition of this source")
        arrow = to_arrow_schema(self._schema)
        batch: list[tuple[Any, ...]] = []
        for frame in _frames(partition):
            batch.extend(self._rows_of(frame.payload))
            if len(batch) >= BATCH_ROWS:
                yield _arrow(batch, arrow)
                batch = []
        if batch:
            yield _arrow(batch, arrow)


def message_rows(payload: bytes) -> Iterator[tuple[Any, ...]]:
    """A message record as a row of MESSAGES_SCHEMA."""
    one = journal.decode_message(payload)
    yield (
        one.id, one.topic, one.key, one.sequence, hashlib.sha256(one.body).hexdigest(), one.created_at_ms,
        one.stored_at_ms, one.deliver_at_ms,
    )  # fmt: skip


def action_rows(payload: bytes) -> Iterator[tuple[Any, ...]]:
    """An action record as rows of ACTIONS_SCHEMA."""
    match journal.decode_action(payload):
        case journal.Fired(topic=topic, at_ms=at, entries=entries):
            yield from (("fired", topic, None, id_, seq, at, None, None, None) for seq, id_ in entries)
        case journal.Canceled(at_ms=at, ids=ids):
            yield from (("canceled", None, None, id_, None, at, None, None, None) for id_ in ids)
        case journal.Declared(topic=topic, group=group, at_ms=at, position=position):
            yield "declared", topic, group, None, position, at, None, None, None
        case journal.Delivered(topic=topic, group=group, at_ms=at, visible_at_ms=visible, entries=delivered):
            yield from (
                ("delivered", topic, group, id_, seq, at, visible, attempt, None) for seq, id_, _, attempt in delivered
            )
        case journal.Acked(topic=topic, group=group, at_ms=at, entries=entries):
            yield from (("acked", topic, group, id_, seq, at, None, None, None) for seq, id_ in entries)
        case journal.Requeued(topic=topic, group=group, at_ms=at, entries=requeued, reason=reason):
            yield from (
                ("requeued", topic, group, id_, seq, at, visible, used, reason) for seq, id_, visible, used in requeued
            )
        case journal.Extended(topic=topic, group=group, at_ms=at, visible_at_ms=visible, entries=entries):
            yield from (("extended", topic, group, id_, seq, at, visible, None, None) for seq, id_ in entries)
        case journal.Died(topic=topic, group=group, at_ms=at, entries=died, reason=reason):
            yield from (("died", topic, group, id_, seq, at, None, used, reason) for seq, id_, used in died)
        case journal.Redriven(topic=topic, group=group, at_ms=at, entries=entries):
            yield from (("redriven", topic, group, id_, seq, at, None, None, None) for seq, id_ in entries)
        case _:
            return  # seek and pause concern a group, not a message


def _frames(part: SegmentPart) -> Iterator[journal.Frame]:
    with Path(part.path).open("rb") as file:
        data = file.read(part.size)
    if len(data) < journal.HEADER_BYTES:
        return  # a segment that is just being made
    try:
        header = journal.SegmentHeader.decode(data[: journal.HEADER_BYTES])
        yield from journal.read_frames(memoryview(data)[journal.HEADER_BYTES :], first_offset=header.first_offset)
    except journal.SegmentDamaged as damage:
        raise journal.SegmentDamaged(f"{part.path}: {damage}") from damage


def _arrow(batch: list[tuple[Any, ...]], arrow: pa.Schema) -> pa.RecordBatch:
    columns = zip(*batch, strict=True)
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, arrow, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)
