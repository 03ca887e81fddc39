"""The circuit breaker of one broker: may rows be claimed for it now, and how many. It decides only: no I/O, no threads.

    closed ──outage──> open ──its wait is over──> half open ──the probe was taken──> closing ──ramp over──> closed
                        ^                             │                                 │
                        └──────────outage─────────────┴─────────────outage──────────────┘

While it is open nothing is claimed for this broker, so that an outage costs no row an attempt. Half open, one small
batch of one source is let through. Closing lets a stated number of rows a second through, doubled step by step, so that
a broker that has just come back isn't struck down by the backlog.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from compensator.admission.rate_limiter import RateLimit, RateOptions
from outbox_core.common.backoff import Backoff


class BreakerState(StrEnum):
    """How a broker is thought of."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    CLOSING = "closing"


class BatchOutcome(StrEnum):
    """What a permitted batch came to: taken (rows were answered), outage, or nothing learnt (no row was claimed)."""

    TAKEN = "taken"
    OUTAGE = "outage"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOptions:
    """How long it stays open, how small the probe is, and at what rate the backlog is drained after an outage."""

    backoff: Backoff = field(default_factory=lambda: Backoff(initial_ms=1_000, max_ms=30_000, jitter=0.25))
    probe_rows: int = 10
    probe_ms_max: int = 60_000
    drain_rows_per_second: int = 1_000
    drain_step_ms: int = 1_000
    drain_steps: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Leave to claim up to `rows` rows, to be answered by settle(). `epoch` tells late answers from fresh ones."""

    rows: int
    epoch: int


class Breaker:
    """One broker's breaker, shared by all its sources. Its owner keeps it to one thread at a time."""

    def __init__(self, options: BreakerOptions, *, random: Random) -> None:
        self._options = options
        self._random = random
        self._state = BreakerState.CLOSED
        self._epoch = 0
        self._outages = 0
        self._until_ms = 0
        self._closing_since_ms = 0
        self._ramp: RateLimit | None = None
        self._ramp_step = -1

    @property
    def state(self) -> BreakerState:
        """What it is now."""
        return self._state

    def wait_ms(self, rows_max: int, *, now_ms: int) -> int:
        """For how long there is no point in asking; 0 where permit() may say yes. Changes no state."""
        match self._state:
            case BreakerState.OPEN | BreakerState.HALF_OPEN:
                return max(0, self._until_ms - now_ms)
            case BreakerState.CLOSING if self._ramp is not None and self._step(now_ms) == self._ramp_step:
                return self._ramp.wait_ms(rows_max, now_ms=now_ms)
            case _:
                return 0

    def permit(self, rows_max: int, *, now_ms: int) -> Permit | None:
        """Leave to claim, or None: come again after wait_ms()."""
        match self._state:
            case BreakerState.CLOSED:
                rows = rows_max
            case BreakerState.CLOSING:
                rows = self._drain(rows_max, now_ms=now_ms)
            case _:
                rows = self._probe(rows_max, now_ms=now_ms)
        return Permit(rows=rows, epoch=self._epoch) if rows else None

    def settle(
        self, permit: Permit, answer: BatchOutcome, *, now_ms: int, claimed: int, retry_after_ms: int = 0
    ) -> None:
        """What the batch of this permit came to. Answers to permits of an earlier epoch say nothing about now."""
        if permit.epoch != self._epoch:
            return
        if self._ramp is not None:
            self._ramp.give_back(permit.rows - claimed)
        match answer:
            case BatchOutcome.OUTAGE:
                self._open(now_ms=now_ms, retry_after_ms=retry_after_ms)
            case BatchOutcome.TAKEN if self._state is BreakerState.HALF_OPEN:
                self._close_slowly(now_ms=now_ms)
            case BatchOutcome.UNKNOWN if self._state is BreakerState.HALF_OPEN:
                self._become(BreakerState.OPEN)  # nothing was learnt: another source may probe at once
                self._until_ms = now_ms
            case _:
                pass

    def _become(self, state: BreakerState) -> None:
        self._state = state
        self._epoch += 1

    def _open(self, *, now_ms: int, retry_after_ms: int) -> None:
        self._become(BreakerState.OPEN)
        self._outages += 1
        self._ramp = None
        self._until_ms = now_ms + max(self._options.backoff.delay_ms(self._outages, self._random), retry_after_ms)

    def _probe(self, rows_max: int, *, now_ms: int) -> int:
        """The one small batch that finds out. Were its owner to vanish, another one may go after `probe_ms_max`."""
        if now_ms < self._until_ms:
            return 0
        self._become(BreakerState.HALF_OPEN)
        self._until_ms = now_ms + self._options.probe_ms_max
        return min(rows_max, self._options.probe_rows)

    def _close_slowly(self, *, now_ms: int) -> None:
        self._become(BreakerState.CLOSING)
        self._closing_since_ms = now_ms
        self._ramp_step = -1

    def _drain(self, rows_max: int, *, now_ms: int) -> int:
        step = self._step(now_ms)
        if step >= self._options.drain_steps:
            self._state = BreakerState.CLOSED  # the same epoch: answers to batches of the ramp still count
            self._outages = 0
            self._ramp = None
            return rows_max
        if step != self._ramp_step or self._ramp is None:
            # A burst of a tenth of a second: the rate is meant within each second, not on average.
            rate = RateOptions(rows_per_second=self._options.drain_rows_per_second * 2.0**step, burst_ms=100)
            self._ramp = RateLimit(rate, now_ms=now_ms)
            self._ramp_step = step
        return self._ramp.take(rows_max, now_ms=now_ms)

    def _step(self, now_ms: int) -> int:
        return max(0, now_ms - self._closing_since_ms) // self._options.drain_step_ms
