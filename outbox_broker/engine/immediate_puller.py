"""Serves pulls that need not wait: of few, recently written messages. Selection and delivery are the puller's.

A thread for each pull took as long again: from a publish to the answer of a waiting pull 0.4 ms instead of 0.24.
"""

from __future__ import annotations

from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.puller import PullChoice, PulledMessages, Puller
from outbox_broker.engine.recent_group_deletions import RecentGroupDeletions
from outbox_broker.group.consumer_group import Group
from outbox_broker.log.topic_index import TopicIndex

AT_HAND_BYTES_MAX: Final = 64 * 1024
"""Reading this much of what was just written does not wait for the disk: it is in the page cache."""


class ImmediatePuller:
    """Deliveries for a caller that must not block, such as an event loop."""

    def __init__(
        self, context: EngineContext, deleted: RecentGroupDeletions, dispatcher: Dispatcher, puller: Puller,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._lag_bytes_max = context.options.immediate_pull_lag_bytes_max
        self._lock = context.lock
        self._state = context.state
        self._messages = context.messages
        self._actions = context.actions
        self._deleted = deleted
        self._dispatcher = dispatcher
        self._puller = puller

    def take_at_hand(
        self, topic: str, group: str, *, max_messages: int, invisible_ms: int, consumer: str | None = None,
        fires: bool = True, since: int | None = None, begins: bool = False,
    ) -> list[PulledMessages] | None:  # fmt: skip
        """Like take(), if it needs no wait: for no lock, no disk, no other pull. None, with nothing delivered, if it
        might: then call take(), in a thread that may block.
        """
        if (fires and self._dispatcher.may_be_firing()) or not self._lock.acquire(blocking=False):
            return None
        try:
            self._context.refuse_if_closed()
            self._deleted.refuse_if_deleted(topic, group, since=since)
            found_topic, found = self._state.topics.get(topic), self._state.group(topic, group)
            if found_topic is None or found is None or found.accepts is not None or found.order is not None:
                return None
            if self._actions.is_full or not found.pulling.acquire(blocking=False):
                return None  # a checkpoint is due, which needs a sync
            try:
                now_ms = self._clock.now_ms()
                if not _is_chosen_at_once(found_topic.index, found, now_ms=now_ms, count_max=max_messages):
                    return None
                choice = self._puller.choose(found_topic, found, count_max=max_messages, begins=begins, now_ms=now_ms)
                if choice is None:
                    return []
                if not self._is_at_hand(choice):
                    return None
                records = self._puller.read(choice)
                if any(record is None or (record.deliver_at_ms or 0) > now_ms for _, record in records):
                    return None  # each of these takes an action of its own to set aside
                return (
                    self._puller.deliver(
                        found_topic, found, choice, records, invisible_ms=invisible_ms, consumer=consumer
                    )
                    or None
                )
            finally:
                found.pulling.release()
        finally:
            self._lock.release()

    def _is_at_hand(self, choice: PullChoice) -> bool:
        runs = [run for found in choice.runs for run in found]
        oldest = self._messages.end - self._lag_bytes_max
        return sum(run.size_bytes for run in runs) <= AT_HAND_BYTES_MAX and all(run.offset >= oldest for run in runs)


def _is_chosen_at_once(index: TopicIndex, group: Group, *, now_ms: int, count_max: int) -> bool:
    """Returns whether choosing reads no index file and creates no dead letters, which may fill a segment."""
    if group.paused:
        return True
    again, deaths = group.visible_again(now_ms=now_ms, count_max=count_max)
    return not deaths and all(index.is_in_memory(first) for first in (group.position, *(one[0] for one in again)))
