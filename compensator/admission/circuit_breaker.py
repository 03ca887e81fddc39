"""The circuit breaker of one broker: limits how many rows may be claimed for it. Decides only: no I/O, no threads.

    closed ──outage──> open ──wait has expired──> half open ──probe succeeded───> closing ──ramp over──> closed
                        ^                             │                                 │
                        └──────────outage─────────────┴─────────────outage──────────────┘

While it is open, nothing is claimed for this broker, so an outage uses up no attempts. While it is half open, one small
batch of one source is permitted. While it is closing, a configured number of rows a second is permitted, doubled at
each step, so that the backlog does not overload a broker that has just recovered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Final

from compensator.admission.rate_limiter import RateLimiter, RateOptions
from outbox_core.common.backoff import Backoff

OUT_WITHOUT_PROBE_MS: Final = 120_000
"""A probe that could have been sent for so long, and was not, shows that nothing is due for the broker here."""


class BreakerState(StrEnum):
    """States of a breaker, see the diagram above."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    CLOSING = "closing"


class BatchOutcome(StrEnum):
    """Result of a permitted batch: taken (the broker answered for rows), outage, or nothing learnt (no row claimed)."""

    TAKEN = "taken"
    OUTAGE = "outage"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOptions:
    """How long a breaker stays open, the size of the probe, and the rate that drains the backlog after an outage."""

    backoff: Backoff = field(default_factory=lambda: Backoff(initial_ms=1_000, max_ms=30_000, jitter=0.25))
    probe_rows: int = 10
    probe_ms_max: int = 60_000
    drain_rows_per_second: int = 1_000
    drain_step_ms: int = 1_000
    drain_steps: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Permission to claim up to `rows` rows; settle() must follow. `epoch` tells late results from current ones."""

    rows: int
    epoch: int


class Breaker:
    """One broker's breaker, shared by all its sources. Not thread-safe: its owner serializes the calls."""

    def __init__(self, options: BreakerOptions, *, random: Random) -> None:
        self._options = options
        self._random = random
        self._state = BreakerState.CLOSED
        self._epoch = 0
        self._outages = 0
        self._until_ms = 0
        self._closing_since_ms = 0
        self._ramp: RateLimiter | None = None
        self._ramp_step = -1

    @property
    def state(self) -> BreakerState:
        """The current state."""
        return self._state

    def is_out(self, *, now_ms: int) -> bool:
        """Whether the broker is known to be out: since its last outage there was not yet time enough for a probe."""
        is_open = self._state in {BreakerState.OPEN, BreakerState.HALF_OPEN}
        return is_open and now_ms < self._until_ms + OUT_WITHOUT_PROBE_MS

    def wait_ms(self, rows_max: int, *, now_ms: int) -> int:
        """Time in which permit() would return None; 0 if it may return a permit. Changes no state."""
        match self._state:
            case BreakerState.OPEN | BreakerState.HALF_OPEN:
                return max(0, self._until_ms - now_ms)
            case BreakerState.CLOSING if self._ramp is not None and self._step(now_ms) == self._ramp_step:
                return self._ramp.wait_ms(rows_max, now_ms=now_ms)
            case _:
                return 0

    def permit(self, rows_max: int, *, now_ms: int) -> Permit | None:
        """Permission to claim, or None: try again after wait_ms()."""
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
        """Record the result of this permit's batch. Results for permits of an earlier epoch are ignored."""
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
                self._become(BreakerState.OPEN)  # the probe had no result: another source may probe at once
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
        """Permit the probe, one small batch. If its owner vanishes, another is permitted after `probe_ms_max`."""
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
            self._state = BreakerState.CLOSED  # the same epoch: results of the ramp's batches still count
            self._outages = 0
            self._ramp = None
            return rows_max
        if step != self._ramp_step or self._ramp is None:
            # A burst of a tenth of a second: the rate holds within each second, not only on average.
            rate = RateOptions(rows_per_second=self._options.drain_rows_per_second * 2.0**step, burst_ms=100)
            self._ramp = RateLimiter(rate, now_ms=now_ms)
            self._ramp_step = step
        return self._ramp.take(rows_max, now_ms=now_ms)

    def _step(self, now_ms: int) -> int:
        return max(0, now_ms - self._closing_since_ms) // self._options.drain_step_ms
