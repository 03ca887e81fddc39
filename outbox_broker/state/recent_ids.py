"""Remembers recent messages by topic and id, so that a repeated publish is recognised. Bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby, islice

from outbox_broker.state.message_id_map import MessageIdMap


class RecentIds:
    """The newest `count_max` messages, in order of arrival."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._topics_of_ids: MessageIdMap[str] = MessageIdMap(str)
        self._ids: deque[str] = deque()
        self._topics: deque[str] = deque()  # of each of the ids
        self.added = 0

    def __len__(self) -> int:
        return len(self._ids)

    def has(self, topic: str, message_id: str) -> bool:
        """Returns whether this message is remembered."""
        return self._topics_of_ids.get(topic, message_id) is not None

    def has_any(self, message_ids: Iterable[str]) -> bool:
        """Returns whether any of these ids is remembered, on any topic."""
        return self._topics_of_ids.has_any(message_ids)

    def topics(self, message_id: str) -> Iterable[str]:
        """Returns the topics that have a message of this id."""
        return self._topics_of_ids.of_id(message_id)

    def add(self, topic: str, message_id: str) -> None:
        """Remember a message; the oldest one is dropped at the limit."""
        if not self.has(topic, message_id):
            self._topics_of_ids.put(message_id, topic)
            self._append([message_id], [topic])

    def add_all(self, topics: Iterable[str], message_ids: Sequence[str]) -> None:
        """Remember messages, some of which may be known already."""
        if len(set(message_ids)) == len(message_ids) and not self.has_any(message_ids):
            self.add_new(list(topics), message_ids)
            return
        for topic, message_id in zip(topics, message_ids, strict=True):
            self.add(topic, message_id)

    def add_new(self, topics: Sequence[str], message_ids: Sequence[str]) -> None:
        """Remember messages under distinct ids of which none is known."""
        self._topics_of_ids.put_new(message_ids, topics)
        self._append(message_ids, topics)

    def newest(self, count: int) -> list[tuple[str, list[str]]]:
        """Returns the last `count` messages, in order: each topic with the consecutive ids on it."""
        start = max(0, len(self._ids) - count)
        pairs = zip(islice(self._topics, start, None), islice(self._ids, start, None), strict=True)
        return [
            (topic, [message_id for _, message_id in some]) for topic, some in groupby(pairs, key=lambda pair: pair[0])
        ]

    def _append(self, message_ids: Sequence[str], topics: Sequence[str]) -> None:
        self._ids.extend(message_ids)
        self._topics.extend(topics)
        self.added += len(message_ids)
        while len(self._ids) > self._count_max:
            self._topics_of_ids.pop(self._topics.popleft(), self._ids.popleft())
