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
from dataclasses import dataclass
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
        number = bisect_right(self._firsts, sequence) - 1
        return number >= 0 and sequence < self._ends[number]

    @property
    def oldest(self) -> int | None:
        """Returns the first sequence."""
        return self._firsts[0] if self._firsts else None

    def runs(self, start: int) -> Iterator[DeadRun]:
        """Yields the runs of sequences from `start` on; the first one is cut if it begins before."""
        number = bisect_right(self._ends, start)
        while number < len(self._firsts):
            yield self._run(number, max(start, self._firsts[number]), self._ends[number])
            number += 1

    def among(self, first: int, end: int) -> list[tuple[int, int]]:
        """Returns which of these sequences are dead, as ranges (first, end)."""
        return [(one.first, min(one.end, end)) for one in takewhile(lambda one: one.first < end, self.runs(first))]

    def count_before(self, end: int) -> int:
        """Returns the number of sequences below this one."""
        high = bisect_left(self._firsts, end)
        return sum(min(self._ends[number], end) - self._firsts[number] for number in range(high))

    # -- as it is written down ---------------------------------------------------------------------------------------

    def capture(self) -> DeadState:
        """Returns the whole state for restore(): no object is created per run, of which there may be a million."""
        details = [DeathDetails(number, *one) for number, one in self._details.items()]
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
        self._details = {one.number: (one.attempts, one.reason, one.history) for one in details}
        self._numbers = {one: number for number, one in self._details.items()}
        self._uses = dict(Counter(self._detail_numbers))
        self._newest = max(self._details, default=0)
        self._count = sum(self._ends) - sum(self._firsts)
        self._memory.size_bytes += RUN_BYTES * len(self._firsts)
        self._memory.size_bytes += sum(_details_bytes(one) for one in self._details.values())

    # -- changing ----------------------------------------------------------------------------------------------------

    def add(self, run: DeadRun) -> None:
        """Add a run to a free range; it is merged into the previous run if all attributes are equal."""
        number = bisect_left(self._firsts, run.first)
        details = (run.attempts, run.reason, run.history)
        self._count += run.end - run.first
        if (
            number
            and self._ends[number - 1] == run.first
            and self._times[number - 1] == run.dead_at_ms
            and self._details[self._detail_numbers[number - 1]] == details
        ):
            self._ends[number - 1] = run.end
            return
        self._firsts.insert(number, run.first)
        self._ends.insert(number, run.end)
        self._times.insert(number, run.dead_at_ms)
        self._detail_numbers.insert(number, self._number_of(details))
        self._memory.size_bytes += RUN_BYTES

    def take(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Remove the dead letters in these ordered ranges (first, end); returns the ranges that were removed."""
        if not ranges:
            return []
        low, high = bisect_right(self._ends, ranges[0][0]), bisect_left(self._firsts, ranges[-1][1])
        taken: list[tuple[int, int]] = []
        left: list[tuple[int, int, int, int]] = []
        wanted = 0
        for number in range(low, high):
            place, end = self._firsts[number], self._ends[number]
            while wanted < len(ranges) and ranges[wanted][1] <= place:
                wanted += 1
            cut = wanted
            while cut < len(ranges) and ranges[cut][0] < end:
                first, stop = max(place, ranges[cut][0]), min(end, ranges[cut][1])
                if place < first:
                    left.append((place, first, self._times[number], self._detail_numbers[number]))
                if taken and taken[-1][1] == first:
                    taken[-1] = (taken[-1][0], stop)
                else:
                    taken.append((first, stop))
                place, cut = stop, cut + 1
            if place < end:
                left.append((place, end, self._times[number], self._detail_numbers[number]))
        self._replace(low, high, left)
        self._count -= sum(end - first for first, end in taken)
        return taken

    def take_before(self, end: int) -> None:
        """Drop everything below a sequence."""
        self.take([(0, end)])

    def take_from(self, start: int) -> None:
        """Drop everything from a sequence on."""
        if self._ends and self._ends[-1] > start:
            self.take([(start, self._ends[-1])])

    def _run(self, number: int, first: int, end: int) -> DeadRun:
        attempts, reason, history = self._details[self._detail_numbers[number]]
        return DeadRun(first, end, attempts, reason, self._times[number], history)

    def _replace(self, low: int, high: int, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Replace the runs `low` to `high` (exclusive)."""
        for _, _, _, number in rows:
            self._uses[number] += 1
        for number in self._detail_numbers[low:high]:
            self._release(number)
        self._memory.size_bytes += RUN_BYTES * (len(rows) - (high - low))
        columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
        self._firsts[low:high], self._ends[low:high] = array("Q", columns[0]), array("Q", columns[1])
        self._times[low:high], self._detail_numbers[low:high] = array("q", columns[2]), array("Q", columns[3])

    def _number_of(self, details: tuple[int, str, History]) -> int:
        """Returns the number of these attributes, counting one more use."""
        number = self._numbers.get(details)
        if number is None:
            self._newest += 1
            number = self._numbers[details] = self._newest
            self._details[number], self._uses[number] = details, 0
            self._memory.size_bytes += _details_bytes(details)
        self._uses[number] += 1
        return number

    def _release(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            details = self._details.pop(number)
            del self._uses[number], self._numbers[details]
            self._memory.size_bytes -= _details_bytes(details)


def _details_bytes(details: tuple[int, str, History]) -> int:
    _, reason, history = details
    return DETAILS_BYTES + getsizeof(reason) + sum(ENTRY_BYTES + getsizeof(one) for one, _ in history)
