"""Values by topic and id, which together identify a message (decision 83), with lookups by the id alone.

Nearly every id is used on one topic only: then it takes one dictionary entry, and a lookup of many unknown ids builds
no key for any of them. Only an id on several topics has a dictionary of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


class _Several(dict[str, Value]):
    """The values of one id, by topic."""


class MessageIdMap(Generic[Value]):
    """Values that know their topic, by (topic, id). One writer thread; other threads may read concurrently."""

    def __init__(
        self, topic_of: Callable[[Value], str], ids: Sequence[str] = (), values: Iterable[Value] = ()
    ) -> None:  # fmt: skip
        self._topic_of = topic_of
        self._by_id: dict[str, Value | _Several[Value]] = {}
        self.put_all(ids, values)

    def __len__(self) -> int:
        """Returns the number of ids."""
        return len(self._by_id)

    def has_any(self, ids: Iterable[str]) -> bool:
        """Returns whether any of these ids exists, on any topic."""
        return not self._by_id.keys().isdisjoint(ids)

    def of_id(self, message_id: str) -> Iterable[Value]:
        """Returns the values of an id, on all its topics."""
        entry = self._by_id.get(message_id)
        if entry is None:
            return ()
        return list(entry.values()) if isinstance(entry, _Several) else (entry,)

    def get(self, topic: str, message_id: str) -> Value | None:
        """Returns the value of a message."""
        entry = self._by_id.get(message_id)
        if entry is None:
            return None
        if isinstance(entry, _Several):
            return entry.get(topic)
        return entry if self._topic_of(entry) == topic else None

    def put(self, message_id: str, value: Value) -> None:
        """Store a value, replacing that of the same topic and id."""
        entry, topic = self._by_id.get(message_id), self._topic_of(value)
        if isinstance(entry, _Several):
            entry[topic] = value
        elif entry is None or self._topic_of(entry) == topic:
            self._by_id[message_id] = value
        else:
            self._by_id[message_id] = _Several({self._topic_of(entry): entry, topic: value})

    def put_all(self, ids: Sequence[str], values: Iterable[Value]) -> None:
        """Store many values."""
        if len(set(ids)) == len(ids) and not self.has_any(ids):
            self.put_new(ids, values)
            return
        for message_id, value in zip(ids, values, strict=True):
            self.put(message_id, value)

    def put_new(self, ids: Iterable[str], values: Iterable[Value]) -> None:
        """Store many values under distinct ids that do not exist yet."""
        self._by_id.update(zip(ids, values, strict=True))

    def pop(self, topic: str, message_id: str) -> None:
        """Remove the value of exactly this topic and id, if there is one."""
        entry = self._by_id.get(message_id)
        if isinstance(entry, _Several):
            entry.pop(topic, None)
            if not entry:
                del self._by_id[message_id]
        elif entry is not None and self._topic_of(entry) == topic:
            del self._by_id[message_id]
