"""What a group was handed out and has not settled, as runs of messages that fare alike. In memory, without I/O.

A run is cut where a part of it fares differently: an acknowledgement in its middle leaves two. All runs stand under one
order besides, the time at which they are visible (again), so that expiry, retry and extension are one move (Apache
RocketMQ, RIP-69). The order is a heap; a place in it that a run has left is passed over when it comes up.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Final

from outbox_broker.group.failure_reasons import NumberedHistory, Reasons

_STALE_MAX: Final = 1_024
"""Places that runs have left may be so many, beyond twice the runs, before the order is made anew."""


@dataclass(slots=True)
class InFlightRun:
    """Messages from the sequence `first` to `end` (excluded) that were handed out (or held back) alike. Times and
    numbers are those of each.
    """

    first: int
    end: int
    visible_at_ms: int
    delivery: int
    attempts_used: int
    life: int
    in_flight: bool
    reason: int | None = None
    """The number of what its consumer said of the last attempt."""
    history: NumberedHistory = ()
    """How the attempts of this life went that failed."""

    @property
    def count(self) -> int:
        """How many messages."""
        return self.end - self.first

    @property
    def is_redriven(self) -> bool:
        """Whether these had been dead, and nobody was handed them since."""
        return self.life > 0 and self.delivery == 0 and not self.in_flight


@dataclass(slots=True)
class InFlightCount:
    """How many messages the consumers of all groups together hold."""

    count: int = 0


class Unsettled:
    """The runs of one group, by sequence and by time."""

    def __init__(self, tally: InFlightCount | None = None, reasons: Reasons | None = None) -> None:
        self._tally = InFlightCount() if tally is None else tally
        self._reasons = Reasons() if reasons is None else reasons
        self._firsts: list[int] = []
        self._runs: dict[int, InFlightRun] = {}
        self._order: list[tuple[int, int]] = []
        self._count = 0
        self._in_flight = 0
        self._redriven = 0

    def __len__(self) -> int:
        """How many messages, not runs."""
        return self._count

    def __iter__(self) -> Iterator[InFlightRun]:
        """The runs by sequence."""
        return (self._runs[first] for first in self._firsts)

    @property
    def in_flight(self) -> int:
        """How many messages consumers hold."""
        return self._in_flight

    @property
    def handed_out(self) -> int:
        """How many messages consumers hold, or gave back to get them again: all but what was redriven since."""
        return self._count - self._redriven

    @property
    def oldest(self) -> int | None:
        """The first sequence."""
        return self._firsts[0] if self._firsts else None

    def find(self, sequence: int) -> InFlightRun | None:
        """The run that holds a sequence."""
        number = bisect_right(self._firsts, sequence) - 1
        if number < 0:
            return None
        run = self._runs[self._firsts[number]]
        return run if sequence < run.end else None

    def covers(self, first: int, end: int, *, delivery: int, life: int) -> bool:
        """Whether all sequences from first to end are held by this delivery of this life."""
        while first < end:
            run = self.find(first)
            if run is None or run.delivery != delivery or run.life != life:
                return False
            first = run.end
        return True

    def between(self, first: int, end: int) -> list[InFlightRun]:
        """The runs that hold any of these sequences, whole."""
        low = max(0, bisect_right(self._firsts, first) - 1)
        high = bisect_left(self._firsts, end)
        return [run for one in self._firsts[low:high] if (run := self._runs[one]).end > first]

    # -- changing ----------------------------------------------------------------------------------------------------

    def add(self, run: InFlightRun) -> None:
        """Add a run where none is."""
        if not self._firsts or run.first > self._firsts[-1]:
            self._firsts.append(run.first)
        else:
            self._firsts.insert(bisect_left(self._firsts, run.first), run.first)
        self._runs[run.first] = run
        self._note(run, run.count, runs=1)
        heapq.heappush(self._order, (run.visible_at_ms, run.first))
        if len(self._order) > _STALE_MAX + 2 * len(self._runs):
            self._order = [(one.visible_at_ms, first) for first, one in self._runs.items()]
            heapq.heapify(self._order)

    def take(self, first: int, end: int) -> list[InFlightRun]:
        """Take out whatever is held of these sequences; runs that reach beyond are cut."""
        taken = []
        number = max(0, bisect_right(self._firsts, first) - 1)
        while number < len(self._firsts) and self._firsts[number] < end:
            run = self._runs[self._firsts[number]]
            if run.end <= first:
                number += 1
                continue
            self._remove(number, run)
            low, high = max(first, run.first), min(end, run.end)
            if run.first < low:
                self.add(replace(run, end=low))
                number += 1
            if high < run.end:
                self.add(replace(run, first=high))
            taken.append(run if run.count == high - low else replace(run, first=low, end=high))
        return taken

    def settle(self, first: int, end: int) -> None:
        """Let go of whatever is held of these sequences, for good."""
        self.take(first, end)
        self._reasons.forget_unused()

    def clear(self) -> None:
        """Let go of everything."""
        self._firsts.clear()
        self._runs.clear()
        self._order.clear()
        self._reasons.clear()
        self._tally.count -= self._in_flight
        self._count = self._in_flight = self._redriven = 0

    # -- in order of time --------------------------------------------------------------------------------------------

    def visible(self, now_ms: int) -> Generator[InFlightRun, None, None]:
        """The runs that are visible by now, in order of time, then of sequence. Changes nothing; nor may its user
        before it is closed.
        """
        kept: list[tuple[int, int]] = []
        try:
            while self._order and self._order[0][0] <= now_ms:
                place = heapq.heappop(self._order)
                run = self._runs.get(place[1])
                if run is None or run.visible_at_ms != place[0] or (kept and kept[-1] == place):
                    continue  # settled or moved; or moved away and back, so that it has two places
                kept.append(place)
                yield run
        finally:
            for place in kept:
                heapq.heappush(self._order, place)

    def next_visible_ms(self) -> int | None:
        """When the next run is visible; None where there is none."""
        while self._order:
            visible_at_ms, first = self._order[0]
            run = self._runs.get(first)
            if run is not None and run.visible_at_ms == visible_at_ms:
                return visible_at_ms
            heapq.heappop(self._order)
        return None

    def _remove(self, number: int, run: InFlightRun) -> None:
        del self._firsts[number]
        del self._runs[run.first]
        self._note(run, -run.count, runs=-1)

    def _note(self, run: InFlightRun, more: int, *, runs: int) -> None:
        self._count += more
        if run.history or run.reason is not None:
            self._reasons.use(run.reason, run.history, more=runs)
        if run.in_flight:
            self._in_flight += more
            self._tally.count += more
        elif run.is_redriven:
            self._redriven += more
