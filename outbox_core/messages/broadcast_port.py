"""Broadcast reads of a topic without a group, where every reader gets every message: the port and its result.

A group for each process would outlive it: it holds back retention, fills checkpoints, and is reported by the
reconciliation until somebody deletes it. Groups that expire would leave somebody to decide how long is dead. There is
no filter: a group's is evaluated once, at publish; a reader's would be for each reader and message.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import msgspec

from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.message import Record

Start = Literal["latest", "earliest"]


class TopicRead(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The messages of a topic from `offset` to `next_offset` (excluded), in order; the next read begins at the latter.
    Damaged records are left out.

    `offset` is higher than the requested one if retention has dropped messages. `next_offset` is lower than it if the
    topic ends before it: then the broker has lost data or was restored from an older copy.
    """

    offset: int
    next_offset: int
    messages: list[Record]


@runtime_checkable
class Broadcaster(Protocol):
    """A broker whose topics can be read without a group. Errors are those of Broker."""

    def read(
        self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int = 100,
        wait_ms: int = 0,
    ) -> TopicRead:  # fmt: skip
        """Returns the durable messages of a topic from `offset` on; waits up to `wait_ms` for the first one.

        Without an offset, reads begin at `start`. The broker keeps no state of readers: any number may read, each from
        its own offset. A topic that does not exist has no messages yet.
        """


def check_start(start: str) -> None:
    """Raise InvalidMessage unless this is a valid start of a read."""
    if start not in {"latest", "earliest"}:
        raise InvalidMessage(f'start is "latest" or "earliest", not {start!r}')
