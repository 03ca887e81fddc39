"""Stores a group's dead letters as runs of messages with equal attributes, in columns. In memory, without I/O.

Ids, keys and bodies are not here: they are in the message log, which keeps them as long as the messages are dead.
A million dead letters with one reason are 32 MiB in a checkpoint, written in 0.1 to 0.7 s under the engine's lock; as
rows with a reason each they were 218 MiB and 15 s.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import takewhile
from sys import getsizeof
from typing import Final

import msgspec

from outbox_broker.common.integer_array_encoding import from_bytes, to_bytes
from outbox_core.messages.failure_history import History

RUN_BYTES: Final = 32
DETAILS_BYTES: Final = 400
"""Size of a shared entry in its three tables; the reason's text and the history are added to it."""
ENTRY_BYTES: Final = 100
"""Size of an entry of a history; the reason's text is added to it."""


class DeathDetails(msgspec.Struct, array_like=True, frozen=True):
    """Attributes shared by runs of dead letters, under a number."""

    number: int
    attempts: int
    reason: str
    history: History = ()


DeadState = tuple[bytes, bytes, bytes, bytes, list[DeathDetails]]
"""Columns of the runs, little-endian (first, end, time, number of the attributes), and the attributes."""


@dataclass(slots=True)
class MemoryUse:
    """Approximate size of the dead letters of all groups, in bytes."""

    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeadRun:
    """Dead messages from the sequence `first` to `end` (exclusive) with equal attributes."""

    first: int
    end: int
    attempts: int
    reason: str
    dead_at_ms: int
    history: History = ()


class DeadLetters:
    """Runs by sequence, RUN_BYTES each; attributes are stored once for all runs that share them."""

    def __init__(self, memory: MemoryUse | None = None) -> None:
        self._memory = MemoryUse() if memory is None else memory
        self._firsts, self._ends = array("Q"), array("Q")
        self._times, self._detail_numbers = array("q"), array("Q")
        self._details: dict[int, tuple[int, str, History]] = {}
        self._numbers: dict[tuple[int, str, History], int] = {}
        self._uses: dict[int, int] = {}
        self._newest = 0
        self._count = 0

    def __len__(self) -> int:
        """Returns the number of messages, not runs."""
        return self._count

    def __iter__(self) -> Iterator[DeadRun]:
        """Yields the runs by sequence."""
        return self.runs(0)

    def __contains__(self, sequence: int) -> bool:
        index = bisect_right(self._firsts, sequence) - 1
        return index >= 0 and sequence < self._ends[index]

    @property
    def oldest(self) -> int | None:
        """Returns the first sequence."""
        return self._firsts[0] if self._firsts else None

    def runs(self, start: int) -> Iterator[DeadRun]:
        """Yields the runs of sequences from `start` on; the first one is cut if it begins before."""
        index = bisect_right(self._ends, start)
        while index < len(self._firsts):
            yield self._run(index, max(start, self._firsts[index]), self._ends[index])
            index += 1

    def among(self, first: int, end: int) -> Iterator[DeadRun]:
        """Yields the runs of these sequences, cut to them."""
        for run in takewhile(lambda run: run.first < end, self.runs(first)):
            yield run if run.end <= end else replace(run, end=end)

    def count_before(self, end: int) -> int:
        """Returns the number of sequences below this one."""
        high = bisect_left(self._firsts, end)
        return sum(min(self._ends[index], end) - self._firsts[index] for index in range(high))

    # -- as it is written down ---------------------------------------------------------------------------------------

    def capture(self) -> DeadState:
        """Returns the whole state for restore(): no object is created per run, of which there may be a million."""
        details = [DeathDetails(details_number, *attributes) for details_number, attributes in self._details.items()]
        return (
            to_bytes(self._firsts),
            to_bytes(self._ends),
            to_bytes(self._times),
            to_bytes(self._detail_numbers),
            details,
        )

    def restore(self, state: DeadState) -> None:
        """Load a captured state into an empty instance."""
        firsts, ends, times, detail_numbers, details = state
        self._firsts, self._ends = from_bytes("Q", firsts), from_bytes("Q", ends)
        self._times, self._detail_numbers = from_bytes("q", times), from_bytes("Q", detail_numbers)
        self._details = {entry.number: (entry.attempts, entry.reason, entry.history) for entry in details}
        self._numbers = {attributes: details_number for details_number, attributes in self._details.items()}
        self._uses = dict(Counter(self._detail_numbers))
        self._newest = max(self._details, default=0)
        self._count = sum(self._ends) - sum(self._firsts)
        self._memory.size_bytes += RUN_BYTES * len(self._firsts)
        self._memory.size_bytes += sum(_details_bytes(attributes) for attributes in self._details.values())

    # -- changing ----------------------------------------------------------------------------------------------------

    def add(self, run: DeadRun) -> None:
        """Add a run to a free range; it is merged into the previous run if all attributes are equal."""
        index = bisect_left(self._firsts, run.first)
        details = (run.attempts, run.reason, run.history)
        self._count += run.end - run.first
        if (
            index
            and self._ends[index - 1] == run.first
            and self._times[index - 1] == run.dead_at_ms
            and self._details[self._detail_numbers[index - 1]] == details
        ):
            self._ends[index - 1] = run.end
            return
        self._firsts.insert(index, run.first)
        self._ends.insert(index, run.end)
        self._times.insert(index, run.dead_at_ms)
        self._detail_numbers.insert(index, self._number_of(details))
        self._memory.size_bytes += RUN_BYTES

    def add_all(self, runs: Sequence[DeadRun]) -> None:
        """Add ordered runs to free ranges, in one pass; runs that touch and have equal attributes become one."""
        if not runs:
            return
        low = max(0, bisect_left(self._firsts, runs[0].first) - 1)
        high = bisect_left(self._firsts, runs[-1].first) + 1
        columns = (self._firsts, self._ends, self._times, self._detail_numbers)
        added = [
            (run.first, run.end, run.dead_at_ms, self._number_of((run.attempts, run.reason, run.history)))
            for run in runs
        ]
        rows: list[tuple[int, int, int, int]] = []
        for row in merge(zip(*(column[low:high] for column in columns), strict=True), added):
            if rows and rows[-1][1:] == (row[0], *row[2:]):
                rows[-1] = (rows[-1][0], *row[1:])
            else:
                rows.append(row)
        self._replace(low, min(high, len(self._firsts)), rows)
        for _, _, _, details_number in added:
            self._release(details_number)  # _replace() has counted the uses of the rows
        self._count += sum(run.end - run.first for run in runs)

    def take(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Remove the dead letters in these ordered ranges (first, end); returns the ranges that were removed."""
        if not ranges:
            return []
        low, high = bisect_right(self._ends, ranges[0][0]), bisect_left(self._firsts, ranges[-1][1])
        taken: list[tuple[int, int]] = []
        remaining: list[tuple[int, int, int, int]] = []
        range_index = 0
        for index in range(low, high):
            start, end = self._firsts[index], self._ends[index]
            while range_index < len(ranges) and ranges[range_index][1] <= start:
                range_index += 1
            cut = range_index
            while cut < len(ranges) and ranges[cut][0] < end:
                first, stop = max(start, ranges[cut][0]), min(end, ranges[cut][1])
                if start < first:
                    remaining.append((start, first, self._times[index], self._detail_numbers[index]))
                if taken and taken[-1][1] == first:
                    taken[-1] = (taken[-1][0], stop)
                else:
                    taken.append((first, stop))
                start, cut = stop, cut + 1
            if start < end:
                remaining.append((start, end, self._times[index], self._detail_numbers[index]))
        self._replace(low, high, remaining)
        self._count -= sum(end - first for first, end in taken)
        return taken

    def take_before(self, end: int) -> None:
        """Drop everything below a sequence."""
        self.take([(0, end)])

    def take_from(self, start: int) -> None:
        """Drop everything from a sequence on."""
        if self._ends and self._ends[-1] > start:
            self.take([(start, self._ends[-1])])

    def _run(self, index: int, first: int, end: int) -> DeadRun:
        attempts, reason, history = self._details[self._detail_numbers[index]]
        return DeadRun(first, end, attempts, reason, self._times[index], history)

    def _replace(self, low: int, high: int, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Replace the runs `low` to `high` (exclusive)."""
        for _, _, _, details_number in rows:
            self._uses[details_number] += 1
        for details_number in self._detail_numbers[low:high]:
            self._release(details_number)
        self._memory.size_bytes += RUN_BYTES * (len(rows) - (high - low))
        columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
        self._firsts[low:high], self._ends[low:high] = array("Q", columns[0]), array("Q", columns[1])
        self._times[low:high], self._detail_numbers[low:high] = array("q", columns[2]), array("Q", columns[3])

    def _number_of(self, details: tuple[int, str, History]) -> int:
        """Returns the number of these attributes, counting one more use."""
        details_number = self._numbers.get(details)
        if details_number is None:
            self._newest += 1
            details_number = self._numbers[details] = self._newest
            self._details[details_number], self._uses[details_number] = details, 0
            self._memory.size_bytes += _details_bytes(details)
        self._uses[details_number] += 1
        return details_number

    def _release(self, details_number: int) -> None:
        self._uses[details_number] -= 1
        if not self._uses[details_number]:
            details = self._details.pop(details_number)
            del self._uses[details_number], self._numbers[details]
            self._memory.size_bytes -= _details_bytes(details)


def _details_bytes(details: tuple[int, str, History]) -> int:
    _, reason, history = details
    return DETAILS_BYTES + getsizeof(reason) + sum(ENTRY_BYTES + getsizeof(text) for text, _ in history)
