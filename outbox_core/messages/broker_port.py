"""The Broker port: what the SDK, the compensator and consumers ask of any broker. Adapters implement it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    DeadLetter,
    Delivery,
    ExtendStatus,
    GroupConfig,
    Message,
    NackStatus,
    PublishResult,
)


@runtime_checkable
class Broker(Protocol):
    """A broker, behind one connection or pool. All methods may be called from any thread.

    Errors: BrokerUnavailable (no answer: the request may have taken effect; repeat it), BrokerRefused (never, as it
    is), StorageFailed (not now; nothing was acknowledged). Every call has a time-out of the adapter's own.
    """

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch, of one topic or many; one result a message, in the same order, once they are durable.

        Idempotent by topic and message id inside the broker's window: a repeat answers `duplicate`. Order within a
        topic is the batch's order. After BrokerUnavailable any part of the batch may be stored: publish it again.
        """

    def pull(
        self, topic: str, group: str, *, max_messages: int = 100, wait_ms: int = 0, invisible_ms: int = 30_000
    ) -> list[Delivery]:
        """Take up to `max_messages` that are ready for this group; they stay invisible to it for `invisible_ms`.

        Waits up to `wait_ms` for the first one, and returns an empty list when none came. After BrokerUnavailable
        messages may have been handed out: they come back when their invisible time ends.
        """

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries; one status a receipt, in the same order. Idempotent."""

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back: ready again after `delay_ms`, or after the group's backoff.

        `counts=False` gives back what was never tried, and uses up no attempt.
        """

    def extend(self, receipts: Sequence[str], *, invisible_ms: int) -> list[ExtendStatus]:
        """Keep deliveries invisible for `invisible_ms` from now on."""

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel the scheduled messages of these ids, on all topics that the caller may cancel on; `canceled` means
        never delivered. NotSupported where the broker cannot.
        """

    @property
    def admin(self) -> BrokerAdmin:
        """Groups, figures, dead letters. NotSupported where the broker has no such thing."""

    def close(self) -> None:
        """Let go of connections; idempotent. What was accepted stays accepted."""


@runtime_checkable
class TopicAdmin(Protocol):
    """What operators ask besides of the admin of a broker of ours: HTTP, or embedded."""

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete the group: it holds nothing back any more, and receipts of its deliveries settle nothing.

        Raises InUse while pulls wait for it or consumers hold messages, unless forced: then they end with GroupDeleted.
        """

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete the topic: its messages are delivered to nobody, and what it has scheduled is canceled.

        Raises InUse while it has groups or scheduled messages, unless forced.
        """


@runtime_checkable
class BrokerAdmin(Protocol):
    """What operators and set-up code ask of a broker."""

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Make the group, or change its settings; its position stays where it is."""

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        """Counts of a group (stored, scheduled, backlog, in_flight, dead, oldest_unacked_age_ms, ...); without one, of
        all groups of the topic together.
        """

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move the group to a time or an offset; receipts handed out before are stale afterwards."""

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Stop (True) or resume (False) hand-outs to the group."""

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """One page of dead letters, oldest first, and the cursor of the next page (None at the end)."""

    def redrive(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, per_second: int | None = None
    ) -> int:
        """Send dead letters again (all, or these ids), attempts counted afresh; returns how many. Idempotent by id.

        They are ready `per_second` at a time, by default as many as the broker's operator has set.
        """
