"""A broker as a whole: whether it takes new messages, and what it still has to deliver."""

from __future__ import annotations

from collections.abc import Iterator

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.log.cordon import Cordon
from outbox_core.protocol.wire import GroupRemainder, TopicRemainder


class Operations:
    """The operations on a whole broker; see ForOperators."""

    def __init__(
        self, context: EngineContext, groups: GroupRegistry, dispatcher: Dispatcher, *, cordon: Cordon
    ) -> None:
        self._context = context
        self._lock = context.lock
        self._state = context.state
        self._groups = groups
        self._dispatcher = dispatcher
        self.cordon = cordon

    def remainder(self) -> Iterator[TopicRemainder]:
        """Yields each topic of which something is left, by name. Locks once per topic, to keep each lock short.

        What is scheduled is counted first: a message that falls due meanwhile is counted twice, and never missed.
        """
        schedule = self._context.schedule
        with self._lock:
            self._context.refuse_if_closed()
            topics = sorted(self._state.topics)
        for topic in topics:
            scheduled = schedule.count_undelivered(topic)
            left = self._groups_left(topic)
            if scheduled or left:
                yield TopicRemainder(topic=topic, scheduled=scheduled, groups=left)

    def is_dispatching(self) -> bool:
        """Returns whether messages that are due are on their way into their topics."""
        return self._dispatcher.is_dispatching or self._dispatcher.has_taken()

    def _groups_left(self, topic: str) -> list[GroupRemainder]:
        left: list[GroupRemainder] = []
        with self._lock:
            known_topic = self._state.topics.get(topic)
            if known_topic is None:
                return left  # it was deleted meanwhile
            for group in known_topic.groups.values():
                self._groups.skip_filtered(known_topic, group)
                end = known_topic.index.end
                ready = end - min(group.position, end) + group.waiting()
                in_flight, dead = group.in_flight(), len(group.dead)
                if ready or in_flight or dead:
                    left.append(GroupRemainder(group=group.name, ready=ready, in_flight=in_flight, dead=dead))
        return left
