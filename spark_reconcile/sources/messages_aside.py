"""Messages of groups that are aside from their topics, read from their own frames where their topics lost them.

Actions name a message by topic and sequence. Once its segment is dropped, the only ones that tell which it was are the
frames to which retention moved it for a group (MovedAside), and those of what an operator made of it there (Edited).
These actions are dropped in their turn, while a frame may stay for long: then the checkpoints have its place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from outbox_core.common.errors import DECODE_ERRORS
from outbox_core.journal.block import (
    FRAME_HEAD_BYTES,
    PAYLOAD_BYTES_MAX,
    SEGMENT_HEAD_BYTES,
    FrameDamaged,
    FrameKind,
    frame_bytes_at,
    kind_at,
    number_at,
    read_run,
)
from outbox_core.journal.checkpoint_group_reader import read_places
from outbox_core.journal.checkpoint_parts import CheckpointParts
from outbox_core.messages.ids import EDITED_PREFIX
from outbox_core.messages.message import EDITED_HEADER, Record, decode_record
from spark_reconcile.core.dataframes import among, computed
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.sources.broker_logs import (
    ASIDE,
    CHECKPOINT_KINDS,
    LogSegment,
    Row,
    asked_due_ms,
    begins_whole,
    payloads_of,
    reach_ms,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

PLACED_KINDS: Final = (ASIDE, "edited")
"""The actions that say where a group has a message aside from its topic."""
_FRAME_SCHEMA: Final = (
    "sequence bigint, offset bigint, stored_topic string, id string, former_id string, created_ms bigint, "
    "deliver_at_ms bigint, damage string"
)
_AT_ONCE_BYTES: Final = 4096
"""Most messages are shorter."""
_BUFFER_BYTES: Final = 256 * 1024
"""Copies stand next to each other: one read has many."""
_Place = tuple[int, int]
"""The sequence of a message, and the offset of its frame."""


def first_places(actions: list[LogSegment]) -> list[Row]:
    """Returns the places that groups had at the first checkpoint of an action log, as rows of RUN_SCHEMA: of those that
    they got before the log begins, no other record is left. Empty if nothing of the log was dropped.

    A copy stays where it is as long as it is not worth moving, and its MovedAside is dropped after the retention time.
    """
    parts = CheckpointParts()
    for segment in () if begins_whole(actions) else actions:
        try:
            for data, found in payloads_of(segment, wanted=CHECKPOINT_KINDS, payloads_max=1):
                parts.add(frame for frame, _ in found.frames(data))
                checkpoint = parts.newest_whole()
                if checkpoint is not None:
                    return list(_place_rows(b"".join(checkpoint.parts), since_ms=reach_ms(actions)))
        except FileNotFoundError:  # dropped since the survey: the next one has a checkpoint, too
            continue
    return []


def _place_rows(checkpoint: bytes, *, since_ms: int) -> Iterator[Row]:
    for topic, group, sequence, offset, size_bytes, ready_ms in read_places(checkpoint):
        if size_bytes:
            yield ASIDE, topic, group, None, sequence, -1, since_ms, ready_ms, offset, None, None, None


def asides_of(runs: DataFrame, messages: DataFrame, segments: Sequence[LogSegment], *, is_few: bool) -> DataFrame:
    """Returns a row of ACTION_SCHEMA, of kind "aside", for each message that a group had aside from its topic, and that
    `messages` does not have: one for each of its frames that is there still.

    The id is that of the first one there is: an edit goes on with its message, and moves leave the id as it is. `runs`:
    rows of RUN_SCHEMA. Raises NotComparable if a frame is damaged.
    """
    there = f"{among('kind', PLACED_KINDS)} and attempt >= {segments[0].first_offset}L"
    places = runs.where(there).selectExpr(
        "topic", "consumer_group", "sequence", "position", "visible_at_ms as ready_ms", "attempt as offset"
    )
    message = ["topic", "sequence"]
    in_topic = messages.join(places.select(*message).distinct().hint("broadcast"), message, "left_semi")
    alone = places.join(in_topic.select(*message).hint("broadcast"), message, "left_anti")
    # In their order, so that a task reads neighbours.
    wanted = alone.select("sequence", "offset").distinct().sort("offset")
    frames = wanted.mapInArrow(partial(_frames_in, segments=segments), _FRAME_SCHEMA)
    found = alone.join(frames, ["sequence", "offset"]).where("damage is not null or stored_topic = topic")
    rows = computed(found.selectExpr(*_columns()), is_few=is_few).frame
    damaged = [row["damage"] for row in rows.where("damage is not null").select("damage").distinct().limit(3).collect()]
    if damaged:
        raise NotComparable(
            f"the broker's log is damaged, so nothing is judged: {'; '.join(sorted(damaged))}. "
            "Restore the segment from a copy"
        )
    return rows


def _columns() -> list[str]:
    """The columns of ACTION_SCHEMA, of a frame and its place."""
    frames = "over (partition by topic, consumer_group, sequence order by offset)"
    return [
        f"'{ASIDE}' as kind", "topic", "consumer_group", f"first_value(coalesce(former_id, id)) {frames} as id",
        "sequence", "position", f"first_value(created_ms) {frames} as at_ms",
        f"first_value(ready_ms) {frames} as visible_at_ms", f"first_value(deliver_at_ms) {frames} as attempt",
        "if(former_id is null, null, id) as reason", "damage",
    ]  # fmt: skip


def _frames_in(batches: Iterator[pa.RecordBatch], *, segments: Sequence[LogSegment]) -> Iterator[pa.RecordBatch]:
    """Maps batches of (sequence, offset) to batches of _FRAME_SCHEMA: of the frames that are there. Runs in Spark's
    workers.
    """
    import pyarrow as pa

    types = {"string": pa.string(), "bigint": pa.int64()}
    schema = pa.schema((name, types[kind]) for name, kind in map(str.split, _FRAME_SCHEMA.split(", ")))
    bounds = [segment.first_offset for segment in segments]
    for batch in batches:
        places = zip(batch.column("sequence").to_pylist(), batch.column("offset").to_pylist(), strict=True)
        by_segment = groupby(sorted(places, key=itemgetter(1)), lambda place: bisect_right(bounds, place[1]) - 1)
        rows = [row for index, some in by_segment for row in _rows(segments[index], list(some))]
        yield pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)


def _rows(segment: LogSegment, places: Sequence[_Place]) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of a segment's frames at these places; none if it was dropped since the survey."""
    try:
        with Path(segment.path).open("rb", buffering=_BUFFER_BYTES) as file:
            for sequence, offset in places:
                try:
                    record = _record_at(file, segment, sequence, offset)
                except (FrameDamaged, *DECODE_ERRORS) as error:
                    damage = f"{segment.path}: the message aside at offset {offset}: {error}"
                    yield (sequence, offset, None, None, None, None, None, damage)
                else:
                    if record is not None:
                        yield (sequence, offset, *_values(record), None)
    except FileNotFoundError:
        return


def _record_at(file: BinaryIO, segment: LogSegment, sequence: int, offset: int) -> Record | None:
    """Returns the message at a place; None if another frame is there: after a power failure with durability `os` the
    log may have gone on from before the copy, which the broker forgot. Raises FrameDamaged.
    """
    begin = SEGMENT_HEAD_BYTES + offset - segment.first_offset
    left = segment.size_bytes - begin
    file.seek(begin)
    data = file.read(max(0, min(left, _AT_ONCE_BYTES)))
    if len(data) < FRAME_HEAD_BYTES or (kind_at(data), number_at(data)) != (FrameKind.ASIDE, sequence):
        return None
    size_bytes = frame_bytes_at(data)
    if len(data) < size_bytes <= min(left, FRAME_HEAD_BYTES + PAYLOAD_BYTES_MAX):
        data += file.read(size_bytes - len(data))
    [payload] = read_run(data, 0, kind=FrameKind.ASIDE, numbers=range(sequence, sequence + 1))
    return decode_record(payload)


def _values(record: Record) -> tuple[Any, ...]:
    deliver_at_ms = asked_due_ms(record.headers) if record.deliver_at_ms is None else record.deliver_at_ms
    # Anybody may write the header on what he publishes; that has an id of its own making.
    former_id = record.headers.get(EDITED_HEADER) if record.id.startswith(EDITED_PREFIX) else None
    return record.topic, record.id, former_id, record.created_at_ms, deliver_at_ms
