"""Prometheus metrics of the compensator. It counts what its callers report, and queries nothing itself.

Labels are bounded: sources and brokers by the configuration, topics by TOPICS_MAX. Series of a source that another
instance serves now are removed, so that a stale figure raises no alarm.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from compensator.core.batch_totals import OUTCOMES
from compensator.retention.retention import PurgeResult
from compensator.work.source import SourceCounts
from compensator.work.source_schedule import HeldBack
from compensator.work.source_turn import TurnReport
from outbox.store.bounded_counts import RETRYING_ATTEMPTS
from outbox_core.messages.timing_port import SlotStatus
from outbox_core.runtime.build_info import build

TOPICS_MAX: Final = 500
OTHER_TOPICS: Final = "_other"
LATENESS_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5, 30, 60, 300)
_SCANS: Final = ("ok", "outage", "held", "error")


class CompensatorMetrics:
    """Metrics in a registry of their own, so that two compensators in one process do not collide. Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._topics: set[str] = set()
        self._lock = threading.Lock()
        self._ages_us: dict[str, int] = {}
        self._is_served: Mapping[str, bool] = {}
        """By source; empty until the sources are assigned, when turns of any are recorded."""
        self._scans = self._counter("compensator_scans", "Turns of sources, by result.", "result")
        self._rows = self._counter("compensator_rows", "Rows handled, by outcome.", "outcome")
        self._resent = self._counter(
            "compensator_resent", "Rows sent again, by topic, whatever the broker said.", "topic"
        )
        self._defects = self._counter("compensator_defects", "Deliveries that failed in a way that nobody foresaw.")
        self._purged = self._counter("compensator_purged_rows", "Rows deleted by retention, by table.", "table")
        self._tasks = self._counter(
            "compensator_periodic_task_failures", "Beats, gauges and retention rounds that failed.", "task"
        )
        self._duration = Histogram(
            "outbox_compensator_scan_duration_seconds", "How long a turn took.", registry=self.registry
        )
        self._last_success = self._gauge(
            "compensator_last_success_timestamp_seconds",
            "When a turn last ended without an error; 0: none since this instance serves the source.",
            "source",
        )
        self._leader = self._gauge("compensator_leader", "1 where this instance serves the source.", "source")
        self._sources = self._gauge("compensator_sources", "Sources that this instance serves.")
        self._failed_beats = self._gauge(
            "compensator_assignment_failed_beats", "How many beats in a row the registry of leases has not answered."
        )
        self._breaker = self._gauge(
            "compensator_breaker_open", "1 while rows are due for a broker that is out, and none is claimed.", "broker"
        )
        self._pending = self._gauge("pending_messages", "Rows that wait, counted up to a bound.", "source")
        self._retrying = self._gauge("retrying_messages", f"Rows tried {RETRYING_ATTEMPTS} times or more.", "source")
        self._parked = self._gauge("parked_messages", "Rows set aside for people.", "source")
        self._oldest = self._gauge(
            "oldest_due_age_seconds", "How long the oldest message waits, since commit or due time.", "source"
        )
        self._oldest_at = self._gauge(
            "oldest_pending_timestamp_seconds", "Since when the oldest message waits; 0 if none does.", "source"
        )
        self._by_source = (
            self._last_success, self._leader, self._pending, self._retrying, self._parked, self._oldest,
            self._oldest_at,
        )  # fmt: skip
        self._make_timer_metrics()
        self._begin_at_zero()

    def _make_timer_metrics(self) -> None:
        self._slots = SlotGauges(self.registry)
        self._timer_lateness = Histogram(
            "outbox_compensator_timer_lateness_seconds",
            "How long the first timer of a batch had been due when it was taken from the timing store.",
            buckets=LATENESS_BUCKETS,
            registry=self.registry,
        )
        self._timer_failures = self._counter("compensator_timer_failures", "Turns of timers that failed.", "source")
        self._timers_complete = self._gauge(
            "timing_store_complete", "1 where the timing store has all timers of this instance's slots.", "source"
        )
        self._rebuilt = self._gauge("timing_store_rebuilt_rows", "Rows that the last rebuild has read.", "source")
        self._to_rebuild = self._gauge("timing_store_rows_to_rebuild", "Rows of the last rebuild, or NaN.", "source")

    def record_turn(self, source: str, turn: TurnReport, *, seconds: float, now_seconds: float) -> None:
        """Record a turn that ended without an error, or by the broker's outage."""
        report = turn.report
        is_held_back = isinstance(turn.outcome, HeldBack) and not report.batches
        self._scans.labels("outage" if report.outage else "held" if is_held_back else "ok").inc()
        self._duration.observe(seconds)
        for outcome in OUTCOMES:
            self._rows.labels(outcome).inc(getattr(report, outcome))
        for topic, rows in turn.topics.items():
            self._resent.labels(self._bounded(topic)).inc(rows)
        self._defects.inc(report.defects)
        with self._lock:
            if self._is_served.get(source, True):
                self._set_source(source, turn, now_seconds=now_seconds)

    def _set_source(self, source: str, turn: TurnReport, *, now_seconds: float) -> None:
        """Set the gauges of a source to what a turn found."""
        self._last_success.labels(source).set(now_seconds)
        if turn.report.parked:
            self._parked.labels(source).inc(turn.report.parked)
        if turn.oldest_due_us is not None:
            # Not less than was counted: a row that an outage has put off is not due, and yet it waits.
            if not turn.pending or turn.oldest_due_us > self._ages_us.get(source, -1):
                self._set_age(source, turn.oldest_due_us, now_seconds=now_seconds)
            if not turn.pending:
                self._pending.labels(source).set(0)
                self._retrying.labels(source).set(0)

    def record_failed_turn(self, source: str) -> None:
        """Record a turn that ended by an error."""
        del source
        self._scans.labels("error").inc()

    def _set_age(self, source: str, age_us: int, *, now_seconds: float) -> None:
        self._ages_us[source] = age_us
        self._oldest.labels(source).set(age_us / 1_000_000)
        self._oldest_at.labels(source).set(now_seconds - age_us / 1_000_000 if age_us else 0)

    def set_counts(self, source: str, counts: SourceCounts, *, now_seconds: float) -> None:
        """Set the gauges of a source's tables, unless it was given away meanwhile."""
        with self._lock:
            if not self._is_served.get(source, True):
                return
            self._pending.labels(source).set(counts.pending)
            self._retrying.labels(source).set(counts.retrying)
            self._parked.labels(source).set(counts.parked)
            self._set_age(source, counts.oldest_due_age_us, now_seconds=now_seconds)

    def record_timers(self, source: str, *, late_ms: Sequence[int], complete: bool) -> None:
        """Record a turn of timers: of each batch, for how long its first timer was due."""
        for ms in late_ms:
            self._timer_lateness.observe(ms / 1_000)
        self._timers_complete.labels(source).set(1 if complete else 0)

    def record_timer_failure(self, source: str) -> None:
        """Record a turn of timers that ended by an error."""
        self._timer_failures.labels(source).inc()

    def record_rebuild(self, source: str, *, rows: int, total: int | None) -> None:
        """Record the progress of a rebuild; `total` None: unknown."""
        self._rebuilt.labels(source).set(rows)
        self._to_rebuild.labels(source).set(math.nan if total is None else total)

    def record_slots(self, source: str, statuses: Sequence[SlotStatus]) -> None:
        """Set the gauges of the slots that this instance serves of a source; series of others are removed."""
        self._slots.record(source, statuses)

    def forget_timers(self, source: str) -> None:
        """Remove the series of a source's timing store: all of its slots are others' now."""
        for gauge in (self._timers_complete, self._rebuilt, self._to_rebuild):
            gauge.remove_by_labels({"source": source})
        self._slots.record(source, [])

    def record_purge(self, purged: PurgeResult) -> None:
        """Record a round of retention."""
        self._purged.labels("archive").inc(purged.archive_rows)
        self._purged.labels("inbox").inc(purged.inbox_rows)
        self._purged.labels("order_head").inc(purged.order_heads)

    def record_task_failure(self, task: str) -> None:
        """Record a beat, a count or a round of retention that ended by an error."""
        self._tasks.labels(task).inc()

    def record_beat(self, *, failed: int, sources: int) -> None:
        """Record a beat; `failed`: how many in a row failed. The assignment does not change then."""
        self._sources.set(sources)
        self._failed_beats.set(failed)
        if failed:
            self.record_task_failure("beat")

    def set_served(self, sources: Mapping[str, bool]) -> None:
        """Set which sources this instance serves; series of others are removed; their compensator_leader is 0.

        The last success of a new one is 0: a source that never had one must raise the alarm as well.
        """
        with self._lock:  # a turn or a count that ends later must not bring back what is removed here
            for source, is_served in sources.items():
                self._set_served(source, is_served=is_served)
            self._is_served = dict(sources)

    def _set_served(self, source: str, *, is_served: bool) -> None:
        if is_served and not self._is_served.get(source, False):
            self._last_success.labels(source).set(0)
        if not is_served:
            for gauge in self._by_source:
                gauge.remove_by_labels({"source": source})
            self._ages_us.pop(source, None)
        self._leader.labels(source).set(1 if is_served else 0)

    def watch_broker(self, broker: str, is_out: Callable[[], bool]) -> None:
        """Have each scrape ask whether a broker is out: that may end without an event, where nothing is due for it."""
        self._breaker.labels(broker).set_function(lambda: 1 if is_out() else 0)

    def _begin_at_zero(self) -> None:
        for turn_result in _SCANS:
            self._scans.labels(turn_result)
        for outcome in OUTCOMES:
            self._rows.labels(outcome)
        for table in ("archive", "inbox", "order_head"):
            self._purged.labels(table)
        build_gauge = Gauge(
            "outbox_build_info", "What runs here.", ["version", "revision", "python"], registry=self.registry
        )
        running = build()
        build_gauge.labels(running.version, running.revision, running.python).set(1)

    def _bounded(self, topic: str) -> str:
        if topic in self._topics or len(self._topics) < TOPICS_MAX:
            self._topics.add(topic)
            return topic
        return OTHER_TOPICS

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"outbox_{name}", description, labels, registry=self.registry)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(f"outbox_{name}", description, labels, registry=self.registry)


_LABELS: Final = ("source", "slot")


class SlotGauges:
    """Whether a slot answers, its timers, and those of them that are due. For one thread a source at a time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Gauge(
            "outbox_timing_store_slot_answers", "1 where this slot of the timing store answers.", _LABELS,
            registry=registry,
        )  # fmt: skip
        self._timers = Gauge("outbox_timing_store_slot_timers", "Timers of a slot.", _LABELS, registry=registry)
        self._due = Gauge(
            "outbox_timing_store_slot_due_timers", "Timers of a slot that are due.", _LABELS, registry=registry
        )
        self._shown: dict[str, set[int]] = {}

    def record(self, source: str, statuses: Sequence[SlotStatus]) -> None:
        """Set the series of these slots of a source, and remove those of its others; of a slot that does not answer
        only that is shown.
        """
        answered = {status.slot: status.figures for status in statuses if status.figures is not None}
        for slot in self._shown.get(source, set()) - answered.keys():
            for gauge in (self._answers, self._timers, self._due):
                gauge.remove_by_labels({"source": source, "slot": str(slot)})
        self._shown[source] = {status.slot for status in statuses}
        for slot in self._shown[source]:
            self._answers.labels(source, slot).set(1 if slot in answered else 0)
        for slot, figures in answered.items():
            self._timers.labels(source, slot).set(figures.timers)
            self._due.labels(source, slot).set(figures.due)
