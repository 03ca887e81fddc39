"""The Broker port: operations of a broker that the SDK, the compensator and consumers use. Adapters are elsewhere.

First the operations; then what an adapter declares that it can do (the conformance tests check it, and what it does not
declare raises NotSupported), and what an inspection of its server finds that weakens the promised durability. Reading a
topic without a group is in broadcast_port.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

import msgspec

from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    DeadCount,
    DeadEdit,
    DeadFilter,
    DeadLetter,
    Delivery,
    EditResult,
    ExtendStatus,
    GroupConfig,
    Message,
    NackStatus,
    PublishResult,
)


@runtime_checkable
class DeliverySource(Protocol):
    """The operations that consumers use. Methods may be called from any thread; errors are those of Broker."""

    def pull(
        self, topic: str, group: str, *, max_messages: int = 100, wait_ms: int = 0, invisible_ms: int = 30_000,
        begins: bool = False,
    ) -> list[Delivery]:  # fmt: skip
        """Receive up to `max_messages` that are ready for this group; they stay invisible to it for `invisible_ms`.

        Waits up to `wait_ms` for the first one, and returns an empty list if none came. After BrokerUnavailable
        messages may have been delivered: they are redelivered when their invisible time ends.

        An invisible time that ends is an attempt only of the message that may have ended its consumer: of one that was
        delivered alone, or with `begins` of one that was reported as begun (see extend), as the caller does for each
        delivery that is `expired`. Without `begins`, messages whose time ended together come again in halves.
        """

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Acknowledge deliveries; one status a receipt, in the same order. Idempotent."""

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Return deliveries to the group: ready again after `delay_ms`, or after the group's backoff.

        `counts=False` is for messages that were never tried: it uses up no attempt.
        """

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Keep deliveries invisible for `invisible_ms` from now on; `begun`: they are about to be handled."""


@runtime_checkable
class Broker(DeliverySource, Protocol):
    """A client of a broker, with one connection or a pool. All methods may be called from any thread.

    Errors: BrokerUnavailable (no answer: the request may have taken effect; repeat it), BrokerRefused (the request
    will never be accepted as it is), StorageFailed (not now; nothing was acknowledged). Every call has a time-out.
    """

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch, of one topic or many; one result a message, in the same order, once they are durable.

        Idempotent by topic and message id within the broker's window: a repeat gets `duplicate`. Order within a
        topic is the batch's order. After BrokerUnavailable any part of the batch may be stored: publish it again.
        A batch may be refused for one of its messages: refused_batch_isolation publishes the others. Any error has the
        results that were known before it, as `answered`.
        """

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel the scheduled messages of these ids, on all topics that the caller may cancel on; `canceled` means
        never delivered. Raises NotSupported if the broker cannot.
        """

    @property
    def admin(self) -> BrokerAdmin:
        """Returns the operations on groups, statistics, dead letters. Raises NotSupported if the broker has none."""

    def close(self) -> None:
        """Close connections; idempotent. Accepted messages stay accepted."""


@runtime_checkable
class TopicAdmin(Protocol):
    """Additional admin operations of our own broker, over HTTP or embedded."""

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete the group: it retains no messages any more, and receipts of its deliveries settle nothing.

        Raises InUse while pulls wait for it or consumers hold messages, unless forced: they end with GroupDeleted.
        """

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete the topic: its messages are not delivered any more, and its scheduled messages are canceled.

        Raises InUse while it has groups or scheduled messages, unless forced.
        """


@runtime_checkable
class DeadLetterAdmin(Protocol):
    """Additional admin operations of our own broker, over HTTP or embedded: dead letters by their `ids`, or those that
    fit `where`; without both, all of the group. All are idempotent: an id that is not dead (any more) is passed over.
    """

    def stop_redrive(self, topic: str, group: str) -> int:
        """Stop the redrives of the group: what still waits for its rate is dead again, as it was; what is ready, or was
        delivered, stays so. Returns how many are dead again. The broker's log keeps who and when.
        """

    def count_dead(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, where: DeadFilter | None = None
    ) -> DeadCount:
        """Returns how many are meant, and until when they died. Raises InvalidMessage for a time without more."""

    def discard(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, where: DeadFilter | None = None,
        dead_before_ms: int | None = None, why: str,
    ) -> int:  # fmt: skip
        """Discard dead letters for good: the group never gets them again. Returns how many.

        `dead_before_ms`: only those that died before, as count_dead() says. The broker's log keeps who, when and `why`.
        After BrokerUnavailable some or all may be discarded.
        """

    def edit(
        self, topic: str, group: str, edits: Mapping[str, DeadEdit], *, why: str, operation: str | None = None
    ) -> list[EditResult]:
        """Edit the dead letters of these ids. This group, and no other, gets what they become: at once, under another
        id, with the former one in the header EDITED_HEADER. Returns what became of each, in order.

        `operation`: a name of the caller's. After BrokerUnavailable some or all may be edited; a repeat under the same
        name edits the others, and returns the same for all. Without a name, those that were edited are `not_dead`. The
        broker's log keeps who, when and `why`.
        """

    def edit_many(
        self, topic: str, group: str, edit: DeadEdit, *, where: DeadFilter | None = None,
        dead_before_ms: int | None = None, why: str, operation: str | None = None,
    ) -> Iterator[EditResult]:  # fmt: skip
        """Edit all dead letters, or those that fit, in one way, without a body; yields what became of each, page by
        page, as it is done. `dead_before_ms` as of discard(): so a repeat does not edit again what was edited and died
        since.
        """


@runtime_checkable
class GroupSettingsReader(Protocol):
    """An additional admin operation of our own broker, over HTTP or embedded."""

    def group_config(self, topic: str, group: str) -> GroupConfig | None:
        """Returns the group's settings; None if the group or its topic is not there."""


@runtime_checkable
class BrokerAdmin(Protocol):
    """The operations that operators and set-up code need of a broker."""

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Create the group, or change its settings; its position does not change."""

    def topics(self) -> list[str]:
        """Returns the names of all topics, sorted."""

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        """Returns the statistics of a group (stored, scheduled, backlog, in_flight, dead, oldest_unacked_age_ms, ...);
        without a group, those of all groups of the topic together.
        """

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move the group to a time or an offset; receipts of earlier deliveries are stale afterwards."""

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Pause (True) or resume (False) deliveries to the group."""

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """Returns a page of dead letters, oldest first, and the cursor of the next page (None at the end)."""

    def redrive(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, per_second: int | None = None
    ) -> int:
        """Redrive dead letters (all, or these ids): attempts count from 1 again; returns how many. Idempotent by id.

        They are ready `per_second` at a time, by default as many as the broker's operator has set.
        """


# -- what a broker can do ----------------------------------------------------------------------------------------------


class Capability(StrEnum):
    """An operation or property that the Broker port offers beyond a durable publish."""

    DEDUPLICATION = "deduplication"
    """A repeat of a topic and id gets `duplicate`, within the broker's window."""
    DELAY = "delay"
    """`deliver_at_ms` up to 731 days ahead, never early."""
    CANCEL = "cancel"
    """A scheduled message is canceled by its id, and the returned status is reliable."""
    PULL = "pull"
    """pull, ack, nack and extend."""
    BROADCAST = "broadcast"
    """A topic is read by offset, without a group (Broadcaster)."""
    ADMIN = "admin"
    """Groups, statistics, dead letters and their redrive (BrokerAdmin)."""


ALL_CAPABILITIES: Final = frozenset(Capability)


@runtime_checkable
class DeclaresCapabilities(Protocol):
    """A Broker that declares its capabilities. One that does not declare any has them all."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Returns the broker's capabilities. Does no I/O."""


def capabilities_of(broker: object) -> frozenset[Capability]:
    """Returns the capabilities of this Broker."""
    return broker.capabilities if isinstance(broker, DeclaresCapabilities) else ALL_CAPABILITIES


# -- what weakens its durability ---------------------------------------------------------------------------------------


class Weakness(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a confirmed message could still be lost."""

    subject: str
    """The subject: a topic, a node, or a setting of the server."""
    problem: str
    """The possible consequence, as a sentence without a full stop."""
    cure: str
    """The change that an operator should make, in the terms of the server's documentation."""
    topic: str | None = None
    """The only topic that it concerns; None if it concerns all."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}; {self.cure}"


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one inspection of a server."""

    product: str
    version: str
    """Empty where the server does not tell it."""
    weaknesses: tuple[Weakness, ...] = ()
    roles: tuple[str, ...] | None = None
    """What this client may do there: none without a token where one is needed. None: the server does not tell."""
    now_ms: int | None = None
    """The server's clock at the end of the inspection; None: it does not tell."""


@runtime_checkable
class Inspectable(Protocol):
    """A Broker whose server can be inspected for its durability."""

    def inspect(self, topics: Sequence[str] = ()) -> Inspection:
        """Inspect the server's settings and these topics; changes nothing. Errors are those of Broker."""


@runtime_checkable
class WeaknessReporter(Protocol):
    """A Broker that logs how its server is weaker than it promises; before a first publish it does so by itself."""

    def report_weaknesses(self) -> None:
        """Inspect the server's settings, and log each weakness that was not logged yet. Errors are those of Broker."""


# -- a topic's statistics ----------------------------------------------------------------------------------------------

_SUMMED: Final = ("backlog", "in_flight", "dead")


def topic_figures(*, stored: int, scheduled: int, groups: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns stored and scheduled as given; backlog, in_flight and dead as sums over all groups, so that a message
    counts once for each group that it waits for; the maximum of oldest_unacked_age_ms (0 without groups).
    """
    group_figures = list(groups)
    return {
        "stored": stored,
        "scheduled": scheduled,
        **{name: sum(figures[name] for figures in group_figures) for name in _SUMMED},
        "oldest_unacked_age_ms": max((figures["oldest_unacked_age_ms"] for figures in group_figures), default=0),
    }
