"""The metrics of one server, in their own registry: read from the engine on each scrape, or counted here."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from outbox_broker.engine.publisher import OTHERS
from outbox_broker.engine.puller import PulledMessages
from outbox_broker.http.admission_limits import ByteBudget, ConnectionTable
from outbox_broker.http.service_ports import MetricsSource, ServicePorts
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.lateness import Lateness
from outbox_core.common.errors import StorageFailed
from outbox_core.runtime.build_info import build

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LATENCY_SECONDS: Final = (*_SECONDS, 300, 1800, 3600, 6 * 3600, 24 * 3600)
_HORIZONS_MS: Final = {"1m": 60_000, "1h": 3_600_000, "1d": 86_400_000, "30d": 30 * 86_400_000}
_BY_TOPIC: Final = {
    "published_stored": ("broker_messages_received", "Messages stored."),
    "published_duplicate": ("broker_messages_duplicate", "Messages passed over because their id was stored before."),
    "published_deferred": (
        "broker_messages_deferred",
        "Messages not taken for now, since their publisher's clock differs by more than an hour from this host's.",
    ),
    "fired": ("broker_messages_dispatched", "Scheduled messages that fell due."),
    "refused_by_target": (
        "broker_delay_refused_messages",
        "Scheduled messages that a delay service's target refused for good, until they are retried or canceled.",
    ),
    "deferred_by_target": (
        "broker_delay_deferred_messages",
        "Scheduled messages that a delay service's target did not take for now; each try counts.",
    ),
    "recurring_fired": ("broker_recurring_fired", "Occurrences of recurring messages that were published."),
    "recurring_missed": (
        "broker_recurring_missed",
        "Occurrences of recurring messages that were passed over for newer ones, after a pause or while it was down.",
    ),
    "quarantined": ("broker_messages_quarantined", "Damaged messages that became dead letters, once for each group."),
    "broadcast": ("broker_messages_broadcast", "Messages read by readers without a group."),
}
_BY_GROUP: Final = {
    "delivered": ("broker_messages_delivered", "Deliveries."),
    "redelivered": ("broker_messages_redelivered", "Deliveries that were not a message's first to its group."),
    "acknowledged": ("broker_messages_acknowledged", "Deliveries acknowledged."),
    "discarded": ("broker_messages_discarded", "Dead letters that operators discarded."),
    "edited": ("broker_messages_edited", "Dead letters that operators edited."),
    "filtered": ("broker_messages_filtered", "Messages that a group passed because its filter does not take them."),
}
_REASONS: Final = {
    "published_rejected": ("broker_messages_rejected", "Messages refused one by one.", ("topic",)),
    "dead_lettered": ("broker_messages_dead_lettered", "Messages that a group gave up on.", ("topic", "group")),
}
_FIGURES: Final = {
    "backlog": ("broker_ready_messages", "Messages that are ready for delivery."),
    "in_flight": ("broker_inflight_messages", "Messages that consumers hold."),
    "dead": (
        "broker_dead_messages",
        "Messages that the group gave up on and that nobody redrove, edited or discarded.",
    ),
}


_DISK: Final = {
    "disk_free_bytes": "What this process may still use of the data folder's file system.",
    "disk_size_bytes": "The size of the data folder's file system.",
}


class BrokerMetrics:
    """The metrics served by `/metrics`."""

    def __init__(
        self, served: Callable[[], ServicePorts], *, series_max: int, registry: CollectorRegistry | None = None
    ) -> None:
        """`served`: returns what is served now. `registry`: where they are registered, by default in one of their
        own.
        """
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(EngineCollector(served, series_max=series_max))
        self._series_max = series_max
        self._groups: set[tuple[str, str]] = set()
        self._requests = Counter(
            "broker_http_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "broker_http_request_duration_seconds",
            "Time to answer a request, without waiting for messages.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._latency = Histogram(
            "broker_delivery_latency_seconds",
            "From a message's creation, or its due time if that is later, to its first delivery.",
            ("topic", "group"),
            buckets=_LATENCY_SECONDS,
            registry=self.registry,
        )
        self._known: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self.certificate_end = Gauge(
            "broker_certificate_expiry_timestamp_seconds",
            "When the certificate that new connections are shown expires; 0: there is none.",
            registry=self.registry,
        )
        self.waiting = Gauge("broker_http_waiting_pulls", "Long polls that wait now.", registry=self.registry)
        self._failures = Counter("broker_http_failures", "Requests that met a defect.", registry=self.registry)
        built = Gauge(
            "outbox_build_info", "1; the labels tell.", ("version", "revision", "python"), registry=self.registry
        )
        here = build()
        built.labels(here.version, here.revision, here.python).set(1)

    def watch(self, table: ConnectionTable, budget: ByteBudget) -> None:
        """Register a server's connections and its byte budget."""
        self.registry.register(ConnectionCollector(table, budget))

    def count_request(self, method: str, route: str, *, status: int, seconds: float | None) -> None:
        """Count a request; `seconds` is None if most of it was waiting."""
        labels = (method, route, status)
        series = self._known.get(labels)
        if series is None:  # labels() costs more than the counting; bounded by routes and statuses
            series = self._requests.labels(method, route, str(status)), self._seconds.labels(route)
            self._known[labels] = series
        series[0].inc()
        if seconds is not None:
            series[1].observe(seconds)

    def count_failure(self) -> None:
        """Count a request that failed on a bug of the broker."""
        self._failures.inc()

    def count_delivered(self, topic: str, group: str, pulled_runs: Sequence[PulledMessages], *, now_ms: int) -> None:
        """Count deliveries about to be sent; the latency is that of the oldest message on its first delivery."""
        ages_ms = [
            now_ms
            - (
                record.created_at_ms
                if record.deliver_at_ms is None
                else max(record.created_at_ms, record.deliver_at_ms)
            )
            for run in pulled_runs
            if run.out.attempt == 1
            for record in run.records
        ]
        if ages_ms:
            self._latency.labels(*self._bounded(topic, group)).observe(max(0, *ages_ms) / 1000)

    def forget(self, topic: str, group: str | None = None) -> None:
        """Drop the series of a deleted group, or, without one, of a deleted topic."""
        for labels in [labels for labels in list(self._groups) if labels[0] == topic and group in {None, labels[1]}]:
            self._groups.discard(labels)
            with suppress(KeyError):  # another thread has removed it
                self._latency.remove(*labels)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Returns the text and its content type: OpenMetrics if the scraper accepts it."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def _bounded(self, topic: str, group: str) -> tuple[str, str]:
        labels = (topic, group)
        if labels in self._groups:
            return labels
        if len(self._groups) >= self._series_max:
            return OTHERS, OTHERS
        self._groups.add(labels)
        return labels


class ConnectionCollector(Collector):
    """Reads a server's connections and bytes on each scrape."""

    def __init__(self, table: ConnectionTable, budget: ByteBudget) -> None:
        self._table = table
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        """Yields connections, refused and evicted ones, and bytes."""
        table = self._table
        yield GaugeMetricFamily("broker_http_connections", "Connections, with those of the reserve.", value=len(table))
        ended = CounterMetricFamily(
            "broker_http_connections_refused", "Connections ended for want of room: as they came, or for a newer one.",
            labels=("reason",),
        )  # fmt: skip
        ended.add_metric(["no_room"], table.refused)
        ended.add_metric(["made_room"], table.evicted)
        yield ended
        yield GaugeMetricFamily(
            "broker_http_work_bytes", "Bytes that requests and responses in work count as; work_bytes_max bounds them.",
            value=self._budget.leased_bytes,
        )  # fmt: skip


class EngineCollector(Collector):
    """Reads the engine on each scrape. A family with more than `series_max` series sums up the others as `~others`."""

    def __init__(self, served: Callable[[], ServicePorts], *, series_max: int) -> None:
        self._served = served
        self._series_max = series_max

    def collect(self) -> Iterator[Metric]:
        """Yields every family, including those without samples, so that a counter exists before its first event."""
        served = self._served()
        totals = served.measured.counters()
        yield from self._families(totals, _BY_TOPIC, labels=("topic",))
        yield from self._families(totals, _BY_GROUP, labels=("topic", "group"))
        yield from self._by_reason(totals)
        yield from self._groups(served)
        yield from _logs(served.measured.log_figures())
        if served.operations is not None:
            yield GaugeMetricFamily(
                "broker_cordoned", "1 while an operator has the broker take no new messages.",
                value=int(served.operations.cordon.note is not None),
            )  # fmt: skip
        if served.broker is not None:
            yield GaugeMetricFamily(
                "broker_recurring_messages", "Recurring messages, paused ones too.",
                value=len(served.broker.recurring.names()),
            )  # fmt: skip
        yield _scheduled(served.measured)
        yield _lateness(served.measured.lateness)
        yield _syncs(served.measured.syncs)

    def _families(
        self, totals: Mapping[tuple[str, str, str], int], names: Mapping[str, tuple[str, str]], *, labels: Sequence[str]
    ) -> Iterator[Metric]:
        for counter_kind, (name, help_text) in names.items():
            family = CounterMetricFamily(name, help_text, labels=labels)
            series = sorted(
                (label_values[: len(labels)], total)
                for (kind, *label_values), total in totals.items()
                if kind == counter_kind
            )
            for label_values, total in series[: self._series_max]:
                family.add_metric(label_values, total)
            others_total = sum(total for _, total in series[self._series_max :])
            if others_total:
                family.add_metric([OTHERS] * len(labels), others_total)
            yield family

    def _by_reason(self, totals: Mapping[tuple[str, str, str], int]) -> Iterator[Metric]:
        """Yields counters whose keys end in a reason: `counter_kind`, an underscore, the reason."""
        for counter_kind, (name, help_text, labels) in _REASONS.items():
            family = CounterMetricFamily(name, help_text, labels=(*labels, "reason"))
            series = sorted(
                ((*label_values[: len(labels)], kind.removeprefix(f"{counter_kind}_")), total)
                for (kind, *label_values), total in totals.items()
                if kind.startswith(f"{counter_kind}_")
            )
            for label_values, total in series[: self._series_max]:
                family.add_metric(label_values, total)
            others: defaultdict[str, int] = defaultdict(int)
            for label_values, total in series[self._series_max :]:
                others[label_values[-1]] += total
            for reason, total in others.items():
                family.add_metric([*[OTHERS] * len(labels), reason], total)
            yield family

    def _groups(self, served: ServicePorts) -> Iterator[Metric]:
        labels = ("topic", "group")
        families = {figure: GaugeMetricFamily(*text, labels=labels) for figure, text in _FIGURES.items()}
        lag = GaugeMetricFamily("broker_lag_messages", "Messages that are not acknowledged yet.", labels=labels)
        oldest = GaugeMetricFamily(
            "broker_oldest_ready_timestamp_seconds",
            "When the oldest message that is not acknowledged became ready; 0 where there is none.",
            labels=labels,
        )
        stalled = GaugeMetricFamily(
            "broker_group_stalled_seconds",
            "For how long messages have waited for a group without a delivery, and why; no series: they do not.",
            labels=(*labels, "reason"),
        )  # fmt: skip
        now_s = time.time()
        for label_values in self._places(served):
            try:
                broker = served.needed(served.broker)
                figures = broker.admin.group_figures(*label_values)
                stall = broker.stalls.stall_of(*label_values)
            except (KeyError, StorageFailed):  # deleted since the list was made; or not ready, as /readyz reports
                continue
            for figure, family in families.items():
                family.add_metric(label_values, figures[figure])
            unsettled = figures["backlog"] + figures["in_flight"]
            lag.add_metric(label_values, unsettled)
            oldest.add_metric(label_values, now_s - figures["oldest_unacked_age_ms"] / 1000 if unsettled else 0)
            if stall is not None:
                stalled.add_metric([*label_values, stall.reason], stall.lasts_ms / 1000)
        yield from (*families.values(), lag, oldest, stalled)

    def _places(self, served: ServicePorts) -> list[tuple[str, str]]:
        """Returns topics with their groups, up to `series_max`."""
        topic_groups: list[tuple[str, str]] = []
        if served.catalog is None:
            return []
        for topic in served.catalog.topics():
            if len(topic_groups) >= self._series_max:
                break
            try:
                topic_groups += [(topic, group) for group in served.catalog.groups(topic)]
            except KeyError:
                continue
        return topic_groups[: self._series_max]


def _scheduled(measured: MetricsSource) -> Metric:
    """Each horizon includes those before it; `inf` is all."""
    family = GaugeMetricFamily(
        "broker_scheduled_messages", "Messages that wait for their time, and fall due within so long.",
        labels=("horizon",),
    )  # fmt: skip
    within = measured.due_within([*_HORIZONS_MS.values()])
    for name, count in zip((*_HORIZONS_MS, "inf"), within, strict=True):
        family.add_metric([name], count)
    return family


def _lateness(lateness: Lateness) -> Metric:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound_ms, count in lateness.counts():
        total += count
        buckets.append(("+Inf" if bound_ms is None else str(bound_ms / 1000), total))
    return HistogramMetricFamily(
        "broker_delay_lateness_seconds", "From a scheduled message's due time to when it was ready, or delivered.",
        buckets=buckets, sum_value=lateness.sum_ms / 1000,
    )  # fmt: skip


def _syncs(syncs: TimedStorage) -> Metric:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound_s, count in syncs.counts():
        total += count
        buckets.append(("+Inf" if bound_s is None else str(bound_s), total))
    return HistogramMetricFamily(
        "broker_fsync_duration_seconds", "How long the disk took to say that a log is on it.", buckets=buckets,
        sum_value=syncs.sum_s,
    )  # fmt: skip


def _logs(figures: Mapping[str, int]) -> Iterator[Metric]:
    size = GaugeMetricFamily("broker_log_size_bytes", "Bytes in the logs.", labels=("log",))
    size.add_metric(["messages"], figures["messages_bytes"])
    size.add_metric(["actions"], figures["actions_bytes"])
    yield size
    if "messages_unwanted_bytes" in figures:  # a delay service has a schedule only
        yield GaugeMetricFamily(
            "broker_log_wanted_bytes",
            "Bytes of the message log within the retention, or still wanted by a group, at retention's last look.",
            value=figures["messages_bytes"] - figures["messages_unwanted_bytes"],
        )  # fmt: skip
        yield CounterMetricFamily(
            "broker_messages_moved", "Messages that were moved out of old segments, so that these could go.",
            value=figures["moved_messages"],
        )  # fmt: skip
    if "quarantined_bytes" in figures:  # a delay service has a schedule only
        yield GaugeMetricFamily(
            "broker_quarantined_bytes", "Damaged bytes of the logs, found on opening.",
            value=figures["quarantined_bytes"],
        )  # fmt: skip
    yield GaugeMetricFamily(
        "broker_quarantined_runs", "Runs of the schedule of which something is damaged, and kept for the operator.",
        value=figures["quarantined_runs"],
    )  # fmt: skip
    yield GaugeMetricFamily(
        "broker_quarantined_scheduled_messages", "Scheduled messages that are damaged: they are never delivered.",
        value=figures["quarantined_scheduled"],
    )  # fmt: skip
    yield GaugeMetricFamily(
        "broker_publishes_refused", "1 while publishes are refused for lack of room on the disk, or of the bookies.",
        value=figures["publishes_refused"],
    )  # fmt: skip
    for figure, help_text in _DISK.items():
        if figure in figures:  # a cluster's node has no disk
            yield GaugeMetricFamily(f"broker_{figure}", help_text, value=figures[figure])
    if "overdue_ms" in figures:  # of a delay service
        yield GaugeMetricFamily(
            "broker_delay_overdue_seconds",
            "How long the longest due message that was claimed has waited for the target; 0: none waits.",
            value=figures["overdue_ms"] / 1000,
        )  # fmt: skip
    yield CounterMetricFamily("broker_fsyncs", "Syncs of the logs.", value=figures["syncs"])
