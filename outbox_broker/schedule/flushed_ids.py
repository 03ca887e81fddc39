"""Tells which message ids came lately, so that a repeated publish is known to be one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.sorted_run import UNKNOWN_TOPIC, id_hashes, topic_hash
from outbox_broker.state.message_identities import Identities


class Identified(Protocol):
    """What tells which message it is."""

    @property
    def topic(self) -> str:
        """The topic."""

    @property
    def id(self) -> str:
        """The message id."""


class FlushedIds:
    """The ids of the last flushes, beside those that the state knows. Questions wait for nobody.

    What they read is replaced and never changed in place, since others look meanwhile.
    """

    def __init__(self, context: ScheduleContext) -> None:
        self._context = context
        self._flushed: tuple[Identities[str], ...] = ()  # topics and ids of the last flushes
        self._recovered: dict[int, set[int]] = {}  # hashes of topics and ids that came lately, before this was opened

    def may_know(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Whether anything may be known of messages of these ids on these topics.

        Every id is looked for in the places that it passes, in the order in which it passes them.
        """
        state = self._context.state
        return (
            state.known.has_any(ids)
            or state.canceled.has_any(ids)
            or any(some.has_any(ids) for some in self._flushed)
            or self._may_be_recovered(ids, topics)
        )

    def knows(self, topic: str, message_id: str) -> bool:
        """Whether this message waits, fired lately, or was canceled, before or after it came."""
        state = self._context.state
        return (
            state.known.get(topic, message_id) is not None
            or state.canceled.knows(topic, message_id)
            or self.has(topic, message_id)
        )

    def canceled_among(self, messages: Sequence[Identified]) -> list[int]:
        """Which of these messages were canceled, before or after they came, as far as remembered."""
        canceled = self._context.state.canceled
        if not len(canceled):
            return []
        return [at for at, one in enumerate(messages) if canceled.knows(one.topic, one.id)]

    def has(self, topic: str, message_id: str) -> bool:
        """Whether this message came with one of the last flushes."""
        some_have = any(some.get(topic, message_id) is not None for some in self._flushed)
        return some_have or self._may_be_recovered([message_id], [topic])

    def add_flushed(self, newest: Identities[str]) -> None:
        """Remember the ids of the last flushes; at least `dedup_messages`. Under `lock`."""
        dedup_messages = self._context.options.dedup_messages
        kept = [*self._flushed, newest]
        while kept and sum(map(len, kept[1:])) >= dedup_messages:
            del kept[0]
        self._flushed = tuple(kept)
        if sum(map(len, kept)) >= dedup_messages:
            self._recovered = {}

    def add_recovered(self, hashes: Iterable[tuple[int, int]]) -> None:
        """Hashes of topics and ids that came before this was opened."""
        recovered = {topic: set(some) for topic, some in self._recovered.items()}  # others look meanwhile
        for topic, hash_ in hashes:
            recovered.setdefault(topic, set()).add(hash_)
        self._recovered = recovered

    def _may_be_recovered(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Whether one of these ids came lately, before this was opened, on one of these topics."""
        recovered = self._recovered
        if not recovered:
            return False
        known = recovered.keys() & {UNKNOWN_TOPIC, *map(topic_hash, topics)}
        hashes = id_hashes(ids) if known else []
        return any(not recovered[topic].isdisjoint(hashes) for topic in known)
