"""Remembers recent cancels, so that a cancel before its publish still wins, and a repeated cancel gets the same answer.

Each has a scope: the topics on which its sender may cancel. Bounded by count and by time. If there are too many, the
scope with the most drops its oldest: one client's flood does not evict the few cancels of others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from outbox_broker.common.cancel_topic_patterns import Scope, covers

CANCEL_MEMORY_MS: Final = 7 * 24 * 3_600_000
"""How long a cancel waits for its publish; the compensator resends within minutes of an outage's end."""
CANCEL_RENEWED_MS: Final = 3_600_000
"""A cancel repeated after this time is remembered as a new one, so that it waits as long as a first one."""


class Cancel(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A remembered cancel with its `scope`. `topic`: of the message that it stopped; None: it arrived before its
    message, and applies to all messages of its id that arrive within its scope.
    """

    id: str
    at_ms: int
    topic: str | None
    scope: Scope = None


class RememberedCancels:
    """The newest cancels."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._by_id: dict[str, tuple[Cancel, ...]] = {}
        self._by_scope: dict[Scope, deque[Cancel]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has_any(self, message_ids: Iterable[str]) -> bool:
        """Returns whether any of these ids is remembered, on any topic."""
        return bool(self._by_id) and not self._by_id.keys().isdisjoint(message_ids)

    def has_stopped(self, topic: str, message_id: str) -> bool:
        """Returns whether this message was canceled."""
        return any(cancel.topic == topic for cancel in self._by_id.get(message_id, ()))

    def will_stop(self, topic: str, message_id: str) -> bool:
        """Returns whether this message would be canceled on arrival."""
        return self._early(topic, message_id) is not None

    def knows(self, topic: str, message_id: str) -> bool:
        """Returns whether this message was canceled, before or after it arrived."""
        found = self._by_id
        return message_id in found and (self.has_stopped(topic, message_id) or self.will_stop(topic, message_id))

    def topics(self, message_id: str, scope: Scope) -> set[str]:
        """Returns the topics of a scope on which messages of this id were canceled."""
        cancels = self._by_id.get(message_id)
        if cancels is None:
            return set()
        return {cancel.topic for cancel in cancels if cancel.topic is not None and covers(scope, cancel.topic)}

    def renewable(self, message_id: str, scope: Scope, *, before_ms: int) -> set[str]:
        """Returns the topics of a scope on which messages of this id were canceled, but not since `before_ms`."""
        newer = {cancel.topic for cancel in self._by_id.get(message_id, ()) if cancel.at_ms >= before_ms}
        return self.topics(message_id, scope) - newer

    def awaits(self, message_id: str, scope: Scope, *, since_ms: int = 0) -> bool:
        """Returns whether a cancel of this scope, or of all topics, since `since_ms` waits for messages of this id."""
        cancels = self._by_id.get(message_id)
        return cancels is not None and any(
            cancel.topic is None and cancel.scope in {scope, None} and cancel.at_ms >= since_ms for cancel in cancels
        )

    def add(self, cancels: Sequence[Cancel], *, at_ms: int) -> None:
        """Remember cancels; drops the oldest above the limit, and those older than a week."""
        for cancel in cancels:
            known = self._by_id.get(cancel.id, ())
            same = next((other for other in known if other.topic == cancel.topic and other.scope == cancel.scope), None)
            if same is not None and cancel.at_ms - same.at_ms < CANCEL_RENEWED_MS:
                continue
            # A replaced cancel stays in the queue of its scope, and is dropped there in its turn.
            self._by_id[cancel.id] = (*(other for other in known if other is not same), cancel)
            self._by_scope.setdefault(cancel.scope, deque()).append(cancel)
            self._count += 1
        self._forget_excess()
        for scope in list(self._by_scope):
            while scope in self._by_scope and self._by_scope[scope][0].at_ms < at_ms - CANCEL_MEMORY_MS:
                self._forget_oldest(scope)

    def stop(self, topics: Iterable[str], message_ids: Iterable[str]) -> None:
        """Record that these messages arrived and were stopped."""
        found = [(topic, self._early(topic, message_id)) for topic, message_id in zip(topics, message_ids, strict=True)]
        self.add(
            [Cancel(cancel.id, cancel.at_ms, topic, cancel.scope) for topic, cancel in found if cancel is not None],
            at_ms=0,
        )

    def stored(self) -> list[Cancel]:
        """Returns all cancels, each scope's from the oldest on, for a checkpoint."""
        return [cancel for some in self._by_scope.values() for cancel in some]

    def restore(self, stored: Sequence[Cancel]) -> None:
        """Load the cancels of a checkpoint."""
        self.add(stored, at_ms=0)

    def _early(self, topic: str, message_id: str) -> Cancel | None:
        found = (
            cancel for cancel in self._by_id.get(message_id, ()) if cancel.topic is None and covers(cancel.scope, topic)
        )
        return next(found, None)

    def _forget_excess(self) -> None:
        if self._count > self._count_max:
            counts = Counter({scope: len(some) for scope, some in self._by_scope.items()})
            while self._count > self._count_max:
                scope = max(counts, key=counts.__getitem__)
                counts[scope] -= 1
                self._forget_oldest(scope)

    def _forget_oldest(self, scope: Scope) -> None:
        oldest = self._by_scope[scope].popleft()
        self._count -= 1
        left = tuple(cancel for cancel in self._by_id[oldest.id] if cancel is not oldest)
        if left:
            self._by_id[oldest.id] = left
        else:
            del self._by_id[oldest.id]
        if not self._by_scope[scope]:
            del self._by_scope[scope]
