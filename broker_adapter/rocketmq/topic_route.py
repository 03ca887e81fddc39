"""The route of a topic: its accepted types of messages, as a proxy describes its queues, and its defects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import msgspec

from broker_adapter.rocketmq.errors import Refusal
from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from outbox_core.messages.durability_inspection import Weakness

_WRITABLE: Final = frozenset({definition.WRITE, definition.READ_WRITE})


class TopicRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The types of messages that a topic takes, and whether a queue of it can be written to."""

    takes_normal: bool
    takes_fifo: bool
    is_writable: bool
    type_names: str

    @classmethod
    def of_queues(cls, queues: Collection[definition.MessageQueue]) -> TopicRoute:
        """Returns the common types of all queues of the topic, on all its brokers."""
        types = {kind for queue in queues for kind in queue.accept_message_types}
        return cls(
            takes_normal=definition.NORMAL in types,
            takes_fifo=definition.FIFO in types,
            is_writable=any(queue.permission in _WRITABLE for queue in queues),
            type_names=", ".join(sorted(definition.MessageType.Name(kind) for kind in types)),
        )

    @property
    def refusal(self) -> Refusal | None:
        """Why nothing of ours can be sent to it."""
        if not self.is_writable:
            return Refusal("FORBIDDEN", "it has no writable queue")
        if not (self.takes_normal or self.takes_fifo):
            return Refusal("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", f"it takes {self.type_names} messages alone")
        return None


def route_weaknesses(routes: Mapping[str, TopicRoute | Refusal]) -> Iterator[Weakness]:
    """Topics to which nothing can be published."""
    for topic, route in routes.items():
        refusal = route if isinstance(route, Refusal) else route.refusal
        if refusal is not None:
            yield Weakness(
                subject=topic, topic=topic, problem=f"nothing can be published: {refusal.words}", cure=refusal.cure
            )
