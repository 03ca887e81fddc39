"""The dead letters of a group as runs of messages that died alike, in columns. In memory, without I/O.

No ids, keys or bodies: those stand in the message log, which keeps them as long as they are dead.
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

from outbox_broker.common.integer_columns import from_bytes, to_bytes
from outbox_core.messages.failure_history import History

RUN_BYTES: Final = 32
NOTE_BYTES: Final = 400
"""What is said of runs, in three tables; its reason's text besides, and its history."""
ENTRY_BYTES: Final = 100
"""An entry of a history; its reason's text besides."""


class Said(msgspec.Struct, array_like=True, frozen=True):
    """What is said of runs, under a number."""

    number: int
    attempts: int
    reason: str
    history: History = ()


DeadState = tuple[bytes, bytes, bytes, bytes, list[Said]]
"""Runs in columns, little-endian (first, end, time, number of what is said); what is said."""


@dataclass(slots=True)
class Weight:
    """About how many bytes the dead letters of all groups together take."""

    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeadRun:
    """Messages from the sequence `first` to `end` (excluded) that the group gave up on alike."""

    first: int
    end: int
    attempts: int
    reason: str
    dead_at_ms: int
    history: History = ()


class DeadLetters:
    """Runs by sequence, RUN_BYTES each, and what is said of them, once for all of whom the same is said."""

    def __init__(self, weight: Weight | None = None) -> None:
        self._weight = Weight() if weight is None else weight
        self._firsts, self._ends = array("Q"), array("Q")
        self._times, self._notes = array("q"), array("Q")
        self._said: dict[int, tuple[int, str, History]] = {}
        self._numbers: dict[tuple[int, str, History], int] = {}
        self._uses: dict[int, int] = {}
        self._noted = 0
        self._count = 0

    def __len__(self) -> int:
        """How many messages, not runs."""
        return self._count

    def __iter__(self) -> Iterator[DeadRun]:
        """The runs by sequence."""
        return self.runs(0)

    def __contains__(self, sequence: int) -> bool:
        number = bisect_right(self._firsts, sequence) - 1
        return number >= 0 and sequence < self._ends[number]

    @property
    def oldest(self) -> int | None:
        """The first sequence."""
        return self._firsts[0] if self._firsts else None

    def runs(self, start: int) -> Iterator[DeadRun]:
        """The runs of sequences from `start` on; the first is cut where it begins before."""
        number = bisect_right(self._ends, start)
        while number < len(self._firsts):
            yield self._run(number, max(start, self._firsts[number]), self._ends[number])
            number += 1

    def among(self, first: int, end: int) -> list[tuple[int, int]]:
        """Which of these sequences are dead, as ranges (first, end)."""
        return [(one.first, min(one.end, end)) for one in takewhile(lambda one: one.first < end, self.runs(first))]

    def count_before(self, end: int) -> int:
        """How many sequences are below this one."""
        high = bisect_left(self._firsts, end)
        return sum(min(self._ends[number], end) - self._firsts[number] for number in range(high))

    # -- as it is written down ---------------------------------------------------------------------------------------

    def capture(self) -> DeadState:
        """All of it, as restore() takes it: no object is made of a run, of which there may be a million."""
        said = [Said(number, *one) for number, one in self._said.items()]
        return to_bytes(self._firsts), to_bytes(self._ends), to_bytes(self._times), to_bytes(self._notes), said

    def restore(self, state: DeadState) -> None:
        """Be what was captured; to be called where nothing is dead yet."""
        firsts, ends, times, notes, said = state
        self._firsts, self._ends = from_bytes("Q", firsts), from_bytes("Q", ends)
        self._times, self._notes = from_bytes("q", times), from_bytes("Q", notes)
        self._said = {one.number: (one.attempts, one.reason, one.history) for one in said}
        self._numbers = {one: number for number, one in self._said.items()}
        self._uses = dict(Counter(self._notes))
        self._noted = max(self._said, default=0)
        self._count = sum(self._ends) - sum(self._firsts)
        self._weight.size_bytes += RUN_BYTES * len(self._firsts)
        self._weight.size_bytes += sum(_note_bytes(one) for one in self._said.values())

    # -- changing ----------------------------------------------------------------------------------------------------

    def add(self, run: DeadRun) -> None:
        """Add a run where none is; it joins the one before it, if all is the same of both."""
        number = bisect_left(self._firsts, run.first)
        said = (run.attempts, run.reason, run.history)
        self._count += run.end - run.first
        if (
            number
            and self._ends[number - 1] == run.first
            and self._times[number - 1] == run.dead_at_ms
            and self._said[self._notes[number - 1]] == said
        ):
            self._ends[number - 1] = run.end
            return
        self._firsts.insert(number, run.first)
        self._ends.insert(number, run.end)
        self._times.insert(number, run.dead_at_ms)
        self._notes.insert(number, self._note(said))
        self._weight.size_bytes += RUN_BYTES

    def take(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take out what is dead of these ranges (first, end), which are in order; returns what was."""
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
                    left.append((place, first, self._times[number], self._notes[number]))
                if taken and taken[-1][1] == first:
                    taken[-1] = (taken[-1][0], stop)
                else:
                    taken.append((first, stop))
                place, cut = stop, cut + 1
            if place < end:
                left.append((place, end, self._times[number], self._notes[number]))
        self._replace(low, high, left)
        self._count -= sum(end - first for first, end in taken)
        return taken

    def take_before(self, end: int) -> None:
        """Let go of everything below a sequence."""
        self.take([(0, end)])

    def take_from(self, start: int) -> None:
        """Let go of everything from a sequence on."""
        if self._ends and self._ends[-1] > start:
            self.take([(start, self._ends[-1])])

    def _run(self, number: int, first: int, end: int) -> DeadRun:
        attempts, reason, history = self._said[self._notes[number]]
        return DeadRun(first, end, attempts, reason, self._times[number], history)

    def _replace(self, low: int, high: int, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Have these in place of the runs low to high."""
        for _, _, _, note in rows:
            self._uses[note] += 1
        for note in self._notes[low:high]:
            self._forget(note)
        self._weight.size_bytes += RUN_BYTES * (len(rows) - (high - low))
        columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
        self._firsts[low:high], self._ends[low:high] = array("Q", columns[0]), array("Q", columns[1])
        self._times[low:high], self._notes[low:high] = array("q", columns[2]), array("Q", columns[3])

    def _note(self, said: tuple[int, str, History]) -> int:
        """The number under which this is kept, used once more."""
        number = self._numbers.get(said)
        if number is None:
            self._noted += 1
            number = self._numbers[said] = self._noted
            self._said[number], self._uses[number] = said, 0
            self._weight.size_bytes += _note_bytes(said)
        self._uses[number] += 1
        return number

    def _forget(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            said = self._said.pop(number)
            del self._uses[number], self._numbers[said]
            self._weight.size_bytes -= _note_bytes(said)


def _note_bytes(said: tuple[int, str, History]) -> int:
    _, reason, history = said
    return NOTE_BYTES + getsizeof(reason) + sum(ENTRY_BYTES + getsizeof(one) for one, _ in history)
