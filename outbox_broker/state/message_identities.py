"""What is known of messages by topic and id, which together say which message is meant; and by the id alone.

Nearly every id is of one topic: then it takes one entry of one dictionary, and whoever asks for many ids, of which none
is known, makes no key for any of them. Only an id of several topics has a dictionary of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from outbox_broker.common.cancel_scope import ANY_TOPIC

Value = TypeVar("Value")


class _Several(dict[str, Value]):
    """The values of one id, by topic."""


class Identities(Generic[Value]):
    """Values that tell their topic, by (topic, id). One thread changes it; others may look meanwhile."""

    def __init__(
        self, topic_of: Callable[[Value], str], ids: Sequence[str] = (), values: Iterable[Value] = ()
    ) -> None:  # fmt: skip
        self._topic_of = topic_of
        self._by_id: dict[str, Value | _Several[Value]] = {}
        self.put_all(ids, values)

    def __len__(self) -> int:
        """How many ids there are."""
        return len(self._by_id)

    def has_any(self, ids: Iterable[str]) -> bool:
        """Whether one of these ids is there, on whatever topic."""
        return not self._by_id.keys().isdisjoint(ids)

    def of_id(self, message_id: str) -> Iterable[Value]:
        """The values of an id, on all its topics."""
        found = self._by_id.get(message_id)
        if found is None:
            return ()
        return list(found.values()) if isinstance(found, _Several) else (found,)

    def get(self, topic: str, message_id: str) -> Value | None:
        """The value of a message; or of one of its id whose topic is not known, which may be this one."""
        found = self._by_id.get(message_id)
        if found is None:
            return None
        if isinstance(found, _Several):
            return found.get(topic, found.get(ANY_TOPIC))
        return found if self._topic_of(found) in {topic, ANY_TOPIC} else None

    def put(self, message_id: str, value: Value) -> None:
        """A value, in place of that of the same topic and id."""
        found, topic = self._by_id.get(message_id), self._topic_of(value)
        if isinstance(found, _Several):
            found[topic] = value
        elif found is None or self._topic_of(found) == topic:
            self._by_id[message_id] = value
        else:
            self._by_id[message_id] = _Several({self._topic_of(found): found, topic: value})

    def put_all(self, ids: Sequence[str], values: Iterable[Value]) -> None:
        """Many values."""
        if len(set(ids)) == len(ids) and not self.has_any(ids):
            self.put_new(ids, values)
            return
        for message_id, value in zip(ids, values, strict=True):
            self.put(message_id, value)

    def put_new(self, ids: Iterable[str], values: Iterable[Value]) -> None:
        """Many values under ids of which none is there, nor twice among them."""
        self._by_id.update(zip(ids, values, strict=True))

    def pop(self, topic: str, message_id: str) -> None:
        """Let go of a value, where there is one of this very topic and id."""
        found = self._by_id.get(message_id)
        if isinstance(found, _Several):
            found.pop(topic, None)
            if not found:
                del self._by_id[message_id]
        elif found is not None and self._topic_of(found) == topic:
            del self._by_id[message_id]
