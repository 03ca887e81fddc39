"""When each source has its next turn. It decides only: no I/O, no threads, no clock of its own.

A source that had more than a turn could take goes on at once, behind those that wait already. One that has nothing is
looked at ever more seldom, up to a bound; one that fails is tried ever more seldom, up to another. Nobody is late for
that: every row is written with a due time in the future (its sender's lease, its backoff), a look sees the next due
time of all pending rows, and the next turn is no later than that.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, assert_never

from outbox_core.common.backoff import Backoff

SOON_JITTER_MS: Final = 50
LOOK_LATE_MS: Final = 2_000
_STALE_FACTOR: Final = 8
"""How many items the heap may hold for each source before those that are stale are cleared away."""


@dataclass(frozen=True, slots=True)
class More:
    """The turn ended before the work did."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing more is due. `found`: rows were claimed; `next_due_ms`: until the next pending row falls due, if any."""

    found: bool
    next_due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Something else than this source says when: a breaker, a rate limit, a table that is set back."""

    wait_ms: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The source's database did not answer as it should."""


Outcome = More | Quiet | HeldBack | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingOptions:
    """`interval_ms` after something was found; grown by `growth` up to `idle_ms` while nothing is; `jitter` on top."""

    interval_ms: int = 1_000
    idle_ms: int = 5_000
    growth: float = 1.5
    jitter: float = 0.25
    failure: Backoff = field(default_factory=lambda: Backoff(initial_ms=1_000, max_ms=60_000, jitter=0.5))

    @property
    def look_ahead_ms(self) -> int:
        """How far ahead a look must see the next due time: to the next look, and what a turn and its queue take."""
        return int(max(self.interval_ms, self.idle_ms) * (1 + self.jitter)) + LOOK_LATE_MS


@dataclass(frozen=True, slots=True)
class SourcePace:
    """How a source has been doing: turns in a row that found nothing, and that failed."""

    idle_turns: int = 0
    failures: int = 0


def decide(pace: SourcePace, outcome: Outcome, *, options: PacingOptions, random: Random) -> tuple[SourcePace, int]:
    """The source's new pace, and in how many milliseconds it has its next turn."""
    match outcome:
        case More():
            return SourcePace(), 0
        case Quiet(found=found, next_due_ms=next_due_ms):
            idle_turns = 0 if found else pace.idle_turns + 1
            delay_ms = _idle_ms(idle_turns, options, random)
            if next_due_ms is not None:
                delay_ms = min(delay_ms, max(0, next_due_ms) + 1 + int(random.random() * SOON_JITTER_MS))
            return SourcePace(idle_turns=idle_turns), delay_ms
        case HeldBack(wait_ms=wait_ms):
            return replace(pace, failures=0), max(1, wait_ms)
        case Failed():
            failures = pace.failures + 1
            return SourcePace(failures=failures), options.failure.delay_ms(failures, random)
        case _:
            assert_never(outcome)


def _idle_ms(idle_turns: int, options: PacingOptions, random: Random) -> int:
    """The jitter is added, never taken off: the bound on idle queries holds on average too."""
    idle_ms = max(options.interval_ms, options.idle_ms)
    delay = float(options.interval_ms)
    for _ in range(idle_turns):
        if delay >= idle_ms:
            break
        delay = min(float(idle_ms), delay * options.growth)
    return max(1, int(delay * (1 + options.jitter * random.random())))


@dataclass(slots=True)
class _Place:
    """A source in the queue; `entry` is its newest entry in the heap, None while a worker has it.

    `hastened`: what its turn in hand says of when to come again is out of date.
    """

    pace: SourcePace
    entry: int | None
    hastened: bool = False


class TurnQueue:
    """Whose turn is next: the longest due first, each source with one worker at a time.

    Sources that failed last time may hold no more than `suspects_max` workers: a dead instance costs its connect
    time-out at every try, and must not cost it to the others. Its owner keeps it to one thread at a time.
    """

    def __init__(self, options: PacingOptions, *, suspects_max: int, random: Random) -> None:
        self._options = options
        self._suspects_max = suspects_max
        self._random = random
        self._places: dict[str, _Place] = {}
        self._busy: dict[str, bool] = {}  # source -> whether it failed last time
        self._due: list[tuple[int, int, str]] = []
        self._entries = itertools.count()

    @property
    def busy(self) -> frozenset[str]:
        """Sources that a worker has now."""
        return frozenset(self._busy)

    def failures(self, source: str) -> int:
        """How many turns in a row have failed."""
        place = self._places.get(source)
        return place.pace.failures if place else 0

    def keep(self, sources: Iterable[str], *, now_ms: int) -> None:
        """Exactly these have turns from now on; those that are new, at once."""
        wanted = dict.fromkeys(sources)
        for gone in [source for source in self._places if source not in wanted]:
            del self._places[gone]
        for source in wanted:
            if source not in self._places:
                self._places[source] = _Place(SourcePace(), None)
                if source not in self._busy:
                    self._enter(source, now_ms)

    def take(self, *, now_ms: int) -> str | None:
        """The source whose turn it is, now the caller's until done(); None where nobody's is."""
        passed_over: list[tuple[int, int, str]] = []
        taken: str | None = None
        while self._due and self._due[0][0] <= now_ms and taken is None:
            item = heapq.heappop(self._due)
            if not self._stands(item):
                continue
            place = self._places[item[2]]
            if place.pace.failures and sum(self._busy.values()) >= self._suspects_max:
                passed_over.append(item)
                continue
            place.entry = None
            taken = item[2]
            self._busy[taken] = place.pace.failures > 0
        for item in passed_over:
            heapq.heappush(self._due, item)
        return taken

    def done(self, source: str, outcome: Outcome, *, now_ms: int) -> None:
        """The turn has ended; the source has its next one when its pace says so, unless it left meanwhile."""
        self._busy.pop(source, None)
        place = self._places.get(source)
        if place is None:
            return
        place.pace, delay_ms = decide(place.pace, outcome, options=self._options, random=self._random)
        hastened, place.hastened = place.hastened, False
        self._enter(source, now_ms if hastened else now_ms + delay_ms)

    def hasten(self, sources: Iterable[str], *, now_ms: int) -> None:
        """Let these have their turn now, whatever they wait for; those that have one, another one right behind it."""
        for source in sources:
            place = self._places.get(source)
            if place is None:
                continue
            if place.entry is None:
                place.hastened = True
            else:
                self._enter(source, now_ms)

    def wait_ms(self, *, now_ms: int) -> int | None:
        """Until the next turn that somebody may take; None where only done() or keep() can bring one."""
        while self._due and not self._stands(self._due[0]):
            heapq.heappop(self._due)
        full = sum(self._busy.values()) >= self._suspects_max
        if not full:  # mostly: the first one is the one
            return max(0, self._due[0][0] - now_ms) if self._due else None
        dues = [item[0] for item in self._due if self._stands(item) and not self._places[item[2]].pace.failures]
        return max(0, min(dues) - now_ms) if dues else None

    def _stands(self, item: tuple[int, int, str]) -> bool:
        """Whether a heap's item is its source's newest; others are left where they are until their time comes."""
        place = self._places.get(item[2])
        return place is not None and place.entry == item[1]

    def _enter(self, source: str, due_ms: int) -> None:
        entry = next(self._entries)
        self._places[source].entry = entry
        heapq.heappush(self._due, (due_ms, entry, source))
        if len(self._due) > _STALE_FACTOR * (len(self._places) + _STALE_FACTOR):
            self._due = [item for item in self._due if self._stands(item)]
            heapq.heapify(self._due)
