"""Decides when each source has its next turn. No I/O, no threads, no clock of its own.

A source that had more rows than one turn takes continues at once, behind those that already wait. A source without due
rows is polled at growing intervals, up to a limit; one that fails is tried at growing intervals, up to another limit.
No row is late because of that: every row is written with a due time in the future (its sender's lease, its backoff), a
poll returns the next due time of all pending rows, and the next turn is no later than that.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, NamedTuple, assert_never

from outbox_core.common.backoff import Backoff

SOON_JITTER_MS: Final = 50
LOOK_LATE_MS: Final = 2_000
_STALE_FACTOR: Final = 8
"""How many items the heap may hold for each source before stale ones are removed."""


@dataclass(frozen=True, slots=True)
class MoreRowsDue:
    """The turn ended, and more rows are due."""


@dataclass(frozen=True, slots=True)
class NoRowsDue:
    """No more rows are due. `found`: rows were claimed; `next_due_ms`: until the next pending row falls due, if any."""

    found: bool
    next_due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The turn had to end for a reason outside the source: a breaker, a rate limit, a postponed table."""

    wait_ms: int


@dataclass(frozen=True, slots=True)
class DatabaseFailure:
    """The source's database failed."""


Outcome = MoreRowsDue | NoRowsDue | HeldBack | DatabaseFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingOptions:
    """`interval_ms` after rows were found; multiplied by `growth` up to `idle_ms` without any; plus `jitter`."""

    interval_ms: int = 1_000
    idle_ms: int = 5_000
    growth: float = 1.5
    jitter: float = 0.25
    failure: Backoff = field(default_factory=lambda: Backoff(initial_ms=1_000, max_ms=60_000, jitter=0.5))

    @property
    def look_ahead_ms(self) -> int:
        """How far ahead a poll must see due times: the interval of polls, plus the time of a turn and its queue."""
        return int(max(self.interval_ms, self.idle_ms) * (1 + self.jitter)) + LOOK_LATE_MS


@dataclass(frozen=True, slots=True)
class SourcePace:
    """Turns of a source in a row that found no rows, and that failed."""

    idle_turns: int = 0
    failures: int = 0


def decide(pace: SourcePace, outcome: Outcome, *, options: PacingOptions, random: Random) -> tuple[SourcePace, int]:
    """Returns the source's new pace, and the time to its next turn in milliseconds."""
    match outcome:
        case MoreRowsDue():
            return SourcePace(), 0
        case NoRowsDue(found=rows_found, next_due_ms=next_due_ms):
            idle_turns = 0 if rows_found else pace.idle_turns + 1
            delay_ms = _idle_ms(idle_turns, options, random)
            if next_due_ms is not None:
                delay_ms = min(delay_ms, max(0, next_due_ms) + 1 + int(random.random() * SOON_JITTER_MS))
            return SourcePace(idle_turns=idle_turns), delay_ms
        case HeldBack(wait_ms=wait_ms):
            # No longer than an idle source waits: a turn that is held costs a poll a minute, and shows that the source
            # is served, however long its broker asks for a pause.
            return replace(pace, failures=0), max(1, min(wait_ms, max(options.interval_ms, options.idle_ms)))
        case DatabaseFailure():
            failures = pace.failures + 1
            return SourcePace(failures=failures), options.failure.delay_ms(failures, random)
        case _:
            assert_never(outcome)


def _idle_ms(idle_turns: int, options: PacingOptions, random: Random) -> int:
    """The jitter is added, never subtracted: the limit of idle queries holds on average too."""
    idle_ms = max(options.interval_ms, options.idle_ms)
    delay = float(options.interval_ms)
    for _ in range(idle_turns):
        if delay >= idle_ms:
            break
        delay = min(float(idle_ms), delay * options.growth)
    return max(1, int(delay * (1 + options.jitter * random.random())))


class _DueTurn(NamedTuple):
    """An entry of the heap: the earliest due turn first, of equal ones the first that was entered."""

    due_ms: int
    entry: int
    source: str


@dataclass(slots=True)
class _QueuedSource:
    """A source in the queue; `entry` is its newest entry in the heap, None while a worker has it.

    `hastened`: the delay that its running turn will return is out of date.
    """

    pace: SourcePace
    entry: int | None
    hastened: bool = False


class TurnQueue:
    """The queue of sources that wait for a turn: the longest due first, each source with one worker at a time.

    Sources whose last turn failed may use at most `suspects_max` workers: every try on a dead instance takes a connect
    time-out, for which other sources must not wait. Not thread-safe: its owner serializes the calls.
    """

    def __init__(self, options: PacingOptions, *, suspects_max: int, random: Random) -> None:
        self._options = options
        self._suspects_max = suspects_max
        self._random = random
        self._queued: dict[str, _QueuedSource] = {}
        self._busy: dict[str, bool] = {}  # source -> whether it failed last time
        self._due: list[_DueTurn] = []
        self._entries = itertools.count()

    @property
    def busy(self) -> frozenset[str]:
        """Sources that a worker has now."""
        return frozenset(self._busy)

    @property
    def entries(self) -> int:
        """How many entries the queue holds, outdated ones included: a bounded multiple of its sources."""
        return len(self._due)

    def failures(self, source: str) -> int:
        """The number of turns in a row that have failed."""
        queued = self._queued.get(source)
        return queued.pace.failures if queued else 0

    def keep(self, sources: Iterable[str], *, now_ms: int) -> None:
        """Replace the set of sources; new ones have a turn at once."""
        names = dict.fromkeys(sources)
        for removed in [source for source in self._queued if source not in names]:
            del self._queued[removed]
        for source in names:
            if source not in self._queued:
                self._queued[source] = _QueuedSource(SourcePace(), None)
                if source not in self._busy:
                    self._enter(source, now_ms)

    def take(self, *, now_ms: int) -> str | None:
        """Returns the source whose turn it is, the caller's until done(); None if no source is due."""
        passed_over: list[_DueTurn] = []
        source: str | None = None
        while self._due and self._due[0].due_ms <= now_ms and source is None:
            due_turn = heapq.heappop(self._due)
            if not self._stands(due_turn):
                continue
            queued = self._queued[due_turn.source]
            if queued.pace.failures and sum(self._busy.values()) >= self._suspects_max:
                passed_over.append(due_turn)
                continue
            queued.entry = None
            source = due_turn.source
            self._busy[source] = queued.pace.failures > 0
        for due_turn in passed_over:
            heapq.heappush(self._due, due_turn)
        return source

    def done(self, source: str, outcome: Outcome, *, now_ms: int) -> None:
        """Record the end of a turn, and schedule the next one by the source's pace, unless the source was removed."""
        self._busy.pop(source, None)
        queued = self._queued.get(source)
        if queued is None:
            return
        queued.pace, delay_ms = decide(queued.pace, outcome, options=self._options, random=self._random)
        hastened, queued.hastened = queued.hastened, False
        self._enter(source, now_ms if hastened else now_ms + delay_ms)

    def hasten(self, sources: Iterable[str], *, now_ms: int) -> None:
        """Schedule these sources now, unless they wait for their database; those that have a turn get another one right
        after it.
        """
        for source in sources:
            queued = self._queued.get(source)
            if queued is None or queued.pace.failures:
                continue
            if queued.entry is None:
                queued.hastened = True
            else:
                self._enter(source, now_ms)

    def wait_ms(self, *, now_ms: int) -> int | None:
        """Time until the next turn that a worker may take; None if only done() or keep() can make one due."""
        while self._due and not self._stands(self._due[0]):
            heapq.heappop(self._due)
        full = sum(self._busy.values()) >= self._suspects_max
        if not full:  # the usual case: the first one is due
            return max(0, self._due[0].due_ms - now_ms) if self._due else None
        dues = [
            due_turn.due_ms
            for due_turn in self._due
            if self._stands(due_turn) and not self._queued[due_turn.source].pace.failures
        ]
        return max(0, min(dues) - now_ms) if dues else None

    def _stands(self, due_turn: _DueTurn) -> bool:
        """Whether an entry of the heap is its source's newest; stale ones stay in the heap until they come first."""
        queued = self._queued.get(due_turn.source)
        return queued is not None and queued.entry == due_turn.entry

    def _enter(self, source: str, due_ms: int) -> None:
        entry = next(self._entries)
        self._queued[source].entry = entry
        heapq.heappush(self._due, _DueTurn(due_ms, entry, source))
        if len(self._due) > _STALE_FACTOR * (len(self._queued) + _STALE_FACTOR):
            self._due = [due_turn for due_turn in self._due if self._stands(due_turn)]
            heapq.heapify(self._due)
