"""Messages out of the message log: runs in, records out, by as few reads as there are stretches. Any thread; no lock.

A record that is damaged is None, and those beside it are sound: they are told apart by the sequence in each record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outbox_broker.log.consume_log import PlaceRun
from outbox_broker.log.segment_scan import frames_in, payloads_of
from outbox_broker.log.segmented_log import SegmentedLog
from outbox_core.journal.journal import Frame, MessageRecord, SegmentDamaged, decode_message

STRETCH_BYTES_MAX: Final = 1024 * 1024
Found = tuple[int, MessageRecord | None]


def read_runs(log: SegmentedLog, runs: Sequence[PlaceRun], *, first: int, end: int, bytes_max: int) -> list[Found]:
    """The records of the sequences from first to end that these runs hold, in order, until about `bytes_max` are read.

    At least those of one stretch of runs are read.
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


def record_at(log: SegmentedLog, offset: int) -> MessageRecord | None:
    """The record whose frame begins at an offset; None where it is damaged, or its segment was dropped."""
    try:
        return decode_message(log.read(offset))
    except (SegmentDamaged, ValueError):
        return None


def _stretches(runs: Sequence[PlaceRun]) -> Iterator[list[PlaceRun]]:
    """Runs that stand behind each other in the log, together."""
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
    """The records where all are whole, and are those that are meant: the usual case, a few calls for all of them."""
    try:
        records = [decode_message(payload) for payload in payloads[low - first : high - first]]
    except ValueError:
        return None
    if len(records) != high - low or records[0].sequence != low or records[-1].sequence != high - 1:
        return None
    return list(zip(range(low, high), records, strict=True))


def _salvaged(data: bytes, stretch: Sequence[PlaceRun], *, low: int, high: int) -> list[Found]:
    """The records that are whole, where some are not."""
    offset = stretch[0].offset
    sequence = stretch[0].first
    records: dict[int, MessageRecord | None] = dict.fromkeys(range(low, high))
    certain = True
    for one in frames_in(data, first_offset=offset):
        if not isinstance(one, Frame):
            certain = False  # how many records were in there is not known: the next ones say who they are
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
    """The record, if it is one, and has this sequence (any, where it is None)."""
    try:
        record = decode_message(payload)
    except ValueError:
        return None
    return record if sequence is None or record.sequence == sequence else None
