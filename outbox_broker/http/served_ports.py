"""What the HTTP server asks of what it serves: an engine, or a delay service's front. Protocols, one a capability.

All methods may be called from any thread. Errors are those of Engine; KeyError where a topic or group is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from outbox_broker.engine.engine import Engine
from outbox_broker.engine.publisher import Publishable
from outbox_broker.engine.puller import PulledMessages
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.lateness import Lateness
from outbox_broker.state.topic_quota import TopicQuota
from outbox_core.common.errors import NotSupported
from outbox_core.messages.broadcast_port import Start, TopicRead
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    DeadLetter,
    ExtendStatus,
    GroupConfig,
    Message,
    NackStatus,
    PublishResult,
)

Port = TypeVar("Port")


class ForProducers(Protocol):
    """Messages in, and those that wait for their time. Durable when it returns; idempotent by topic and message id."""

    def publish(self, batch: Sequence[Message], /, *, quota: TopicQuota | None) -> list[PublishResult]:
        """Store a batch; one result a message, in order. `quota`: how many topics its sender may have."""

    def publish_plain(self, topic: str, batch: Sequence[Publishable], ids: list[str], /) -> bool:
        """Store a batch for now, as it came off the wire; False, with nothing stored, where publish() is to do it."""

    def cancel(self, message_ids: Sequence[str], /, *, topics: Sequence[str] | None) -> list[CancelStatus]:
        """Cancel scheduled messages on topics that a pattern matches (None: on all); one status an id, in order."""

    def scheduled(
        self, topic: str | None, /, *, from_ms: int | None, to_ms: int | None, bucket: str
    ) -> list[tuple[int, int]]:
        """How many are due when: (start of the bucket, count)."""

    def scheduled_message(
        self, message_id: str, /, *, topics: Sequence[str] | None
    ) -> Mapping[str, object] | None:  # fmt: skip
        """Id, topic and due time of one scheduled message on topics that a pattern matches (None: on any)."""


class ForConsumers(Protocol):
    """Messages out to groups, and what becomes of them."""

    @property
    def deletions(self) -> int:
        """How many times something was deleted: noted as a pull begins, and given with all that it takes."""

    def take(
        self, topic: str, group: str, /, *, max_messages: int, invisible_ms: int, consumer: str | None, fires: bool,
        since: int | None, quota: TopicQuota | None,
    ) -> list[PulledMessages]:  # fmt: skip
        """Hand out what is ready; with `fires` what is due is waited for, where that is less than is asked for.

        Raises GroupDeleted where the group was deleted after the deletions that there were `since`.
        """

    def take_at_hand(
        self, topic: str, group: str, /, *, max_messages: int, invisible_ms: int, consumer: str | None, fires: bool,
        since: int | None,
    ) -> list[PulledMessages] | None:  # fmt: skip
        """take() for an event loop; None where it might have to wait."""

    def ack(self, receipts: Sequence[str], /) -> list[AckStatus]:
        """Settle deliveries; one status a receipt, in order."""

    def nack(
        self, receipts: Sequence[str], /, *, delay_ms: int | None, reason: str | None = None, counts: bool
    ) -> list[NackStatus]:
        """Give deliveries back."""

    def extend(self, receipts: Sequence[str], /, *, invisible_ms: int) -> list[ExtendStatus]:
        """Keep deliveries invisible for longer."""


class ForReaders(Protocol):
    """A topic read without a group, and who is to be woken when it has something new."""

    def place_to_read(self, topic: str, /, *, start: Start) -> int:
        """Where a reader begins that has no place yet."""

    def read_on(self, topic: str, offset: int, /, *, max_messages: int, bytes_max: int | None) -> TopicRead:
        """What is there from `offset` on."""

    def subscribe(self, topic: str, group: str, wake: Callable[[], None], /) -> Callable[[], None]:
        """Have `wake` called, from any thread, when something may be ready; returns the undo."""


class ForOperators(Protocol):
    """What groups are told. Durable when it returns, and idempotent."""

    def declare_group(self, topic: str, group: str, config: GroupConfig, /, *, quota: TopicQuota | None) -> None:
        """Make a group, or change its settings."""

    def delete_group(self, topic: str, group: str, /, *, force: bool) -> None:
        """Delete a group. Raises InUse."""

    def delete_topic(self, topic: str, /, *, force: bool) -> None:
        """Delete a topic. Raises InUse."""

    def seek(self, topic: str, group: str, /, *, to_ms: int | None, to_offset: int | None) -> None:
        """Move a group."""

    def pause(self, topic: str, group: str, /, *, paused: bool) -> None:
        """Stop hand-outs, or let them go on."""

    def dead(
        self, topic: str, group: str, /, *, limit: int, after: str | None, bytes_max: int
    ) -> tuple[list[DeadLetter], str | None]:
        """A page of dead letters, of about so many bytes, and the cursor of the next one."""

    def redrive(self, topic: str, group: str, /, *, ids: Sequence[str] | None, per_second: int | None) -> int:
        """Send dead letters again; returns how many."""


class Catalog(Protocol):
    """What there is, by topic and group."""

    def topics(self) -> list[str]:
        """All topics, sorted."""

    def topic_figures(self, topic: str, /) -> Mapping[str, int]:
        """A topic's figures."""

    def groups(self, topic: str, /) -> list[str]:
        """The groups of a topic, sorted."""


class GroupCatalog(Protocol):
    """How consumer groups are set, and how they fare."""

    def group_figures(self, topic: str, group: str, /) -> Mapping[str, int]:
        """A group's figures."""

    def group_config(self, topic: str, group: str, /) -> GroupConfig:
        """A group's settings."""


class Measured(Protocol):
    """What probes and metrics ask. None of it may fail for want of support: a scrape is all or nothing."""

    @property
    def lateness(self) -> Lateness:
        """How late scheduled messages were."""

    @property
    def syncs(self) -> TimedStorage:
        """How long the disk took."""

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Totals since the start, by (what, topic, group or status)."""

    def due_within(self, spans_ms: Sequence[int], /) -> list[int]:
        """How many scheduled messages are due within each span from now, which ascend; and last, how many there are."""

    def log_figures(self) -> Mapping[str, int]:
        """messages_bytes, actions_bytes, syncs, scheduled."""

    def check_ready(self) -> None:
        """Raise StorageFailed where nothing can be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one server serves. A capability that is None is refused with NotSupported, which says `refusal`."""

    producers: ForProducers
    catalog: Catalog
    measured: Measured
    consumers: ForConsumers | None = None
    readers: ForReaders | None = None
    operators: ForOperators | None = None
    groups: GroupCatalog | None = None
    refusal: str = ""

    @classmethod
    def of(cls, engine: Engine) -> Served:
        """All that an engine can do."""
        return cls(
            producers=engine, catalog=engine, measured=engine, consumers=engine, readers=engine, operators=engine,
            groups=engine,
        )  # fmt: skip

    def subscribe(self, topic: str, group: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called, from any thread, when something may be ready; returns the undo. Raises NotSupported."""
        return self.needed(self.readers).subscribe(topic, group, wake)

    def needed(self, port: Port | None) -> Port:
        """The port. Raises NotSupported where it is None."""
        if port is None:
            raise NotSupported(self.refusal)
        return port
