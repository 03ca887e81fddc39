"""Deletion of topics and consumer groups: one action each, durable before anything is let go.

Where a process is killed, the action stands in the log or not: a topic or group is there, or gone, whatever else was to
be done. What is left to do is done on opening.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from outbox_broker.common.cancel_scope import scope_of
from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.deletion_history import DeletionHistory
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.topic_reader import READERS
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.group.consumer_group import Group
from outbox_broker.state.engine_state import Tombstone, Topic
from outbox_core.common.errors import InUse
from outbox_core.journal import journal
from outbox_core.journal.deletion_records import DeletedGroup, DeletedTopic

logger = logging.getLogger(__name__)

LOOKS_MAX: Final = 100
"""So often the schedule is looked through for what a deleted topic has in it: messages move while it is."""


class Deletion:
    """What operators delete. An unknown topic or group is a KeyError; one that is in use, InUse, unless forced."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry,
        deleted: DeletionHistory, dispatcher: Dispatcher,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._messages = context.messages
        self._actions = context.actions
        self._writer = writer
        self._wakeups = wakeups
        self._groups = groups
        self._deleted = deleted
        self._dispatcher = dispatcher

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete a consumer group: its position, what it holds, its dead letters. Messages stay for other groups.

        In use is a group for which somebody waits, or whose messages consumers hold. Forced, waiting pulls end with
        GroupDeleted, and receipts are unknown, or stale once there is another group of this name.
        """
        with self._lock:
            self._context.refuse_if_closed()
            known = self._groups.known_group(topic, group)
            if not force:
                self._refuse_if_group_used(topic, known)
            self._act_durably(DeletedGroup(topic=topic, group=group, at_ms=self._clock.now_ms()))
            self._tell_deleted(topic, [group])
        logger.info("group_deleted", extra={"topic": topic, "group": group, "forced": force})

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic: its messages are served no more, what it has scheduled is canceled.

        In use is a topic that has consumer groups, or scheduled messages. Forced, its groups are deleted, as
        delete_group() does. A topic of this name that is made later goes on at its sequences.
        """
        with self._lock:
            self._context.refuse_if_closed()
            known = self._groups.known_topic(topic)
            if not force:
                self._refuse_if_topic_used(topic, known)
            self._refuse_if_too_many_deleted(topic)
            groups = sorted(known.groups)
            has_scheduled = (
                self._context.schedule.count(topic) or self._dispatcher.is_firing or self._dispatcher.has_taken()
            )
            self._act_durably(
                DeletedTopic(
                    topic=topic, at_ms=self._clock.now_ms(), end=known.index.end, groups=groups,
                    scheduled_end=self._context.schedule.next_seq() if has_scheduled else 0,
                    messages_end=self._messages.end, actions_end=self._actions.end,
                )
            )  # fmt: skip
            self._tell_deleted(topic, [*groups, READERS])
        self._cancel_void(topic)
        logger.info("topic_deleted", extra={"topic": topic, "groups": len(groups), "forced": force})

    def finish_deletions(self) -> None:
        """On opening: cancel what a kill has left in the schedule of topics that were deleted."""
        for topic, count in self._context.schedule.topics().items():
            if count and topic in self._state.deleted:
                self._cancel_void(topic)
                if self._context.schedule.count(topic):
                    self._state.topic(topic)  # it was made again, for these

    def _cancel_void(self, topic: str) -> None:
        """Cancel what a deleted topic had scheduled, by steps. Told before it is done: none of it can be delivered."""
        scope = scope_of([topic])
        for _ in range(LOOKS_MAX):
            with self._lock:
                deleted = self._state.deleted.get(topic)
            if deleted is None or not deleted.scheduled_end:
                return
            is_clear = True
            for ids in self._context.schedule.ids_of(topic, before_seq=deleted.scheduled_end):
                is_clear = False
                with self._lock:
                    self._context.refuse_if_closed()
                    self._dispatcher.tell_void([(topic, one) for one in ids])
                self._actions.commit()
                self._context.schedule.commit(
                    self._context.schedule.stop(ids, now_ms=self._clock.now_ms(), scope=scope).place
                )
            if is_clear:
                self._note_clear(topic, deleted)
                return
        # What is left is void when it is due, so that none of it is delivered.
        logger.warning("scheduled_messages_left", extra={"topic": topic})

    def _note_clear(self, topic: str, deleted: Tombstone) -> None:
        """The schedule has nothing void of a topic; where nothing is on its way either, nobody need look again."""
        with self._lock:
            if self._state.deleted.get(topic) == deleted and not (
                self._dispatcher.is_firing or self._dispatcher.has_taken()
            ):
                self._state.deleted[topic] = replace(deleted, scheduled_end=0)

    def _act_durably(self, action: journal.Action) -> None:
        """Write an action down, durably, then do it: no index file may lack messages that a power cut gives back."""
        self._writer.write_action(action)
        self._actions.commit()
        self._state.replay_action(action)

    def _tell_deleted(self, topic: str, groups: Sequence[str]) -> None:
        """Wake who waits for what is gone, and who waited for room in hand."""
        self._deleted.note(topic, groups)
        for group in groups:
            self._wakeups.wake(topic, group)
        self._wakeups.wake_short()

    def _refuse_if_group_used(self, topic: str, group: Group) -> None:
        waiting, held = self._wakeups.pulls_waiting[topic, group.name], group.held_at(self._clock.now_ms())
        if waiting or held:
            raise InUse(
                f"the consumer group {group.name} of {topic} is in use: {waiting} pulls wait, and consumers hold "
                f"{held} messages; stop its consumers, or force the deletion"
            )

    def _refuse_if_topic_used(self, topic: str, known: Topic) -> None:
        scheduled = self._context.schedule.count(topic)
        if known.groups or scheduled:
            raise InUse(
                f"the topic {topic} is in use: it has {len(known.groups)} consumer groups and {scheduled} scheduled "
                "messages; delete its groups and cancel what is scheduled, or force the deletion"
            )

    def _refuse_if_too_many_deleted(self, topic: str) -> None:
        deleted = self._state.deleted
        if topic not in deleted and len(deleted) >= self._options.topics_max:
            raise InUse(
                f"{len(deleted)} deleted topics are remembered, as many as there may be topics (topics_max): until "
                "retention has dropped the log's segments that hold their messages, no other is deleted"
            )
