"""Remembers which message ids arrived recently, so that a repeated publish is recognised.

One that is repeated later is scheduled twice, under the same due time: both reach the target together, which drops the
second by its id.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.sorted_run import id_hashes, topic_hash
from outbox_broker.state.message_id_map import MessageIdMap


class MessageIdentity(Protocol):
    """A message identity: topic and id."""

    @property
    def topic(self) -> str:
        """The topic."""

    @property
    def id(self) -> str:
        """The message id."""


class RecentMessageIds:
    """The ids of the last flushes, in addition to those in the state. Readers take no lock.

    Collections are replaced and never changed in place, since other threads read concurrently.
    """

    def __init__(self, context: ScheduleContext) -> None:
        self._context = context
        self._flushed: tuple[MessageIdMap[str], ...] = ()  # topics and ids of the last flushes
        self._recovered: dict[int, array[int]] = {}  # ids by topic, as sorted hashes, of before the opening

    def may_know(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Returns whether any message with these ids on these topics may be known.

        Every id is searched in the places through which it moves, in that order, so that none is missed in transit.
        """
        state = self._context.state
        return (
            state.known.has_any(ids)
            or state.canceled.has_any(ids)
            or any(some.has_any(ids) for some in self._flushed)
            or self._may_be_recovered(ids, topics)
        )

    def knows(self, topic: str, message_id: str) -> bool:
        """Returns whether this message is waiting, was dispatched recently, or was canceled, even in advance."""
        state = self._context.state
        return (
            state.known.get(topic, message_id) is not None
            or state.canceled.knows(topic, message_id)
            or self.has(topic, message_id)
        )

    def canceled_among(self, messages: Sequence[MessageIdentity]) -> list[int]:
        """Returns the indexes of messages that were canceled, before or after they arrived, as far as remembered."""
        canceled = self._context.state.canceled
        if not len(canceled):
            return []
        return [at for at, message in enumerate(messages) if canceled.knows(message.topic, message.id)]

    def has(self, topic: str, message_id: str) -> bool:
        """Returns whether this message was in one of the last flushes."""
        some_have = any(some.get(topic, message_id) is not None for some in self._flushed)
        return some_have or self._may_be_recovered([message_id], [topic])

    def add_flushed(self, newest: MessageIdMap[str]) -> None:
        """Add the ids of a flush and drop old ones; at least `dedup_messages` are kept. Under `lock`."""
        dedup_messages = self._context.options.dedup_messages
        kept = [*self._flushed, newest]
        while kept and sum(map(len, kept[1:])) >= dedup_messages:
            del kept[0]
        self._flushed = tuple(kept)
        if sum(map(len, kept)) >= dedup_messages:
            self._recovered = {}

    def add_recovered(self, hashes: Iterable[tuple[int, Iterable[int]]]) -> None:
        """Add hashes of topics, each with hashes of ids that arrived before this process opened the store."""
        recovered = {topic: array("Q", some) for topic, some in self._recovered.items()}  # others read concurrently
        for topic, some in hashes:
            recovered.setdefault(topic, array("Q")).extend(some)
        self._recovered = {topic: array("Q", sorted(some)) for topic, some in recovered.items()}

    def _may_be_recovered(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Returns whether one of these ids arrived on one of these topics shortly before the store was opened."""
        recovered = self._recovered
        if not recovered:
            return False
        known = recovered.keys() & set(map(topic_hash, topics))
        hashes = id_hashes(ids) if known else []
        return any(_contains(recovered[topic], hash_) for topic in known for hash_ in hashes)


def _contains(hashes: array[int], hash_: int) -> bool:
    """Returns whether a sorted array has a value: a set would take ten times the memory."""
    at = bisect_left(hashes, hash_)
    return at < len(hashes) and hashes[at] == hash_
