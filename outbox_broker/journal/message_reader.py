"""Reads messages from the message log: by runs, one read a stretch of them, or all of a segment. Thread-safe, no lock.

A damaged record of a run is returned as None; its neighbours stay readable, since a run says how many frames it has.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final, NamedTuple

from outbox_broker.journal.journal import Journal, SegmentDropped
from outbox_broker.journal.segment_footer import note_footer
from outbox_broker.log.topic_index import PlaceRun
from outbox_broker.segments.port import SegmentInfo
from outbox_core.common.errors import DECODE_ERRORS
from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    FRAME_HEAD_BYTES,
    PAYLOAD_BYTES_MAX,
    Block,
    FrameDamaged,
    FrameKind,
    frame_bytes_at,
    frames_in,
    kind_at,
    read_run,
)
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.message import Record, decode_record
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

STRETCH_BYTES_MAX: Final = 1024 * 1024
_READ_AHEAD_BYTES: Final = 4096
NUMBERED: Final = frozenset({FrameKind.MESSAGE, FrameKind.DISPATCHED})
"""Kinds of frames that have a sequence in their topic. A run is of one block, and so of one of these kinds."""
_READABLE: Final = NUMBERED | {FrameKind.ASIDE}
"""Kinds of frames that a run may be of: those of messages aside from their topics have a sequence there, too."""
_RECOVERED: Final = NUMBERED | {FrameKind.CANCELED}
"""What waits is not: there may be millions in a segment, and the schedule has them all."""
Found = tuple[int, Record | None]


class StoredMessage(NamedTuple):
    """A message as it stands in the message log: its frame's kind, number, offset and bytes, and when it was stored."""

    record: Record
    kind: int
    number: int
    offset: int
    size_bytes: int
    stored_at_ms: int

    @property
    def sequence(self) -> int | None:
        """Its sequence in its topic; None if it was canceled before it came."""
        return None if self.kind == FrameKind.CANCELED else self.number

    @property
    def is_dispatched(self) -> bool:
        """Whether it was scheduled before."""
        return self.kind == FrameKind.DISPATCHED


def read_runs(log: Journal, runs: Sequence[PlaceRun], *, first: int, end: int, bytes_max: int) -> list[Found]:
    """Returns the records of the sequences `first` to `end` (exclusive) in these runs, in order, until about
    `bytes_max` are read; those that are damaged, or were dropped meanwhile, as None. Raises StorageFailed.

    At least one stretch of runs is read.
    """
    found: list[Found] = []
    read_bytes = 0
    for stretch in _stretches(runs):
        if read_bytes > bytes_max:
            break
        for run, run_frames in _read_stretch(log, stretch):
            low, high = max(first, run.first), min(end, run.end)
            records = _records(run_frames, run)
            found += [(sequence, records[sequence - run.first]) for sequence in range(low, high)]
        read_bytes += sum(run.size_bytes for run in stretch)
    return found


def message_at(log: Journal, offset: int) -> tuple[int, Record] | None:
    """Returns the message whose frame begins at an offset, and its sequence; None if it is damaged, or was dropped.
    Raises StorageFailed.
    """
    try:
        data = log.read(offset, _READ_AHEAD_BYTES)
        size_bytes = frame_bytes_at(data) if len(data) >= FRAME_HEAD_BYTES else 0
        if len(data) < size_bytes <= FRAME_HEAD_BYTES + PAYLOAD_BYTES_MAX:
            data = log.read(offset, size_bytes)
    except SegmentDropped:
        return None
    found = frames_in(data[:size_bytes], 0, size_bytes, count=1).whole
    record = _decoded(found[0].payload) if found and found[0].kind in NUMBERED else None
    return None if record is None else (found[0].number, record)


def messages_of(
    log: Journal, segment: SegmentInfo, *, footers: dict[int, int] | None = None
) -> Iterator[StoredMessage]:  # fmt: skip
    """Yields the messages of a segment, without those that wait. What is damaged is left out; the log tells of it.
    `footers` gets where those begin that stand in the segment, by the number of their frames; of several the last.
    Raises StorageFailed.
    """
    stored_at_ms = segment.created_at_ms
    wanted = _RECOVERED if footers is None else _RECOVERED | {FrameKind.FOOTER}
    for block in readable_blocks(log, segment, wanted):
        if footers is not None and block.kind == FrameKind.FOOTER:
            note_footer(footers, block)
        # A block whose head is damaged was stored after the one before it.
        stored_at_ms = stored_at_ms if block.at_ms is None else block.at_ms
        for frame, offset in zip(block.frames, block.starts, strict=True):
            if frame.kind in _RECOVERED:
                yield StoredMessage(
                    decode_record(frame.payload), frame.kind, frame.number, offset,
                    FRAME_HEAD_BYTES + len(frame.payload), stored_at_ms,
                )  # fmt: skip


def readable_blocks(log: Journal, segment: SegmentInfo, wanted: Container[int]) -> Iterator[Block]:
    """Yields the blocks of wanted kinds, and of unknown ones, of a segment of the message log, which may end too early:
    the log tells of it, and the numbers of what comes next tell what is missing. Raises StorageFailed.
    """
    try:
        yield from log.blocks_of(segment, wanted)
    except SegmentDamaged as damage:
        logger.error("segment_damaged", extra={"log": "messages", "segment": segment.name, "error": str(damage)})  # noqa: TRY400 - there is nothing to trace


def _stretches(runs: Sequence[PlaceRun]) -> Iterator[list[PlaceRun]]:
    """Groups runs that are next to each other in the log, or have no more than a block's head between them."""
    stretch: list[PlaceRun] = []
    size = 0
    for run in runs:
        gap_bytes = run.offset - stretch[-1].end_offset if stretch else 0
        joins = run.is_stored and 0 <= gap_bytes <= BLOCK_HEAD_BYTES
        if stretch and not (joins and size + run.size_bytes <= STRETCH_BYTES_MAX):
            yield stretch
            stretch, size = [], 0
        stretch.append(run)
        size += run.size_bytes
    if stretch:
        yield stretch


def _read_stretch(log: Journal, stretch: Sequence[PlaceRun]) -> Iterator[tuple[PlaceRun, bytes]]:
    """Yields each run with its bytes; none if they were dropped, or never stored."""
    data, begin = b"", 0
    for run in stretch:
        if run.is_stored and not begin <= run.offset <= run.end_offset <= begin + len(data):
            begin = run.offset  # a read ends where a segment does
            try:
                data = log.read(begin, stretch[-1].end_offset - begin)
            except SegmentDropped:
                data = b""
        yield run, data[run.offset - begin : run.end_offset - begin] if run.is_stored else b""


def _records(data: bytes, run: PlaceRun) -> list[Record | None]:
    """Returns the record of each sequence of a run."""
    numbers = range(run.first, run.end)
    kind = kind_at(data) if len(data) >= FRAME_HEAD_BYTES else 0
    try:
        if kind in _READABLE:  # the usual case, with few calls
            return [decode_record(payload) for payload in read_run(data, 0, kind=kind, numbers=numbers)]
    except (FrameDamaged, *DECODE_ERRORS):
        pass
    records: list[Record | None] = [None] * len(numbers)
    for frame in frames_in(data, 0, len(data), count=len(numbers)).whole:
        if frame.kind in _READABLE and frame.number in numbers:
            records[frame.number - run.first] = _decoded(frame.payload)
    return records


def _decoded(payload: bytes) -> Record | None:
    try:
        return decode_record(payload)
    except DECODE_ERRORS:
        return None
