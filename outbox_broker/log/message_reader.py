"""Reads messages from the message log: one read per contiguous range of runs. Thread-safe, no lock.

A damaged record is returned as None; its neighbours stay readable, since each record holds its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outbox_broker.log.segment_scan import frames_in, payloads_of
from outbox_broker.log.segmented_log import SegmentedLog
from outbox_broker.log.topic_index import PlaceRun
from outbox_core.journal.journal import Frame, MessageRecord, SegmentDamaged, decode_message
from outbox_core.messages.message import Record

STRETCH_BYTES_MAX: Final = 1024 * 1024
Found = tuple[int, MessageRecord | None]


def read_runs(log: SegmentedLog, runs: Sequence[PlaceRun], *, first: int, end: int, bytes_max: int) -> list[Found]:
    """Returns the records of the sequences `first` to `end` (exclusive) in these runs, in order, until about
    `bytes_max` are read.

    At least one contiguous range of runs is read.
    """
    found: list[Found] = []
    read_bytes = 0
    for stretch in _stretches(runs):
        if read_bytes > bytes_max:
            break
        low, high = max(first, stretch[0].first), min(end, stretch[-1].end)
        found += _read_stretch(log, stretch, low=low, high=high)
        read_bytes += sum(run.size_bytes for run in stretch)
    return found


def message_of(record: MessageRecord) -> Record:
    """Returns what consumers get of a stored message."""
    return Record(
        id=record.id, topic=record.topic, key=record.key, headers=record.headers, body=record.body,
        created_at_ms=record.created_at_ms, deliver_at_ms=record.deliver_at_ms,
    )  # fmt: skip


def record_at(log: SegmentedLog, offset: int) -> MessageRecord | None:
    """Returns the record whose frame begins at an offset; None if it is damaged or its segment was dropped."""
    try:
        return decode_message(log.read(offset))
    except (SegmentDamaged, ValueError):
        return None


def _stretches(runs: Sequence[PlaceRun]) -> Iterator[list[PlaceRun]]:
    """Groups runs that are contiguous in the log."""
    stretch: list[PlaceRun] = []
    size = 0
    for run in runs:
        joins = stretch and run.is_stored and stretch[-1].offset + stretch[-1].size_bytes == run.offset
        if stretch and not (joins and size + run.size_bytes <= STRETCH_BYTES_MAX):
            yield stretch
            stretch, size = [], 0
        stretch.append(run)
        size += run.size_bytes
    if stretch:
        yield stretch


def _read_stretch(log: SegmentedLog, stretch: Sequence[PlaceRun], *, low: int, high: int) -> list[Found]:
    if not stretch[0].is_stored:
        return [(sequence, None) for sequence in range(low, high)]
    offset = stretch[0].offset
    try:
        data = log.read_span(offset, stretch[-1].offset + stretch[-1].size_bytes - offset)
    except SegmentDamaged:
        return [(sequence, None) for sequence in range(low, high)]
    payloads = payloads_of(data)
    if payloads is not None:
        found = _sound(payloads, first=stretch[0].first, low=low, high=high)
        if found is not None:
            return found
    return _salvaged(data, stretch, low=low, high=high)


def _sound(payloads: Sequence[bytes], *, first: int, low: int, high: int) -> list[Found] | None:
    """Returns the records if all are intact and have the expected sequences: the usual case, with few calls."""
    try:
        records = [decode_message(payload) for payload in payloads[low - first : high - first]]
    except ValueError:
        return None
    if len(records) != high - low or records[0].sequence != low or records[-1].sequence != high - 1:
        return None
    return list(zip(range(low, high), records, strict=True))


def _salvaged(data: bytes, stretch: Sequence[PlaceRun], *, low: int, high: int) -> list[Found]:
    """Returns the intact records where some are damaged."""
    offset = stretch[0].offset
    sequence = stretch[0].first
    records: dict[int, MessageRecord | None] = dict.fromkeys(range(low, high))
    certain = True
    for one in frames_in(data, first_offset=offset):
        if not isinstance(one, Frame):
            certain = False  # the number of records in the gap is unknown: the sequences in later records identify them
        elif certain:
            if low <= sequence < high:
                records[sequence] = _decoded(one.payload, sequence)
            sequence += 1
        else:
            record = _decoded(one.payload, None)
            if record is not None and record.sequence in records:
                records[record.sequence] = record
    return list(records.items())


def _decoded(payload: bytes, sequence: int | None) -> MessageRecord | None:
    """Returns the record if it is valid and has this sequence (None: any sequence)."""
    try:
        record = decode_message(payload)
    except ValueError:
        return None
    return record if sequence is None or record.sequence == sequence else None
