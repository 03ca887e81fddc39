"""Prometheus metrics of the SDK, the relay and consumers. No global state, no server.

    metrics = OutboxMetrics()                                  # or OutboxMetrics(registry=your_registry)
    box = Outbox(engine, broker=url, telemetry=Telemetry(metrics=metrics))
    prometheus_client.start_http_server(9100, registry=metrics.registry)

The number of label values is bounded: above `topics_max` topics, further ones are counted together as `other`.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outbox.store.row import OutboxRow
from outbox.store.schema import RowKind
from outbox.telemetry.ports import HandlingAttempt, SendAttempt, SendPath
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import (
    BrokerCordoned,
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    InvalidMessage,
    NotAuthorized,
    NotSupported,
    StorageFailed,
)
from outbox_core.messages.message import Delivery, Message

TOPICS_MAX_DEFAULT: Final = 100
COMMITS_KEPT_MAX: Final = 20_000
"""The limit of committed messages whose commit time is remembered until the broker's response."""
OTHER: Final = "other"
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600)

REASONS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (BrokerCordoned, "cordoned"),
    (BrokerThrottled, "throttled"),
    (BrokerUnavailable, "unavailable"),
    (NotAuthorized, "not_authorized"),
    (NotSupported, "not_supported"),
    (BrokerRefused, "refused"),
    (StorageFailed, "storage_failed"),
    (InvalidMessage, "invalid"),
)
"""The label of a failed send: that of the first class that matches."""


class OutboxMetrics:
    """Metrics in the given registry, or in a new one. One object serves all Outboxes and consumers of a process.

    `outbox_commit_to_ack_seconds` begins at the commit if this process committed; if the compensator sends, at
    publish(), by the producer's wall clock. Commits on an open Connection of the application are not seen, and so not
    counted as enqueued.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry | None = None,
        topics_max: int = TOPICS_MAX_DEFAULT,
        clock: Clock | None = None,
    ) -> None:
        self.registry: CollectorRegistry = registry if registry is not None else CollectorRegistry()
        self._clock = clock or SystemClock()
        self._topics = _BoundedNames(topics_max)
        self._groups = _BoundedNames(topics_max)
        self._commits = _Commits(COMMITS_KEPT_MAX)
        self._queues: list[Callable[[], int]] = []
        self._make_producer_metrics()
        self._make_consumer_metrics()

    def committed(self, rows: Sequence[OutboxRow]) -> None:
        """Count the rows that a commit enqueued, and record its time."""
        published = [row for row in rows if row.kind is RowKind.PUBLISH]
        for topic, count in Tally(row.topic for row in published).items():
            self._enqueued.labels(self._topics(topic)).inc(count)
        self._commits.remember([row.id for row in published], at_ms=self._clock.monotonic_ms())

    def dropped(self, rows: int) -> None:
        """Count rows that the sender left to the compensator."""
        self._dropped.inc(rows)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Add the length of a sender's queue to the gauge."""
        self._queues.append(length)

    def sent(self, messages: Sequence[Message], sending: SendAttempt, *, path: SendPath, seconds: float) -> None:
        """Count a batch's attempts, and its failures or acknowledgements."""
        per_topic = Tally(self._topics(message.topic) for message in messages)
        for topic, count in per_topic.items():
            self._attempts.labels(topic).inc(count)
            self._send_duration.labels(topic).observe(seconds)
        if sending.error is not None:
            reason = reason_of(sending.error)
            for topic, count in per_topic.items():
                self._failures.labels(topic, reason).inc(count)
            return
        waited: defaultdict[str, list[float]] = defaultdict(list)
        for message, result in zip(messages, sending.results, strict=False):
            topic = self._topics(message.topic)
            if not result.status.is_success:
                self._failures.labels(topic, str(result.status)).inc()
            else:
                waited[topic].append(self._waited_seconds(message))
        for topic, waits in waited.items():
            self._acknowledged.labels(topic, str(path)).inc(len(waits))
            observed = self._commit_to_ack.labels(topic)
            for wait in waits:
                observed.observe(wait)

    def received(self, topic: str, group: str, *, deliveries: int) -> None:
        """Count the deliveries of a pull."""
        self._received.labels(self._topics(topic), self._groups(group)).inc(deliveries)

    def handled(self, delivery: Delivery, handling: HandlingAttempt, *, group: str, seconds: float) -> None:
        """Count one delivery by its outcome."""
        topic, group = self._topics(delivery.topic), self._groups(group)
        self._handled.labels(topic, group, handling.outcome).inc()
        self._handle_duration.labels(topic, group).observe(seconds)

    def counted(self, event: str, topic: str, group: str, *, by: int = 1) -> None:
        """Count other events of consumers: failed pulls and settlements, extended and lost receipts."""
        self._events.labels(self._topics(topic), self._groups(group), event).inc(by)

    def _waited_seconds(self, message: Message) -> float:
        committed_at_ms = self._commits.forget(message.id)
        if committed_at_ms is not None:
            return max(0, self._clock.monotonic_ms() - committed_at_ms) / 1000
        return max(0, self._clock.now_ms() - message.created_at_ms) / 1000

    def _queued(self) -> float:
        return float(sum(length() for length in self._queues))

    def _make_producer_metrics(self) -> None:
        registry, topic = self.registry, ["topic"]
        self._enqueued = Counter(
            "outbox_messages_enqueued", "Messages committed with their business.", topic, registry=registry
        )
        self._attempts = Counter(
            "outbox_send_attempts", "Messages offered to the broker, each time.", topic, registry=registry
        )
        self._failures = Counter(
            "outbox_send_failures", "Messages that it did not take, each time.", [*topic, "reason"], registry=registry
        )
        self._acknowledged = Counter(
            "outbox_messages_acknowledged", "Messages that the broker has.", [*topic, "path"], registry=registry
        )
        self._send_duration = Histogram(
            "outbox_send_duration_seconds", "How long a send took.", topic, registry=registry, buckets=SECONDS
        )
        self._commit_to_ack = Histogram(
            "outbox_commit_to_ack_seconds", "From commit to the broker's word.", topic, registry=registry,
            buckets=SECONDS,
        )  # fmt: skip
        self._dropped = Counter(
            "outbox_sender_dropped_rows", "Rows that the sender left to the compensator.", registry=registry
        )
        queue = Gauge("outbox_sender_queue_rows", "Rows that wait in the sender's queue.", registry=registry)
        queue.set_function(self._queued)

    def _make_consumer_metrics(self) -> None:
        registry, labels = self.registry, ["topic", "group"]
        self._received = Counter("outbox_consumer_messages_received", "Deliveries pulled.", labels, registry=registry)
        self._handled = Counter(
            "outbox_consumer_messages_handled", "Deliveries by what their handling came to.", [*labels, "outcome"],
            registry=registry,
        )  # fmt: skip
        self._handle_duration = Histogram(
            "outbox_consumer_handle_duration_seconds", "How long handlers took.", labels, registry=registry,
            buckets=SECONDS,
        )  # fmt: skip
        self._events = Counter(
            "outbox_consumer_events", "What else happened to consumers.", [*labels, "event"], registry=registry
        )


def reason_of(error: BaseException) -> str:
    """Returns the label of a failed send: one of a small set, never the error's text."""
    return next((reason for kind, reason in REASONS if isinstance(error, kind)), "defect")


class _BoundedNames:
    """Keeps the first names, up to a limit; maps later ones to `other`."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._names: set[str] = set()

    def __call__(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= self._names_max:  # a race may add a name or two too many: harmless
                return OTHER
            self._names.add(name)
        return name


class _Commits:
    """The commit times of messages that are still to be sent. The oldest are forgotten first.

    Without a lock, which a forked child might inherit locked: each step is one atomic operation of a dictionary.
    """

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._at_ms: OrderedDict[str, int] = OrderedDict()

    def remember(self, ids: Sequence[str], *, at_ms: int) -> None:
        for message_id in ids[-self._kept_max :]:
            if len(self._at_ms) >= self._kept_max:
                with suppress(KeyError):  # other threads have just removed all
                    self._at_ms.popitem(last=False)
            self._at_ms[message_id] = at_ms

    def forget(self, message_id: str) -> int | None:
        return self._at_ms.pop(message_id, None)
