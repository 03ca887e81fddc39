"""From a segment's bytes to rows: the one place that knows how the broker writes its logs. Knows no Spark.

It relies on messaging.journal alone: the segment's header, `read_frames` (checksums, torn tails), and the records
MessageRecord and Action. A new kind of record is refused by name, not passed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from messaging import journal
from messaging.pace import Pace
from spark_reconcile.sources.segments import Segment

MESSAGE_SCHEMA: Final = (
    "id string, topic string, message_key string, sequence bigint, body_sha256 string, created_ms bigint, "
    "stored_ms bigint, deliver_at_ms bigint, damage string"
)
ACTION_SCHEMA: Final = (
    "kind string, topic string, consumer_group string, id string, sequence bigint, position bigint, at_ms bigint, "
    "visible_at_ms bigint, attempt bigint, reason string, damage string"
)
SCHEMAS: Final = {"messages": MESSAGE_SCHEMA, "actions": ACTION_SCHEMA}

Row = tuple[Any, ...]


def frames_of(segment: Segment) -> Iterator[journal.Frame]:
    """The frames of a segment up to its surveyed size. Raises SegmentDamaged, also for what a torn tail cannot be."""
    data = data_of(segment)
    if data:
        yield from frames_behind(segment, data, journal.HEADER_BYTES)


def data_of(segment: Segment) -> bytes:
    """A segment's bytes up to its surveyed size, its header checked; none of one that was just being made."""
    with Path(segment.path).open("rb") as file:
        data = file.read(segment.size_bytes)
    if segment.last and len(data) < journal.HEADER_BYTES:
        return b""
    journal.SegmentHeader.decode(data[: journal.HEADER_BYTES])
    return data


def frames_behind(segment: Segment, data: bytes, start: int) -> Iterator[journal.Frame]:
    """The frames from the byte `start` of the segment's file on, but those that were read before."""
    shift = segment.first_offset - journal.HEADER_BYTES
    end = start
    for frame in journal.read_frames(memoryview(data)[start:], first_offset=start + shift):
        end = frame.end - shift
        if end > segment.known_bytes:
            yield frame
    missing = segment.size_bytes - end
    if missing and not segment.last:
        raise journal.SegmentDamaged(f"its last {missing} bytes are no whole record, and it is not the last segment")


def message_rows(frame: journal.Frame) -> Iterator[Row]:
    """A stored message as a row of MESSAGE_SCHEMA; `stored_ms` is null of the copy written when it fell due."""
    one = journal.decode_message(frame.payload)
    # When a scheduled message was stored its note says, which may be gone by now; the copy says that it fell due.
    stored_ms = None if one.copy == journal.FIRED_COPY else one.stored_at_ms
    is_note = one.copy == journal.SCHEDULED
    body_sha256 = one.body.hex() if is_note else hashlib.sha256(one.body).hexdigest()
    yield (
        one.id, one.topic, one.key, one.sequence, body_sha256, one.created_at_ms,
        stored_ms, one.deliver_at_ms, None,
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
        case journal.Redriven(topic=topic, group=group, at_ms=at_ms, entries=entries, per_second=rate, pace=before):
            pace = Pace(*before)
            for sequence, id_ in entries:
                visible = pace.next_ms(at_ms, per_second=rate)
                yield "redriven", topic, group, id_, sequence, at, at_ms, visible, None, None, None
        case journal.Declared(topic=topic, group=group, at_ms=at_ms, position=position, settings=settings):
            wanted = settings.get("filter") or None  # its filter stands where others give a reason
            yield "declared", topic, group, None, position, at, at_ms, None, None, wanted, None
        case journal.Sought(topic=topic, group=group, at_ms=at_ms, position=position):
            yield "sought", topic, group, None, position, at, at_ms, None, None, None, None
        case journal.Paused(topic=topic, group=group, at_ms=at_ms, paused=paused):
            kind = "paused" if paused else "resumed"
            yield kind, topic, group, None, None, at, at_ms, None, None, None, None
