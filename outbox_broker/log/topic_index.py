"""A topic's consume log: maps a sequence to its location in the message log and to the time when it became ready.

Messages that are contiguous in the message log form one run of 28 bytes. The runs of the active segment are in memory;
those of sealed segments are in blocks of the segments' footers, of which memory holds only the locations. Does no I/O.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import msgspec

RUN_MESSAGES_MAX: Final = 64
RUN_BYTES_MAX: Final = 64 * 1024
"""A run ends after the message that reaches either limit: this bounds what is read to get at one message."""
DAMAGED: Final = (1 << 64) - 1
"""The offset of sequences whose records are lost although later records exist; every group is notified of them."""


@dataclass(frozen=True, slots=True)
class PlaceRun:
    """Sequences `first` to `end` (exclusive), contiguous from `offset` on; all became ready at the same time."""

    first: int
    end: int
    offset: int
    size_bytes: int
    ready_at_ms: int

    @property
    def is_stored(self) -> bool:
        """Returns whether the run has records in the log."""
        return self.offset != DAMAGED

    @property
    def end_offset(self) -> int:
        """The offset behind its last record."""
        return self.offset + self.size_bytes


_ROW: Final = struct.Struct("<QQIq")
_FIRST: Final = struct.Struct("<Q")
_TIME: Final = struct.Struct("<q")
RUN_BYTES: Final = _ROW.size
_TIME_AT: Final = RUN_BYTES - _TIME.size
_COLUMNS: Final = ((0, 8), (8, 8), (20, 8), (16, 4))
"""Column order in a footer: first sequence, offset, time, size; each as (position in a row, width in bytes)."""


class Runs(msgspec.Struct, gc=False):
    """Runs in order, 28 bytes each: first sequence, offset, size, time. A run ends where the next one begins, the last
    one where the topic's part of this segment ends.

    Excluded from garbage collection (gc=False): with 40,000 topics a scan would be expensive and could free nothing.
    """

    rows: bytearray

    def __len__(self) -> int:
        return len(self.rows) // RUN_BYTES

    def append(self, first: int, offset: int, size_bytes: int, ready_at_ms: int) -> None:
        """Add a run at the end."""
        self.rows += _ROW.pack(first, offset, size_bytes, ready_at_ms)

    def row(self, number: int) -> tuple[int, int, int, int]:
        """Returns first sequence, offset, size and time of a run; -1 is the last run."""
        start = RUN_BYTES * number if number >= 0 else len(self.rows) + RUN_BYTES * number
        first, offset, size_bytes, ready_at_ms = _ROW.unpack_from(self.rows, start)
        return first, offset, size_bytes, ready_at_ms

    def replace_last(self, first: int, offset: int, size_bytes: int, ready_at_ms: int) -> None:
        """Replace the last run."""
        _ROW.pack_into(self.rows, len(self.rows) - RUN_BYTES, first, offset, size_bytes, ready_at_ms)

    def first(self, number: int) -> int:
        """The first sequence of a run."""
        (found,) = _FIRST.unpack_from(self.rows, RUN_BYTES * number)
        return int(found)

    def number_of(self, sequence: int) -> int:
        """Returns the number of the run that contains a sequence; -1 if every run begins after it."""
        return bisect_right(range(len(self)), sequence, key=self.first) - 1

    def number_at(self, time_ms: int) -> int:
        """Returns the number of the first run that became ready at or after a time."""
        rows = self.rows
        return bisect_left(
            range(len(self)), time_ms,
            key=lambda number: int(_TIME.unpack_from(rows, RUN_BYTES * number + _TIME_AT)[0]),
        )  # fmt: skip

    def slice(self, start: int, end: int) -> Runs:
        """Returns the runs from `start` to `end` (exclusive)."""
        return Runs(self.rows[RUN_BYTES * start : RUN_BYTES * end])

    def to_bytes(self) -> bytes:
        """Little-endian, column by column."""
        count, data = len(self), bytearray(len(self.rows))
        position = 0
        for start, size in _COLUMNS:
            for part in range(size):
                data[position + part : position + size * count : size] = self.rows[start + part :: RUN_BYTES]
            position += size * count
        return bytes(data)

    @staticmethod
    def of_bytes(data: bytes) -> Runs:
        """Decodes the output of to_bytes()."""
        count, rows, position = len(data) // RUN_BYTES, bytearray(len(data)), 0
        for start, size in _COLUMNS:
            for part in range(size):
                rows[start + part :: RUN_BYTES] = data[position + part : position + size * count : size]
            position += size * count
        return Runs(rows)


_NO_SEQUENCES: Final = array("Q")
_NO_TIMES: Final = array("q")
_NO_PLACES: Final[list[BlockPlace]] = []
"""Shared by topics without blocks, of which there may be 40,000. Never modified."""


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The location of a block of runs: the segment whose messages they are of, by its first offset; the block's own
    offset in the log, the number of runs, and their CRC.
    """

    segment: int
    offset: int
    runs: int
    crc: int


@dataclass(frozen=True, slots=True)
class SegmentPlaces:
    """The sequences of a topic in one sealed segment, and when the first of them became ready."""

    first: int
    end: int
    first_time_ms: int


class Blocks(Protocol):
    """Loads blocks of runs from footers."""

    def load(self, place: BlockPlace) -> Runs:
        """Returns the runs of a block. Raises StorageFailed if they cannot be read back intact."""


class TopicIndex(msgspec.Struct, gc=False):
    """The consume log of one topic. Changed under the engine's lock. `tail`: the active segment's runs, in memory."""

    name: str
    blocks: Blocks
    start: int = 0
    end: int = 0
    tail: Runs = msgspec.field(default_factory=lambda: Runs(bytearray()))
    _tail_first: int = 0
    _block_firsts: array[int] = _NO_SEQUENCES
    _block_times: array[int] = _NO_TIMES
    _places: list[BlockPlace] = msgspec.field(default_factory=lambda: _NO_PLACES)

    def __len__(self) -> int:
        return self.end

    # -- appending ---------------------------------------------------------------------------------------------------

    def begin_at(self, sequence: int) -> None:
        """Start an empty index at a sequence: earlier sequences were dropped."""
        if not self._places and not len(self.tail) and self.end < sequence:
            self.start = self.end = self._tail_first = sequence

    def place(self, count: int, offset: int, size_bytes: int, *, ready_at_ms: int, sealed_end: int = 0) -> None:
        """Append messages that are contiguous in the message log.

        They extend the last run if they continue it, unless part of that run lies before `sealed_end`, which may be
        visible.
        """
        tail = self.tail
        if self.end > self._tail_first:
            first, begin, held_bytes, last_ms = tail.row(-1)
            if (
                begin + held_bytes == offset > sealed_end
                and last_ms == ready_at_ms
                and self.end - first + count <= RUN_MESSAGES_MAX
                and held_bytes < RUN_BYTES_MAX
            ):
                tail.replace_last(first, begin, held_bytes + size_bytes, last_ms)
                self.end += count
                return
        tail.append(self.end, offset, size_bytes, ready_at_ms)
        self.end += count

    def skip_to(self, sequence: int, *, ready_at_ms: int) -> None:
        """Mark the sequences from the end to `sequence` (exclusive) as damaged."""
        if sequence > self.end:
            self.tail.append(self.end, DAMAGED, 0, ready_at_ms)
            self.end = sequence

    def add_block(self, first: int, end: int, first_time_ms: int, place: BlockPlace) -> None:
        """Append a block that was read from a footer. It covers the sequences `first` to `end` (exclusive)."""
        self.begin_at(first)
        if self._block_firsts is _NO_SEQUENCES:
            self._block_firsts, self._block_times, self._places = array("Q"), array("q"), []
        self._block_firsts.append(first)
        self._block_times.append(first_time_ms)
        self._places.append(place)
        self.end = self._tail_first = end

    def continues_at(self, sequence: int) -> bool:
        """Returns whether add_block() can append at this sequence: without a gap before it, and without overlap."""
        return not (self._places or len(self.tail)) or sequence == self.end

    def forget_tail(self) -> None:
        """Drop the in-memory runs that add_block() has replaced."""
        self.tail = Runs(bytearray())
        self._tail_first = self.end

    def part_in(self, segment: int) -> SegmentPlaces | None:
        """Returns this topic's sequences in a sealed segment; None if it has none there."""
        start, stop = self._blocks_in(segment)
        if start == stop:
            return None
        return SegmentPlaces(self._block_firsts[start], self._first_behind(stop), self._block_times[start])

    def replace_blocks(self, blocks: Sequence[tuple[int, int, BlockPlace]]) -> None:
        """Replace the locations of a segment's blocks: first sequence, first time and location of each."""
        start, stop = self._blocks_in(blocks[0][2].segment)
        self._block_firsts[start:stop] = array("Q", [first for first, _, _ in blocks])
        self._block_times[start:stop] = array("q", [time_ms for _, time_ms, _ in blocks])
        self._places[start:stop] = [block_place for _, _, block_place in blocks]

    # -- dropping ----------------------------------------------------------------------------------------------------

    def segment_of(self, sequence: int) -> int | None:
        """Returns the sealed segment that has a sequence, by its first offset; None if none has."""
        if sequence >= self._tail_first or not self._places:
            return None
        return self._places[max(0, bisect_right(self._block_firsts, sequence) - 1)].segment

    def end_before(self, log_offset: int) -> int:
        """Returns the end of this topic's sequences in the sealed segments that begin before an offset of the message
        log; its start if it has none there.
        """
        return self._first_behind(bisect_left(self._places, log_offset, key=lambda place: place.segment))

    def drop(self, segment: int) -> None:
        """Drop the sequences of a sealed segment and of those before it."""
        count = bisect_right(self._places, segment, key=lambda place: place.segment)
        if count:
            self.start = self._first_behind(count)
            del self._block_firsts[:count], self._block_times[:count], self._places[:count]

    def is_empty(self) -> bool:
        """Returns whether the index holds no message."""
        return not self._places and not len(self.tail)

    def begins_before(self, log_offset: int) -> bool:
        """Returns whether the topic's oldest message may be stored before an offset of the message log."""
        if self._places:
            return self._places[0].segment < log_offset
        return any(self.tail.row(run_number)[1] < log_offset for run_number in range(len(self.tail)))

    def drop_below(self, sequence: int) -> None:
        """Drop the messages below a sequence and start there; a run that extends beyond it is kept whole."""
        count = sum(self._first_behind(block_number + 1) <= sequence for block_number in range(len(self._places)))
        if count:
            del self._block_firsts[:count], self._block_times[:count], self._places[:count]
        if not self._places:
            kept = max(self.tail.number_of(sequence), 0) if self.end > sequence else len(self.tail)
            self.tail = self.tail.slice(kept, len(self.tail))
        self.start, self.end = max(self.start, sequence), max(self.end, sequence)
        if not self._places:
            self._tail_first = self.tail.first(0) if len(self.tail) else self.end

    # -- looking up --------------------------------------------------------------------------------------------------

    def runs(self, start: int, end: int) -> Iterator[PlaceRun]:
        """Yields the runs that contain sequences from `start` to `end` (exclusive), uncut, in order."""
        start = max(start, self.start)
        while start < min(end, self.end):
            columns, columns_end = self._columns_at(start)
            number = columns.number_of(start)
            while number < len(columns) and columns.first(number) < end:
                run = _run(columns, number, columns_end)
                yield run
                start, number = run.end, number + 1

    def visible_end(self, start: int, *, count_max: int, durable_end: int) -> int:
        """Returns the end of the sequences deliverable in order from `start` on: durable, and at most `count_max`."""
        end = min(self.end, start + count_max)
        tail = self.tail
        if not len(tail) or end <= self._tail_first:
            return end
        _, offset, size, _ = tail.row(-1)
        if offset == DAMAGED or offset + size <= durable_end:
            return end
        for run_number in range(max(tail.number_of(start), 0), len(tail)):
            first, offset, size, _ = tail.row(run_number)
            if first >= end:
                return end
            if offset != DAMAGED and offset + size > durable_end:
                return max(first, start)
        return end

    def durable_end(self, durable_end: int) -> int:
        """Returns the end of the durable sequences. Searches from the end, where the runs that are not durable are."""
        end = self.end
        for run_number in reversed(range(len(self.tail))):
            first, offset, size, _ = self.tail.row(run_number)
            if offset == DAMAGED:
                continue
            if offset + size <= durable_end:
                break
            end = max(first, self.start)
        return end

    def is_in_memory(self, sequence: int) -> bool:
        """Returns whether this sequence and all later ones can be looked up without reading a footer."""
        return sequence >= self._tail_first

    def ready_at_ms(self, sequence: int) -> int:
        """Returns when the message was stored or, if scheduled, became due; 0 if there is no such message."""
        run = next(self.runs(sequence, sequence + 1), None)
        return 0 if run is None else run.ready_at_ms

    def sequence_at(self, time_ms: int) -> int:
        """Returns the first sequence that became ready at or after a time (times are nearly monotonic: clocks step)."""
        number = bisect_left(self._block_times, time_ms) - 1
        if len(self.tail) and self.tail.row(0)[-1] < time_ms:
            return max(_sequence_at(self.tail, time_ms, self.end), self.start)
        if number < 0:
            return self.start
        found = _sequence_at(self.blocks.load(self._places[number]), time_ms, self._first_behind(number + 1))
        return max(found, self.start)

    def _columns_at(self, sequence: int) -> tuple[Runs, int]:
        if sequence >= self._tail_first:
            return self.tail, self.end
        number = bisect_right(self._block_firsts, sequence) - 1
        return self.blocks.load(self._places[number]), self._first_behind(number + 1)

    def _first_behind(self, number: int) -> int:
        return self._block_firsts[number] if number < len(self._places) else self._tail_first

    def _blocks_in(self, segment: int) -> tuple[int, int]:
        """Returns the block numbers of a segment: the first, and the end (exclusive)."""
        start = bisect_left(self._places, segment, key=lambda place: place.segment)
        return start, bisect_right(self._places, segment, lo=start, key=lambda place: place.segment)


def blocks_of(tail: Runs, end: int, *, runs_max: int) -> Iterator[tuple[int, int, Runs]]:
    """Yields a topic's runs in chunks of at most `runs_max`: (first, end, runs)."""
    bounds = [*range(0, len(tail), runs_max), len(tail)]
    for start, stop in pairwise(bounds):
        yield tail.first(start), tail.first(stop) if stop < len(tail) else end, tail.slice(start, stop)


def _run(columns: Runs, number: int, end: int) -> PlaceRun:
    following = columns.first(number + 1) if number + 1 < len(columns) else end
    first, offset, size_bytes, ready_at_ms = columns.row(number)
    return PlaceRun(first, following, offset, size_bytes, ready_at_ms)


def _sequence_at(columns: Runs, time_ms: int, end: int) -> int:
    number = columns.number_at(time_ms)
    return columns.first(number) if number < len(columns) else end
