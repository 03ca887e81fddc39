"""The ports of the HTTP server: implemented by an engine, or by a delay service's proxy. One Protocol per capability.
So the type check names what a proxy lacks: typed as one engine, with a fallback that refused what was missing, it
lacked /metrics and a form of publish, and nobody saw it.

All methods are thread-safe. Errors are those of Engine; KeyError if a topic or group does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from outbox_broker.backup.snapshot import FolderSnapshots
from outbox_broker.engine.engine import Engine
from outbox_broker.http.ledger_snapshots import LedgerSnapshots
from outbox_broker.log.cordon import Cordon
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.lateness import Lateness
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_core.common.errors import NotSupported
from outbox_core.messages.message import (
    CancelStatus,
    PublishResult,
    Record,
)
from outbox_core.protocol.wire import RefusedMessage, RetryOutcome, TopicRemainder

Port = TypeVar("Port")


class ForProducers(Protocol):
    """Publishes, and scheduled messages. Durable on return; idempotent by topic and message id."""

    def publish(self, batch: Sequence[Record], /, *, quota: ClientTopicQuota | None) -> list[PublishResult]:
        """Store a batch; returns one result per message, in order. `quota`: how many topics its sender may have."""

    def cancel(self, message_ids: Sequence[str], /, *, topics: Sequence[str] | None) -> list[CancelStatus]:
        """Cancel scheduled messages on topics that a pattern matches (None: all); one status per id, in order."""

    def scheduled(
        self, topic: str | None, /, *, from_ms: int | None, to_ms: int | None, bucket: str
    ) -> list[tuple[int, int]]:
        """Returns (start of the bucket, number of messages due)."""

    def scheduled_message(
        self, message_id: str, /, *, topics: Sequence[str] | None
    ) -> Mapping[str, object] | None:  # fmt: skip
        """Returns id, topic and due time of one scheduled message on topics that a pattern matches (None: on any); and
        as `refused` why the target of a delay service refused it for good, where it did.
        """


class ForRefusals(Protocol):
    """What a delay service's target refused for good."""

    def refused(self, *, topics: Sequence[str] | None) -> list[RefusedMessage]:
        """Returns those messages on topics that a pattern matches (None: all), with their reasons; a bounded number."""

    def retry_refused(self, message_ids: Sequence[str], /, *, topics: Sequence[str] | None) -> list[RetryOutcome]:
        """Publish them once more; one outcome per id, in order. Raises BrokerError if the target is out."""


class ForOperators(Protocol):
    """A server as a whole: whether it takes new messages, and what it still has to deliver."""

    @property
    def cordon(self) -> Cordon:
        """Whether new messages are taken. Deliveries, settlements, cancels and dispatch go on in any case."""

    def remainder(self) -> Iterator[TopicRemainder]:
        """Yields each topic of which something is left, by name. What moves meanwhile may be counted twice; nothing is
        missed.
        """

    def is_dispatching(self) -> bool:
        """Returns whether messages that are due are on their way."""


class Catalog(Protocol):
    """The existing topics and groups."""

    def topics(self) -> list[str]:
        """Returns all topics, sorted."""

    def topic_figures(self, topic: str, /) -> Mapping[str, int]:
        """Returns a topic's statistics."""

    def groups(self, topic: str, /) -> list[str]:
        """Returns the groups of a topic, sorted."""


class MetricsSource(Protocol):
    """Data for probes and metrics. Every method must be supported: a scrape is all or nothing."""

    @property
    def lateness(self) -> Lateness:
        """The histogram of dispatch lateness."""

    @property
    def syncs(self) -> TimedStorage:
        """The histogram of sync times."""

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Returns totals since the start, by (what, topic, group or status)."""

    def due_within(self, spans_ms: Sequence[int], /) -> list[int]:
        """Returns how many scheduled messages are due within each ascending span from now; and last, the total."""

    def log_figures(self) -> Mapping[str, int]:
        """Returns messages_bytes, actions_bytes, syncs, scheduled, publishes_refused (1 for lack of room, else 0);
        of a server with a disk of its own disk_free_bytes and disk_size_bytes, of a broker messages_unwanted_bytes
        (that nobody wants any more, and that are there) and moved_messages, and of a delay service overdue_ms.
        """

    def check_ready(self) -> None:
        """Raise StorageFailed if nothing can be accepted."""


def _always_owner() -> None:
    """A server that is alone may always act."""


class StandByMeasures:
    """Probes and metrics of a server while another node owns what it would serve."""

    def __init__(self, syncs: TimedStorage) -> None:
        self.syncs = syncs
        self.lateness = Lateness()

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """None."""
        return {}

    def due_within(self, spans_ms: Sequence[int], /) -> list[int]:
        """None: whoever owns them counts them."""
        return [0] * (len(spans_ms) + 1)

    def log_figures(self) -> Mapping[str, int]:
        """The figures of a node that owns nothing."""
        return dict.fromkeys(
            ("messages_bytes", "actions_bytes", "syncs", "scheduled", "publishes_refused", "quarantined_runs",
             "quarantined_scheduled"), 0,
        )  # fmt: skip

    def check_ready(self) -> None:
        """Do nothing: that it owns nothing is said by ServicePorts.check_owner()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePorts:
    """The ports that one server serves. A missing one (None) is refused with NotSupported and the text `refusal`; but a
    server that stands by has none, and check_owner() refuses all.
    """

    measured: MetricsSource
    producers: ForProducers | None = None
    catalog: Catalog | None = None
    broker: Engine | None = None
    """What a delay service has not: deliveries, broadcast reads, groups and their administration."""
    refusals: ForRefusals | None = None
    operations: ForOperators | None = None
    """What a node of a cluster has not: `outbox delay drain` has it hand its shards to other nodes."""
    snapshots: FolderSnapshots | LedgerSnapshots | None = None
    """Of a data folder, or of what bookies keep for a broker; a node of a delay cluster has none."""
    refusal: str = ""
    check_owner: Callable[[], None] = _always_owner
    """Raises BrokerUnavailable where another node may act by now: asked first, and before deliveries leave."""

    @classmethod
    def of(cls, engine: Engine) -> ServicePorts:
        """Returns all ports of an engine."""
        return cls(
            producers=engine.publisher, catalog=engine.admin, measured=engine, broker=engine,
            operations=engine.operations, snapshots=engine.snapshots,
            refusal="a broker has no target that refuses messages: ask a delay service",
        )  # fmt: skip

    def subscribe(self, topic: str, group: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Register `wake` like Wakeups.subscribe(). Raises NotSupported, and what check_owner() raises."""
        self.check_owner()
        return self.needed(self.broker).wakeups.subscribe(topic, group, wake)

    def needed(self, port: Port | None) -> Port:
        """Returns the port. Raises NotSupported if it is None."""
        if port is None:
            raise NotSupported(self.refusal)
        return port
