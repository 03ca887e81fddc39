"""A broker as a whole: whether it takes new messages, and what it still has to deliver."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.footer_repair import FooterRepair
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.log.cordon import Cordon
from outbox_core.protocol.wire import GroupRemainder, TopicRemainder


class Operations:
    """The operations on a whole broker; see ForOperators."""

    def __init__(
        self, context: EngineContext, groups: GroupRegistry, dispatcher: Dispatcher, footer_repair: FooterRepair, *,
        cordon: Cordon,
    ) -> None:  # fmt: skip
        self._context = context
        self._lock = context.lock
        self._state = context.state
        self._groups = groups
        self._dispatcher = dispatcher
        self._footer_repair = footer_repair
        self.cordon = cordon

    def remainder(self) -> Iterator[TopicRemainder]:
        """Yields each topic of which something is left, by name. Locks once per group, to keep each lock short.

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
        with self._lock:
            known_topic = self._state.topics.get(topic)
            groups = [] if known_topic is None else list(known_topic.groups)
        look_up = self._footer_repair.looked_up
        remainders = [look_up(partial(self._group_left, topic, group)) for group in groups]
        return [left for left in remainders if left is not None and (left.ready or left.in_flight or left.dead)]

    def _group_left(self, topic: str, name: str) -> GroupRemainder | None:
        """Returns what a group has still to get; None if it was deleted meanwhile. Under the lock."""
        known_topic, group = self._state.topics.get(topic), self._state.group(topic, name)
        return None if known_topic is None or group is None else self._groups.remainder(known_topic, group)
