"""What is scheduled, in memory: an ordered set of due times rebuilt from the logs.

The port that any schedule must fit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A message that waits for its due time; `offset` is its place in the message log."""

    id: str
    topic: str
    deliver_at_ms: int
    offset: int


class Schedule(Protocol):
    """Messages by due time. Used under the engine's lock; time is an argument; nothing here is durable by itself."""

    def add(self, message: Scheduled) -> None:
        """Schedule; an id is scheduled at most once."""

    def due(self, now_ms: int, *, count_max: int, durable_end: int) -> list[Scheduled]:
        """Take out what is due and durable, in order of due times; never what is not due yet."""

    def remove(self, message_id: str) -> Scheduled | None:
        """Take out one by id; None where it is not scheduled."""

    def find(self, message_id: str) -> Scheduled | None:
        """One by id, left where it is."""

    def next_due_ms(self) -> int | None:
        """The earliest due time; None when nothing is scheduled."""

    def count(self, topic: str | None = None) -> int:
        """How many are scheduled, of a topic or in all."""

    def all(self) -> Iterable[Scheduled]:
        """Everything that waits, for the broker's checkpoint; nothing from a schedule that is durable by itself."""

    def first_offset(self) -> int | None:
        """The first place in the message log that is still needed; None where none is."""

    def histogram(self, *, topic: str | None, from_ms: int, to_ms: int, bucket_ms: int) -> list[tuple[int, int]]:
        """(start of bucket, how many are due in it) within [from_ms, to_ms), empty buckets left out."""


class MemorySchedule:
    """A heap and a dictionary: about 300 bytes a message.

    For millions over years, the multi-level buckets are meant.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Scheduled] = {}
        self._order: list[tuple[int, int, str]] = []
        self._by_topic: Counter[str] = Counter()

    def add(self, message: Scheduled) -> None:
        self._by_id[message.id] = message
        self._by_topic[message.topic] += 1
        heapq.heappush(self._order, (message.deliver_at_ms, message.offset, message.id))

    def due(self, now_ms: int, *, count_max: int, durable_end: int) -> list[Scheduled]:
        taken: list[Scheduled] = []
        postponed: list[tuple[int, int, str]] = []
        while self._order and self._order[0][0] <= now_ms and len(taken) < count_max:
            place = heapq.heappop(self._order)
            message = self._by_id.get(place[2])
            if message is None or message.offset != place[1]:
                continue
            if message.offset >= durable_end:
                postponed.append(place)
                continue
            self.remove(message.id)
            taken.append(message)
        for place in postponed:
            heapq.heappush(self._order, place)
        return taken

    def remove(self, message_id: str) -> Scheduled | None:
        message = self._by_id.pop(message_id, None)
        if message is not None:
            self._by_topic[message.topic] -= 1
        return message

    def find(self, message_id: str) -> Scheduled | None:
        return self._by_id.get(message_id)

    def next_due_ms(self) -> int | None:
        while self._order:
            place = self._order[0]
            message = self._by_id.get(place[2])
            if message is not None and message.offset == place[1]:
                return place[0]
            heapq.heappop(self._order)
        return None

    def count(self, topic: str | None = None) -> int:
        return len(self._by_id) if topic is None else self._by_topic[topic]

    def all(self) -> Iterable[Scheduled]:
        return self._by_id.values()

    def first_offset(self) -> int | None:
        return min((message.offset for message in self._by_id.values()), default=None)

    def histogram(self, *, topic: str | None, from_ms: int, to_ms: int, bucket_ms: int) -> list[tuple[int, int]]:
        counts: Counter[int] = Counter(
            message.deliver_at_ms // bucket_ms * bucket_ms
            for message in self._by_id.values()
            if from_ms <= message.deliver_at_ms < to_ms and (topic is None or message.topic == topic)
        )
        return sorted(counts.items())
