"""Tracks a group's unsettled messages, as runs of messages with equal attributes. In memory, without I/O.

A run is split where a part of it changes: an acknowledgement in its middle leaves two runs. All runs are also ordered
by the time at which they become visible (again), so that expiry, retry and extension are one operation (Apache
RocketMQ, RIP-69). That order is a heap; stale entries are skipped when they reach the top. Runs, since the work that
Python does for each message bounds the broker's rate. Many single acknowledgements leave many runs of some 350 bytes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outbox_broker.group.failure_reasons import NumberedHistory, Reasons

_STALE_MAX: Final = 1_024
"""Limit of stale heap entries, beyond twice the number of runs, before the heap is rebuilt."""


@dataclass(slots=True)
class InFlightRun:
    """Messages from the sequence `first` to `end` (exclusive) that were delivered (or deferred) together. Times and
    numbers apply to each of them.
    """

    first: int
    end: int
    visible_at_ms: int
    delivery: int
    attempts_used: int
    generation: int
    in_flight: bool
    reason: int | None = None
    """The number of the consumer's failure reason for the last attempt."""
    history: NumberedHistory = ()
    """The failed attempts of this generation."""
    together: int = 1
    """How many messages their delivery consisted of."""
    expiry_counts: bool = True
    """Whether an invisible time that runs out is an attempt of these messages: they were delivered alone, or their
    consumer said that it begins them. Else the consumer may have died of another message."""
    suspects: int = 0
    """How many messages the last delivery whose invisible time ran out consisted of, since one of them may have ended
    its consumer; 1 where the expiry was an attempt of these alone. 0: none ran out, or a consumer tried these since."""
    redriven: bool = False
    """Whether these messages were redriven, and not delivered or put off since: they wait for the redrive's pace."""

    @property
    def count(self) -> int:
        """Returns the number of messages."""
        return self.end - self.first

    @property
    def attempts_by_now(self) -> int:
        """Returns the attempts used, where the invisible time of those in flight has run out."""
        return self.attempts_used + (1 if self.in_flight and self.expiry_counts else 0)

    @property
    def suspects_by_now(self) -> int:
        """Returns `suspects`, where the invisible time of those in flight has run out."""
        if not self.in_flight:
            return self.suspects
        return 1 if self.expiry_counts else self.together

    @property
    def is_suspected(self) -> bool:
        """Returns whether one of several messages delivered together may have ended their consumer."""
        return self.suspects_by_now > 1


@dataclass(slots=True)
class InFlightCount:
    """The number of in-flight messages of all groups together."""

    count: int = 0


class UnsettledRuns:
    """The unsettled runs of one group, by sequence and by time."""

    def __init__(self, total: InFlightCount | None = None, reasons: Reasons | None = None) -> None:
        self._total = InFlightCount() if total is None else total
        self._reasons = Reasons() if reasons is None else reasons
        self._firsts: list[int] = []
        self._runs: dict[int, InFlightRun] = {}
        self._order: list[tuple[int, int]] = []
        self._count = 0
        self._in_flight = 0
        self._redriven = 0

    def __len__(self) -> int:
        """Returns the number of messages, not runs."""
        return self._count

    def __iter__(self) -> Iterator[InFlightRun]:
        """Yields the runs by sequence."""
        return (self._runs[first] for first in self._firsts)

    @property
    def in_flight(self) -> int:
        """Returns how many messages are in flight."""
        return self._in_flight

    @property
    def redriven(self) -> int:
        """Returns how many messages were redriven and not delivered since."""
        return self._redriven

    @property
    def delivered(self) -> int:
        """Returns how many messages are in flight or wait for redelivery, without those redriven and not delivered
        since.
        """
        return self._count - self._redriven

    @property
    def oldest(self) -> int | None:
        """Returns the first sequence."""
        return self._firsts[0] if self._firsts else None

    def find(self, sequence: int) -> InFlightRun | None:
        """Returns the run that contains a sequence."""
        index = bisect_right(self._firsts, sequence) - 1
        if index < 0:
            return None
        run = self._runs[self._firsts[index]]
        return run if sequence < run.end else None

    def covers(self, first: int, end: int, *, delivery: int, generation: int) -> bool:
        """Returns whether all sequences from first to end belong to this delivery and generation."""
        while first < end:
            run = self.find(first)
            if run is None or run.delivery != delivery or run.generation != generation:
                return False
            first = run.end
        return True

    def between(self, first: int, end: int) -> list[InFlightRun]:
        """Returns the runs that contain any of these sequences, uncut."""
        low = max(0, bisect_right(self._firsts, first) - 1)
        high = bisect_left(self._firsts, end)
        return [run for run_first in self._firsts[low:high] if (run := self._runs[run_first]).end > first]

    def ranges(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the unsettled ones of these sequences as ranges (first, end), in order, some of which may touch."""
        for index in range(max(0, bisect_right(self._firsts, first) - 1), len(self._firsts)):
            run = self._runs[self._firsts[index]]
            if run.first >= end:
                return
            if run.end > first:
                yield max(run.first, first), min(run.end, end)

    # -- changing ----------------------------------------------------------------------------------------------------

    def add(self, run: InFlightRun) -> None:
        """Add a run to a free range."""
        if not self._firsts or run.first > self._firsts[-1]:
            self._firsts.append(run.first)
        else:
            self._firsts.insert(bisect_left(self._firsts, run.first), run.first)
        self._runs[run.first] = run
        self._count_run(run, run.count, runs=1)
        self._put_in_order(run)

    def take(self, first: int, end: int) -> list[InFlightRun]:
        """Remove the runs of these sequences; runs that extend beyond are split."""
        taken = []
        index = max(0, bisect_right(self._firsts, first) - 1)
        while index < len(self._firsts) and self._firsts[index] < end:
            run = self._runs[self._firsts[index]]
            if run.end <= first:
                index += 1
                continue
            self._remove(index, run)
            low, high = max(first, run.first), min(end, run.end)
            if run.first < low:
                self.add(replace(run, end=low))
                index += 1
            if high < run.end:
                self.add(replace(run, first=high))
            taken.append(run if run.count == high - low else replace(run, first=low, end=high))
        return taken

    def move_redriven(self, ms: int) -> None:
        """Make redriven messages visible `ms` milliseconds later, or earlier if it is negative."""
        if not self._redriven:
            return
        for run in self._runs.values():
            if run.redriven:
                run.visible_at_ms += ms
                self._put_in_order(run)

    def drop(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Drop ordered ranges (first, end) in one pass: take() closes a gap in the list of all runs for each."""
        parts = [
            (max(first, run.first), min(end, run.end), run) for first, end in ranges for run in self.between(first, end)
        ]
        for first, end, run in parts:
            if (first, end) == (run.first, run.end):
                del self._runs[run.first]
                self._count_run(run, -run.count, runs=-1)
        self._firsts = [first for first in self._firsts if first in self._runs]
        for first, end, run in parts:
            if (first, end) != (run.first, run.end):
                self.take(first, end)

    def settle(self, first: int, end: int) -> None:
        """Drop these sequences, permanently."""
        self.take(first, end)
        self._reasons.forget_unused()

    def clear(self) -> None:
        """Drop everything."""
        self._firsts.clear()
        self._runs.clear()
        self._order.clear()
        self._reasons.clear()
        self._total.count -= self._in_flight
        self._count = self._in_flight = self._redriven = 0

    # -- in order of time --------------------------------------------------------------------------------------------

    def visible(self, now_ms: int) -> Generator[InFlightRun, None, None]:
        """Yields the runs that are visible by now, ordered by time, then by sequence. Changes nothing, and neither may
        the caller before the generator is closed.
        """
        kept: list[tuple[int, int]] = []
        try:
            while self._order and self._order[0][0] <= now_ms:
                entry = heapq.heappop(self._order)
                run = self._runs.get(entry[1])
                if run is None or run.visible_at_ms != entry[0] or (kept and kept[-1] == entry):
                    continue  # settled or moved; or moved away and back, which leaves two entries
                kept.append(entry)
                yield run
        finally:
            for entry in kept:
                heapq.heappush(self._order, entry)

    def next_visible_ms(self) -> int | None:
        """Returns when the next run becomes visible; None if there is none."""
        while self._order:
            visible_at_ms, first = self._order[0]
            run = self._runs.get(first)
            if run is not None and run.visible_at_ms == visible_at_ms:
                return visible_at_ms
            heapq.heappop(self._order)
        return None

    def _put_in_order(self, run: InFlightRun) -> None:
        heapq.heappush(self._order, (run.visible_at_ms, run.first))
        if len(self._order) > _STALE_MAX + 2 * len(self._runs):
            self._order = [(run.visible_at_ms, first) for first, run in self._runs.items()]
            heapq.heapify(self._order)

    def _remove(self, index: int, run: InFlightRun) -> None:
        del self._firsts[index]
        del self._runs[run.first]
        self._count_run(run, -run.count, runs=-1)

    def _count_run(self, run: InFlightRun, more: int, *, runs: int) -> None:
        self._count += more
        if run.history or run.reason is not None:
            self._reasons.use(run.reason, run.history, more=runs)
        if run.in_flight:
            self._in_flight += more
            self._total.count += more
        elif run.redriven:
            self._redriven += more
