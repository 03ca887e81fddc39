"""Publishes under a condition that is checked right before each request goes out, not when the call begins.

A client may wait before it sends: for the requests of other threads, or for a connection. Who may publish only for a
time, as the owner of a shard, passes a guard, so that nothing leaves after that time but what is on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from outbox_core.messages.message import Message, PublishResult

Guard = Callable[[], None]
"""Raises an OutboxError if the request must not be sent. Called often, and by any thread: it must not wait."""


class PublishTarget(Protocol):
    """The part of a Broker that publishes."""

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """See Broker.publish."""


@runtime_checkable
class GuardedPublisher(Protocol):
    """A Broker whose publish may wait before it sends."""

    def publish_guarded(self, batch: Sequence[Message], *, guard: Guard) -> list[PublishResult]:
        """As Broker.publish. `guard` is called right before each request with a message of the batch is sent, for a
        repeated one again; where it raises, the request is not sent, and its error is raised.
        """


def publish_guarded(target: PublishTarget, batch: Sequence[Message], *, guard: Guard) -> list[PublishResult]:
    """Publish to any target; one that is no GuardedPublisher gets the batch right after the guard was called."""
    if isinstance(target, GuardedPublisher):
        return target.publish_guarded(batch, guard=guard)
    guard()
    return target.publish(batch)


def allow() -> None:
    """A guard that holds nothing back."""
