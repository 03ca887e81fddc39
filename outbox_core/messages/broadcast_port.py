"""Broadcast: every consumer gets every message of a topic. The part of the port that does it, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

import msgspec

from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.message import Delivery, Message

if TYPE_CHECKING:
    from outbox_core.journal.journal import MessageRecord

Start = Literal["latest", "earliest"]
NO_RECEIPT: Final = ""
"""Of a message that was read: there is nothing to settle."""


class TopicRead(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Messages of a topic, in its order, that stand from `offset` up to `next_offset` (excluded), where the next read
    goes on. Fewer where records are damaged.

    `offset` is higher than the one that was asked for where retention has dropped messages, and `next_offset` lower
    where the topic ends before it: then the broker's data is not what it was.
    """

    deliveries: list[Delivery]
    offset: int
    next_offset: int


@runtime_checkable
class Broadcaster(Protocol):
    """A broker that can be read without a group. Errors are those of Broker."""

    def read(
        self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int = 100,
        wait_ms: int = 0,
    ) -> TopicRead:  # fmt: skip
        """The durable messages of a topic from `offset` on; waits up to `wait_ms` for the first one.

        Without an offset it begins at `start`. The broker remembers nothing of who reads: any number may, each at a
        place of its own. A topic that is not there has no messages yet.
        """


def delivery_read(message: Message | MessageRecord) -> Delivery:
    """A message as a reader gets it."""
    return Delivery(
        receipt=NO_RECEIPT, id=message.id, topic=message.topic, body=message.body, key=message.key,
        headers=message.headers, attempt=1, created_at_ms=message.created_at_ms, deliver_at_ms=message.deliver_at_ms,
    )  # fmt: skip


def check_start(start: str) -> None:
    """Raise InvalidMessage where a reader cannot begin there."""
    if start not in {"latest", "earliest"}:
        raise InvalidMessage(f'start is "latest" or "earliest", not {start!r}')
