"""The gate before a claim: a broker's breaker and the rate limits that apply to a source, as one question. Thread-safe.

What the breaker and the limits decide is theirs; here is who asks them, under which lock, and who is told of a change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from random import Random

from compensator.admission.circuit_breaker import BatchOutcome, Breaker, BreakerOptions, BreakerState, Permit
from compensator.admission.rate_limiter import RateLimit, RateOptions, take_of_all, wait_for_all
from compensator.core.batch_totals import PassReport
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerThrottled

logger = logging.getLogger(__name__)


class AdmissionGate:
    """One source's way to its broker."""

    def __init__(
        self,
        *,
        clock: Clock,
        lock: threading.Lock,
        breaker: Breaker,
        limits: Sequence[RateLimit],
        told: Callable[[BreakerState], None],
    ) -> None:
        """`lock` is shared by all who share the breaker or a limit; `told` hears each new state of the breaker."""
        self._clock = clock
        self._lock = lock
        self._breaker = breaker
        self._limits = limits
        self._told = told

    def wait_ms(self, rows_max: int) -> int:
        """For how long nothing will be let through; 0 where it is worth looking for rows."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            limits_ms = wait_for_all(self._limits, rows_max, now_ms=now_ms)
            return max(self._breaker.wait_ms(rows_max, now_ms=now_ms), limits_ms)

    def permit(self, rows_max: int) -> Permit | None:
        """Leave to claim up to so many rows, to be answered by settle(); None: not now."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            rows = take_of_all(self._limits, rows_max, now_ms=now_ms)
            permit = self._breaker.permit(rows, now_ms=now_ms) if rows else None
            for limit in self._limits:
                limit.give_back(rows - (permit.rows if permit else 0))
            return permit

    def settle(self, permit: Permit, report: PassReport | None) -> None:
        """What the permitted batch came to; None where it failed before the broker was asked."""
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
        if after is not before:
            self._told(after)


class Gates:
    """The gates of one compensator: a breaker for each broker, a limit for all sources together, and each one's own."""

    def __init__(
        self, *, clock: Clock, random: Random, breaker: BreakerOptions, limit: RateOptions | None = None
    ) -> None:
        self._clock = clock
        self._random = random
        self._options = breaker
        self._lock = threading.Lock()
        self._total = [RateLimit(limit, now_ms=clock.monotonic_ms())] if limit else []
        self._breakers: dict[str, Breaker] = {}
        self._listeners: list[Callable[[str, BreakerState], None]] = []

    def gate(self, broker: str, *, limit: RateOptions | None = None) -> AdmissionGate:
        """A source's gate to the broker of this name."""
        breaker = self._breakers.setdefault(broker, Breaker(self._options, random=self._random))
        own = [RateLimit(limit, now_ms=self._clock.monotonic_ms())] if limit else []
        return AdmissionGate(
            clock=self._clock,
            lock=self._lock,
            breaker=breaker,
            limits=[*self._total, *own],
            told=lambda state: self._tell(broker, state),
        )

    def listen(self, listener: Callable[[str, BreakerState], None]) -> None:
        """Tell the listener each breaker's new states, from whichever thread brought them about."""
        self._listeners.append(listener)

    @property
    def states(self) -> Mapping[str, BreakerState]:
        """What each broker's breaker is now."""
        with self._lock:
            return {broker: breaker.state for broker, breaker in self._breakers.items()}

    def _tell(self, broker: str, state: BreakerState) -> None:
        logger.warning("breaker_changed", extra={"broker": broker, "state": str(state)})
        for listener in self._listeners:
            listener(broker, state)


def _answer(report: PassReport | None) -> BatchOutcome:
    if report is None or not report.claimed:
        return BatchOutcome.UNKNOWN
    if report.outage is not None:
        return BatchOutcome.OUTAGE
    # Rows that are held, or were put off for a defect, may never have been shown to the broker.
    answered = report.accepted + report.parked + report.stale + (0 if report.defects else report.retried)
    return BatchOutcome.TAKEN if answered else BatchOutcome.UNKNOWN


def _retry_after_ms(report: PassReport | None) -> int:
    outage = report.outage if report else None
    return outage.retry_after_ms if isinstance(outage, BrokerThrottled) else 0
