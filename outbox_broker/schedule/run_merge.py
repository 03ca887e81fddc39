"""Runs, and messages in memory, merged by (due time, arrival): up to a common bound, not one by one. No I/O of its own.

Where many runs lie side by side, each neighbour of a message stands in another run. So a batch is not taken message by
message: a bound is found by bisection, below which all of them together hold as many as are wanted, and each run gives
one piece. What the pieces come to is sorted once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from outbox_broker.schedule.sorted_run import Columns, SortedRun

Key = tuple[int, int]
"""(due, seq), which no two messages share."""
FAR: Final = (1 << 63, 0)
"""A key behind everything."""
_SEQ_END: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbours of a run: entries from `start` up to `stop`, canceled ones included."""

    run: SortedRun
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Open:
    """A run whose columns were read, and from which entry on it is left."""

    run: SortedRun
    start: int
    columns: Columns

    def stop(self, bound: Key) -> int:
        return self.columns.first_not_before(bound, start=self.start)

    def key(self, index: int) -> Key:
        return self.columns.due[index], self.columns.seq[index]


class MergeChoice:
    """Runs from which something is to be taken, and the bound below which it is. No other run has anything there."""

    def __init__(self, runs: Sequence[_Open], bound: Key) -> None:
        self.runs = runs
        self.bound = bound

    def narrow(self, count_max: int, *, beside: Sequence[Key] = ()) -> None:
        """Lower the bound until no more than `count_max` are below it, with the sorted keys that are merged in."""
        if self.count(beside=beside) <= count_max:
            return
        first = min([*(one.key(one.start) for one in self.runs), *beside[:1]])
        due_ms = _last(first[0], self.bound[0], count_max, lambda due: self.count((due, 0), beside=beside))
        seq = _last(0, _SEQ_END, count_max, lambda seq: self.count((due_ms, seq), beside=beside))
        self.bound = (due_ms, seq)

    def count(self, bound: Key | None = None, *, beside: Sequence[Key] = ()) -> int:
        """How many are below the bound, or another."""
        bound = bound or self.bound
        return sum(one.stop(bound) - one.start for one in self.runs) + bisect_left(beside, bound)

    def fit(self, count_max: int, *, bytes_max: int) -> None:
        """Lower the bound until no more are below it than may be, by their number and about by their bytes."""
        self.narrow(count_max)
        sizes = [(one.stop(self.bound) - one.start) * one.run.messages_bytes // one.run.count for one in self.runs]
        if sum(sizes) > bytes_max:
            self.narrow(max(1, self.count() * bytes_max // sum(sizes)))


class Cursor:
    """Runs in order of what is next in them. A run is in one cursor at a time, from its first entry not taken on."""

    def __init__(self, columns: Callable[[SortedRun], Columns]) -> None:
        self._columns = columns
        self._heads: list[tuple[int, int, SortedRun, int]] = []

    def add(self, runs: Iterable[SortedRun]) -> None:
        """Let runs take part, from where they were left."""
        for run in runs:
            if run.taken < run.count:
                heapq.heappush(self._heads, self._head(run))

    def next_key(self) -> Key:
        """The key that is next; FAR where there is none."""
        return self._heads[0][:2] if self._heads else FAR

    def choose(self, limit: Key, *, count_max: int, bytes_max: int) -> MergeChoice:
        """The runs that are next, below the limit: as few as hold `count_max`. To be given to take() then.

        A run is read only when its first entry may be among these. That they are enough is asked each time their number
        has doubled, so that the asking costs no more than the reading.
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
        """What was chosen, and whether its pieces lie side by side: else they are in order as they come.

        The rest of the runs, and those of which nothing was chosen, take part again.
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
    """The last number from `low`, where that holds, to `high` at which no more than `count_max` are counted."""
    return low + bisect_right(range(low, high + 1), count_max, key=count) - 1
