"""What the in-memory broker holds: topics, the schedule, ids seen lately, cancels. No locks, no clock, no waiting."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from outbox.testing.memory_group import MemoryGroup
from outbox_core.common.errors import BrokerRefused, ConfigurationError, StorageFailed
from outbox_core.messages.broadcast_port import TopicRead, delivery_read
from outbox_core.messages.limits import DELAY_MAX_MS
from outbox_core.messages.message import CancelStatus, GroupConfig, Message, PublishResult, PublishStatus

_Place = tuple[str, str]
"""A message's topic and id, which together are its identity."""
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The in-memory broker's bounds. It keeps all messages, so it refuses to take more than `messages_max`."""

    messages_max: int = 100_000
    bytes_max: int = 512 * 1024 * 1024
    topics_max: int = 10_000
    groups_per_topic_max: int = 1_000
    dedup_ids_max: int = 100_000
    cancels_max: int = 100_000

    def __post_init__(self) -> None:
        if min(self.messages_max, self.bytes_max, self.topics_max, self.groups_per_topic_max) < 1:
            raise ConfigurationError("messages_max, bytes_max, topics_max and groups_per_topic_max must be at least 1")
        if min(self.dedup_ids_max, self.cancels_max) < 0:
            raise ConfigurationError("dedup_ids_max and cancels_max must not be negative")


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """A message in its topic, and when it became ready for consumers."""

    message: Message
    ready_at_ms: int


@dataclass(slots=True)
class MemoryTopic:
    """Messages in the order in which they became ready, and the groups that read them."""

    name: str
    messages: list[MemoryMessage] = field(default_factory=list)
    groups: dict[str, MemoryGroup] = field(default_factory=dict)

    def position_at(self, time_ms: int) -> int:
        """The first message that became ready at or after a time."""
        return bisect_left(self.messages, time_ms, key=attrgetter("ready_at_ms"))


class MemoryTopics:
    """All topics of one broker. The caller has the lock, and tells the time."""

    def __init__(self, limits: MemoryLimits) -> None:
        self._limits = limits
        self._places = itertools.count()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.topics: dict[str, MemoryTopic] = {}
        self._later: list[tuple[int, int, Message]] = []
        self._scheduled: dict[_Place, Message] = {}
        self._recent: dict[_Place, None] = {}
        self._canceled: dict[_Place, None] = {}
        self._canceled_early: dict[str, None] = {}  # ids, on all topics
        self._messages = 0
        self._bytes = 0

    # -- in ----------------------------------------------------------------------------------------------------------

    def publish(self, message: Message, *, now_ms: int) -> PublishResult:
        """Store one message. Raises StorageFailed where there is no room."""
        if message.deliver_at_ms is not None and message.deliver_at_ms - now_ms > DELAY_MAX_MS:
            return PublishResult(message.id, PublishStatus.REJECTED, "a delay may be at most 731 days")
        place = _place(message)
        if place in self._recent or place in self._scheduled:
            return PublishResult(message.id, PublishStatus.DUPLICATE)
        self._refuse_if_full(message)
        topic = self.topic(message.topic)
        _remember(self._recent, place, count_max=self._limits.dedup_ids_max)
        self._messages += 1
        self._bytes += len(message.body)
        if message.id in self._canceled_early or place in self._canceled:  # stored, and never delivered
            _remember(self._canceled, place, count_max=self._limits.cancels_max)
        elif message.deliver_at_ms is not None and message.deliver_at_ms > now_ms:
            self._scheduled[place] = message
            heapq.heappush(self._later, (message.deliver_at_ms, next(self._places), message))
        else:
            topic.messages.append(MemoryMessage(message, now_ms))
        return PublishResult(message.id, PublishStatus.STORED)

    def fire_due(self, *, now_ms: int) -> None:
        """Give what has fallen due its place in its topic, in the order of due times."""
        while self._later and self._later[0][0] <= now_ms:
            _, _, message = heapq.heappop(self._later)
            if self._scheduled.pop(_place(message), None) is not None:
                self.topic(message.topic).messages.append(MemoryMessage(message, now_ms))

    def next_due_ms(self) -> int | None:
        """When the next scheduled message falls due."""
        while self._later and _place(self._later[0][2]) not in self._scheduled:
            heapq.heappop(self._later)
        return self._later[0][0] if self._later else None

    def cancel(self, message_id: str) -> CancelStatus:
        """Take the messages of this id off the schedule; a cancel that comes before its message is remembered."""
        places = [(topic, message_id) for topic in self.topics]
        for place in places:
            if self._scheduled.pop(place, None) is not None:
                _remember(self._canceled, place, count_max=self._limits.cancels_max)
        if any(place in self._canceled for place in places):
            return CancelStatus.CANCELED
        if any(place in self._recent for place in places):
            return CancelStatus.TOO_LATE
        _remember(self._canceled_early, message_id, count_max=self._limits.cancels_max)
        return CancelStatus.UNKNOWN

    # -- places ------------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> MemoryTopic:
        """The topic, made on first use."""
        found = self.topics.get(name)
        if found is None:
            if len(self.topics) >= self._limits.topics_max:
                raise BrokerRefused(f"this broker has its {self._limits.topics_max:,} topics already")
            found = self.topics[name] = MemoryTopic(name)
        return found

    def read(self, topic: str, offset: int, *, count_max: int) -> TopicRead:
        """The messages of a topic from an offset on, without a group."""
        stored = self.topics[topic].messages if topic in self.topics else []
        first = min(offset, len(stored))
        found = [delivery_read(one.message) for one in stored[first : first + count_max]]
        return TopicRead(deliveries=found, offset=offset, next_offset=first + len(found))

    def group(self, topic: str, name: str, config: GroupConfig | None = None) -> MemoryGroup:
        """The group, made on first use where `config` says it starts; a group that is there keeps its position."""
        place = self.topic(topic)
        found = place.groups.get(name)
        if found is None:
            if len(place.groups) >= self._limits.groups_per_topic_max:
                raise BrokerRefused(f"{topic} has its {self._limits.groups_per_topic_max:,} groups already")
            found = MemoryGroup(
                name=name, config=config or GroupConfig(), position=_start(place, config or GroupConfig())
            )
            place.groups[name] = found
        elif config is not None:
            found.config = config
        return found

    def known_topic(self, name: str) -> MemoryTopic:
        """The topic. Raises BrokerRefused where there is none."""
        if name not in self.topics:
            raise BrokerRefused(f"there is no topic {name}")
        return self.topics[name]

    def known_group(self, topic: str, name: str) -> MemoryGroup:
        """The group. Raises BrokerRefused where there is none."""
        found = self.known_topic(topic).groups.get(name)
        if found is None:
            raise BrokerRefused(f"there is no group {name} on {topic}")
        return found

    def scheduled(self, topics: Iterable[str]) -> int:
        """How many messages of these topics wait for their due time."""
        wanted = set(topics)
        return sum(message.topic in wanted for message in self._scheduled.values())

    def _refuse_if_full(self, message: Message) -> None:
        limits = self._limits
        if self._messages >= limits.messages_max or self._bytes + len(message.body) > limits.bytes_max:
            raise StorageFailed(
                f"the in-memory broker is full ({self._messages:,} messages, {self._bytes:,} bytes): "
                "clear() it, or give it larger MemoryLimits"
            )


def _start(topic: MemoryTopic, config: GroupConfig) -> int:
    match config.start:
        case "latest":
            return len(topic.messages)
        case "at":
            return topic.position_at(config.start_at_ms or 0)
        case _:
            return 0


def _place(message: Message) -> _Place:
    return message.topic, message.id


def _remember(known: dict[Key, None], key: Key, *, count_max: int) -> None:
    """Add the newest; forget the oldest beyond `count_max`."""
    known[key] = None
    while len(known) > count_max:
        del known[next(iter(known))]
