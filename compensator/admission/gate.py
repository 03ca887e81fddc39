"""The gate before a claim: combines a broker's breaker with the rate limits of a source. Thread-safe.

The breaker and the limits decide. This module calls them under a lock, and notifies listeners of changes of state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from random import Random

from compensator.admission.circuit_breaker import BatchOutcome, Breaker, BreakerOptions, BreakerState, Permit
from compensator.admission.rate_limiter import RateLimiter, RateOptions, take_of_all, wait_for_all
from compensator.core.batch_totals import BatchTotals
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerThrottled
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class AdmissionGate:
    """Admission of one source's rows to its broker."""

    def __init__(
        self,
        *,
        clock: Clock,
        lock: threading.Lock,
        breaker: Breaker,
        limits: Sequence[RateLimiter],
        on_change: Callable[[BreakerState, str], None],
    ) -> None:
        """`lock` is shared by all gates that share the breaker or a limit; `on_change` gets a new state and why."""
        self._clock = clock
        self._lock = lock
        self._breaker = breaker
        self._limits = limits
        self._on_change = on_change

    def wait_ms(self, rows_max: int) -> int:
        """Time in which permit() would return None; 0 if it is worth polling for rows."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            limits_ms = wait_for_all(self._limits, rows_max, now_ms=now_ms)
            return max(self._breaker.wait_ms(rows_max, now_ms=now_ms), limits_ms)

    def permit(self, rows_max: int) -> Permit | None:
        """Permission to claim up to `rows_max` rows; settle() must follow. None: not now."""
        with self._lock:
            before = self._breaker.state
            now_ms = self._clock.monotonic_ms()
            rows = take_of_all(self._limits, rows_max, now_ms=now_ms)
            permit = self._breaker.permit(rows, now_ms=now_ms) if rows else None
            for limit in self._limits:
                limit.give_back(rows - (permit.rows if permit else 0))
            after = self._breaker.state
        is_probe = after is BreakerState.HALF_OPEN
        self._tell(before, after, "its pause is over: a probe is sent" if is_probe else "the broker answers")
        return permit

    def settle(self, permit: Permit, report: BatchTotals | None) -> None:
        """Record the result of the permitted batch; None if it failed before anything was sent."""
        claimed = report.claimed if report else 0
        with self._lock:
            before = self._breaker.state
            for limit in self._limits:
                limit.give_back(permit.rows - claimed)
            self._breaker.settle(
                permit,
                _answer(report),
                now_ms=self._clock.monotonic_ms(),
                claimed=claimed,
                retry_after_ms=_retry_after_ms(report),
            )
            after = self._breaker.state
        outage = None if report is None else report.outage
        self._tell(before, after, str(outage) if outage is not None else "the broker answers")

    def _tell(self, before: BreakerState, after: BreakerState, reason: str) -> None:
        """Called without the lock: listeners have locks of their own, and may ask gates."""
        if after is not before:
            self._on_change(after, reason)


class Gates:
    """The gates of one compensator: a breaker for each broker, a rate limit common to all sources, and one for each."""

    def __init__(
        self, *, clock: Clock, random: Random, breaker: BreakerOptions, limit: RateOptions | None = None
    ) -> None:
        self._clock = clock
        self._random = random
        self._options = breaker
        self._lock = threading.Lock()
        self._total = [RateLimiter(limit, now_ms=clock.monotonic_ms())] if limit else []
        self._breakers: dict[str, Breaker] = {}
        self._listeners: list[Callable[[str, BreakerState], None]] = []

    def gate(self, broker: str, *, limit: RateOptions | None = None) -> AdmissionGate:
        """Create a source's gate to the broker of this name."""
        breaker = self._breakers.setdefault(broker, Breaker(self._options, random=self._random))
        own = [RateLimiter(limit, now_ms=self._clock.monotonic_ms())] if limit else []
        return AdmissionGate(
            clock=self._clock,
            lock=self._lock,
            breaker=breaker,
            limits=[*self._total, *own],
            on_change=lambda state, reason: self._tell(broker, state, reason),
        )

    def listen(self, listener: Callable[[str, BreakerState], None]) -> None:
        """Call the listener at each change of a breaker's state, from the thread that caused it."""
        self._listeners.append(listener)

    @property
    def states(self) -> Mapping[str, BreakerState]:
        """The state of each broker's breaker."""
        with self._lock:
            return {broker: breaker.state for broker, breaker in self._breakers.items()}

    def is_out(self, broker: str) -> bool:
        """Whether a broker is out, by what is known, see Breaker.is_out()."""
        with self._lock:
            return self._breakers[broker].is_out(now_ms=self._clock.monotonic_ms())

    def _tell(self, broker: str, state: BreakerState, reason: str) -> None:
        # A probe of a broker that is still out changes the state twice: only what lasts is worth a warning.
        level = logging.INFO if state is BreakerState.HALF_OPEN else logging.WARNING
        logger.log(level, "breaker_changed", extra={"broker": broker, "state": str(state), "reason": reason})
        for listener in self._listeners:
            listener(broker, state)


def _answer(report: BatchTotals | None) -> BatchOutcome:
    if report is None or not report.claimed:
        return BatchOutcome.UNKNOWN
    if report.outage is not None:
        return BatchOutcome.OUTAGE
    # Rows that are held, or were postponed for a defect, may never have been sent to the broker.
    answered = report.accepted + report.parked + report.stale + (0 if report.defects else report.retried)
    return BatchOutcome.TAKEN if answered else BatchOutcome.UNKNOWN


def _retry_after_ms(report: BatchTotals | None) -> int:
    outage = report.outage if report else None
    return outage.retry_after_ms if isinstance(outage, BrokerThrottled) else 0
