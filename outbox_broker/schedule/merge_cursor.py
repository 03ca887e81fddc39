"""Merges runs and messages in memory by (due time, arrival): up to a common bound, not one by one. No I/O of its own.

If many runs overlap, each neighbour of a message is in another run. So a batch is not taken message by message:
bisection finds a bound below which all of them together hold as many messages as wanted, and each run contributes one
range. The result is sorted once. Message by message, a batch of 2,000 held the schedule's lock for up to 54 ms.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from outbox_broker.schedule.sorted_run import Columns, SortedRun

Key = tuple[int, int]
"""(due, seq), unique to each message."""
FAR: Final = (1 << 63, 0)
"""A key after all others."""
_SEQ_END: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a run: entries from `start` up to `stop` (exclusive), including canceled ones."""

    run: SortedRun
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Open:
    """A run whose columns were read, and the index of its next entry."""

    run: SortedRun
    start: int
    columns: Columns

    def stop(self, bound: Key) -> int:
        return self.columns.first_not_before(bound, start=self.start)

    def key(self, index: int) -> Key:
        return self.columns.due[index], self.columns.seq[index]


class MergeChoice:
    """Runs to take from, and the bound below which to take. No other run has entries there."""

    def __init__(self, runs: Sequence[_Open], bound: Key) -> None:
        self.runs = runs
        self.bound = bound

    def narrow(self, count_max: int, *, beside: Sequence[Key] = ()) -> None:
        """Lower the bound until at most `count_max` entries are below it, including the sorted keys `beside`."""
        if self.count(beside=beside) <= count_max:
            return
        first = min([*(one.key(one.start) for one in self.runs), *beside[:1]])
        due_ms = _last(first[0], self.bound[0], count_max, lambda due: self.count((due, 0), beside=beside))
        seq = _last(0, _SEQ_END, count_max, lambda seq: self.count((due_ms, seq), beside=beside))
        self.bound = (due_ms, seq)

    def count(self, bound: Key | None = None, *, beside: Sequence[Key] = ()) -> int:
        """Returns how many entries are below the bound, or below another one."""
        bound = bound or self.bound
        return sum(one.stop(bound) - one.start for one in self.runs) + bisect_left(beside, bound)

    def fit(self, count_max: int, *, bytes_max: int) -> None:
        """Lower the bound to fit both limits, by the number of entries and approximately by bytes."""
        self.narrow(count_max)
        sizes = [(one.stop(self.bound) - one.start) * one.run.messages_bytes // one.run.count for one in self.runs]
        if sum(sizes) > bytes_max:
            self.narrow(max(1, self.count() * bytes_max // sum(sizes)))


class Cursor:
    """Runs ordered by their next entries. A run is in one cursor at a time, from its first entry not taken on."""

    def __init__(self, columns: Callable[[SortedRun], Columns]) -> None:
        self._columns = columns
        self._heads: list[tuple[int, int, SortedRun, int]] = []

    def add(self, runs: Iterable[SortedRun]) -> None:
        """Add runs, from the point reached in each."""
        for run in runs:
            if run.taken < run.count:
                heapq.heappush(self._heads, self._head(run))

    def next_key(self) -> Key:
        """Returns the next key; FAR if there is none."""
        return self._heads[0][:2] if self._heads else FAR

    def choose(self, limit: Key, *, count_max: int, bytes_max: int) -> MergeChoice:
        """Choose the next runs below the limit: as few as hold `count_max`. The choice must be passed to take().

        A run is read only if its first entry may be included. Whether they suffice is checked each time their number
        has doubled, so that the checks cost no more than the reads.
        """
        opened: list[_Open] = []
        asked_at = 1
        while self._heads and self.next_key() < limit:
            _, _, run, start = self._heads[0]
            opened.append(_Open(run, start, self._columns(run)))
            heapq.heappop(self._heads)
            if len(opened) == asked_at:
                asked_at *= 2
                if MergeChoice(opened, min(limit, self.next_key())).count() >= count_max:
                    break
        choice = MergeChoice(opened, min(limit, self.next_key()))
        choice.fit(count_max, bytes_max=bytes_max)
        return choice

    def take(self, choice: MergeChoice) -> tuple[list[Piece], bool]:
        """Returns the chosen ranges, and whether they overlap: otherwise they are in order.

        The remainders of the runs, and the runs from which nothing was taken, are queued again.
        """
        pieces: list[Piece] = []
        is_mixed, last = False, (0, 0)
        for one in choice.runs:
            stop = one.stop(choice.bound)
            if stop > one.start:
                pieces.append(Piece(one.run, one.start, stop))
                is_mixed = is_mixed or one.key(one.start) < last
                last = max(last, one.key(stop - 1))
            if stop < one.run.count:
                heapq.heappush(self._heads, (*one.key(stop), one.run, stop))
        return pieces, is_mixed

    def _head(self, run: SortedRun) -> tuple[int, int, SortedRun, int]:
        if run.taken == 0:
            return run.first_due_ms, run.first_seq, run, 0
        columns = self._columns(run)
        return columns.due[run.taken], columns.seq[run.taken], run, run.taken


def _last(low: int, high: int, count_max: int, count: Callable[[int], int]) -> int:
    """Returns the last number from `low` (which must satisfy it) to `high` at which at most `count_max` are counted."""
    return low + bisect_right(range(low, high + 1), count_max, key=count) - 1
