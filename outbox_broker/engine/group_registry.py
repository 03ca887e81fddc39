"""Looks up topics and consumer groups, and creates them within their limits. Under the lock."""

from __future__ import annotations

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.group.consumer_group import Group
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_broker.state.engine_state import Topic, settings_of
from outbox_core.common.errors import InvalidMessage
from outbox_core.journal import journal
from outbox_core.journal.order_records import Filed
from outbox_core.messages.message import GroupConfig, check_group, check_topic
from outbox_core.protocol.wire import GroupRemainder


class GroupRegistry:
    """Topics and groups by name. An unknown one is a KeyError unless it may be created."""

    def __init__(self, context: EngineContext, writer: LogWriter) -> None:
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._state = context.state
        self._writer = writer

    def declare(self, topic: str, name: str, config: GroupConfig, quota: ClientTopicQuota | None = None) -> None:
        """Create a group, or change its settings. Raises InvalidMessage at the limit of topics or groups."""
        if topic not in self._state.topics:
            refused = self.topics_refused(1, quota)
            if refused is not None:
                raise InvalidMessage(refused)
        known_topic = self._state.topic(topic)
        if name not in known_topic.groups and len(known_topic.groups) >= self._options.groups_per_topic_max:
            raise InvalidMessage(f"topic {topic} has {len(known_topic.groups)} groups already (groups_per_topic_max)")
        match config.start:
            case "latest":
                position = self.durable_end(known_topic)
            case "at":
                position = min(known_topic.index.sequence_at(config.start_at_ms or 0), self.durable_end(known_topic))
            case _:
                position = known_topic.index.start
        self._settle_passed(known_topic, name, config)
        self._writer.act(
            journal.Declared(
                topic=topic, group=name, at_ms=self._clock.now_ms(), position=position, settings=settings_of(config),
                is_new=name not in known_topic.groups,
            )
        )  # fmt: skip

    def durable_end(self, topic: Topic) -> int:
        """Returns the highest position for a group: a power failure may reassign the sequences beyond it."""
        return topic.index.durable_end(self._context.messages.committed)

    def _settle_passed(self, topic: Topic, name: str, config: GroupConfig) -> None:
        """Record the position to which a group advanced by its filter, before it gets another one.

        Whoever published before does not wake the group's pulls by a filter that was not asked then: its messages are
        made durable here, and whoever declares wakes the group.
        """
        group = topic.groups.get(name)
        if group is None or group.config.filter == config.filter:
            return
        if group.accepts is not None:
            self.skip_filtered(topic, group)
        self._context.messages.commit()  # no position may be ahead of the messages
        if group.accepts is None:
            return
        self._writer.act(
            Filed(
                topic=topic.index.name, group=name, at_ms=self._clock.now_ms(), position=group.position, runs=[]
            )
        )  # fmt: skip

    def topics_refused(self, more: int, quota: ClientTopicQuota | None) -> str | None:
        """Returns why `more` topics, all covered by a client's quota, are not allowed; None if they are."""
        limit = self._options.topics_max
        if len(self._state.topics) + more > limit:
            return f"there are {limit} topics already, and no more are allowed (topics_max)"
        if quota is None:
            return None
        limit = quota.limit(limit)
        if self._state.coverage.count(quota.patterns) + more > limit:
            return (
                f"the token's patterns cover {limit} topics already, and it may have no more (topics_max of the token)"
            )
        return None

    def open_group(self, topic: str, name: str, quota: ClientTopicQuota | None = None) -> tuple[Topic, Group]:
        """Returns a topic and a group of it, created if new."""
        group = self._state.group(topic, name)
        if group is None:
            self.declare(topic, name, GroupConfig(), quota)
            group = self.known_group(topic, name)
        return self._state.topic(topic), group

    def known_topic(self, topic: str) -> Topic:
        """Returns an existing topic."""
        check_topic(topic)
        found_topic = self._state.topics.get(topic)
        if found_topic is None:
            raise KeyError(f"there is no topic {topic}")
        return found_topic

    def known_group(self, topic: str, group: str) -> Group:
        """Returns an existing group."""
        check_group(group)
        found_group = self.known_topic(topic).groups.get(group)
        if found_group is None:
            raise KeyError(f"topic {topic} has no consumer group {group}")
        return found_group

    def remainder(self, topic: Topic, group: Group) -> GroupRemainder:
        """Returns what a group has still to get. Raises FooterDamaged, with nothing changed that a repeat would not."""
        self.skip_filtered(topic, group)
        index, oldest = topic.index, group.oldest_unsettled()
        age_ms = 0
        if oldest < index.end:
            place = group.aside.place(oldest)
            ready_at_ms = index.ready_at_ms(max(index.start, oldest)) if place is None else place.ready_at_ms
            age_ms = max(0, self._clock.now_ms() - ready_at_ms)
        return GroupRemainder(
            group=group.name, ready=index.end - min(group.position, index.end) + group.waiting(),
            in_flight=group.in_flight(), dead=len(group.dead), oldest_unacked_age_ms=age_ms,
        )  # fmt: skip

    def skip_filtered(self, topic: Topic, group: Group) -> None:
        """Advance a group over messages its filter rejected at publish time."""
        self.count_filtered(topic.index.name, group.name, topic.skip_filtered(group))

    def count_filtered(self, topic: str, group: str, count: int) -> None:
        """Count messages that a group's filter rejected."""
        if count:
            self._state.counters["filtered", topic, group] += count
