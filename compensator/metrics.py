"""What the compensator tells Prometheus. Names by convention; counts only, no scan of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from compensator.scan import PassReport
from outbox.store import Backlog


class CompensatorMetrics:
    """Metrics in a registry of their own, so that two compensators in one process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._scans = Counter(
            "outbox_compensator_scans", "Passes over the message table, by result.", ["result"], registry=self.registry
        )
        self._rows = Counter(
            "outbox_compensator_rows", "Rows handled by passes, by outcome.", ["outcome"], registry=self.registry
        )
        self._duration = Histogram(
            "outbox_compensator_scan_duration_seconds", "How long a pass took.", registry=self.registry
        )
        self._last_success = Gauge(
            "outbox_compensator_last_success_timestamp_seconds",
            "When a pass last ended without an error.",
            registry=self.registry,
        )
        self._pending = Gauge(
            "outbox_pending_messages", "Rows that wait, counted up to a bound.", registry=self.registry
        )
        self._dead = Gauge("outbox_parked_messages", "Rows set aside for people.", registry=self.registry)
        self._oldest = Gauge(
            "outbox_oldest_due_age_seconds", "How long the longest due row has been due.", registry=self.registry
        )
        for result in ("ok", "outage", "error"):
            self._scans.labels(result)
        for outcome in ("accepted", "retried", "parked", "stale"):
            self._rows.labels(outcome)

    def passed(self, report: PassReport, *, seconds: float, now_seconds: float) -> None:
        """A pass ended, well or by the broker's outage."""
        self._scans.labels("outage" if report.outage else "ok").inc()
        self._duration.observe(seconds)
        for outcome in ("accepted", "retried", "parked", "stale"):
            self._rows.labels(outcome).inc(getattr(report, outcome))
        if report.outage is None:
            self._last_success.set(now_seconds)

    def failed(self) -> None:
        """A pass ended by an error."""
        self._scans.labels("error").inc()

    def stands(self, backlog: Backlog) -> None:
        """How the table stands."""
        self._pending.set(backlog.pending)
        self._dead.set(backlog.parked)
        self._oldest.set(backlog.oldest_due_age_us / 1_000_000)
