"""Prometheus metrics of the operator, in a registry of its own."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from outbox_core.runtime.build_info import build

RESULTS: Final = ("done", "failed")


class OperatorMetrics:
    """What the operator counts. Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._rounds = Counter(
            "outbox_operator_rounds", "Looks at a resource, by result.", ["result"], registry=self.registry
        )
        self._last = Gauge(
            "outbox_operator_last_round_timestamp_seconds", "When one was last done.", registry=self.registry
        )
        self._leader = Gauge("outbox_operator_leader", "1 where this process acts.", registry=self.registry)
        for round_result in RESULTS:
            self._rounds.labels(round_result)
        info = Gauge("outbox_build_info", "What runs here.", ["version", "revision", "python"], registry=self.registry)
        info.labels(build().version, build().revision, build().python).set(1)

    def record_round(self, *, done: bool) -> None:
        """Record a look at a resource."""
        self._rounds.labels("done" if done else "failed").inc()
        if done:
            self._last.set_to_current_time()

    def set_leader(self, *, leads: bool) -> None:
        """Record whether this process acts."""
        self._leader.set(1 if leads else 0)
