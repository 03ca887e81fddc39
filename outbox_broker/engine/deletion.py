"""Deletes topics and consumer groups: one action each, durable before anything is removed.

If the process is killed, the action is in the log or not: a topic or group exists, or is gone. Remaining work is
finished at the next start.

Receipts, actions and the reconciliation name messages by sequence. So a topic that is created again continues at its
old end, and a new group starts in a generation above that of every deleted one: no receipt from before settles
anything. Ids stay known, or a repeated publish would bring a deleted message back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from outbox_broker.common.cancel_topic_patterns import scope_of
from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.recurring_publisher import RecurringPublisher
from outbox_broker.engine.topic_reader import READERS
from outbox_broker.engine.wakeups import RecentGroupDeletions, Wakeups
from outbox_broker.group.consumer_group import Group
from outbox_broker.state.engine_state import Tombstone, Topic
from outbox_core.common.errors import InUse
from outbox_core.journal import journal
from outbox_core.journal.deletion_records import DeletedGroup, DeletedTopic
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

LOOKS_MAX: Final = 100
"""How many passes over the schedule are made for a deleted topic: messages move during a pass."""


class Deletion:
    """Operators' deletions. An unknown topic or group is a KeyError; one that is in use, InUse, unless forced."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry,
        deleted: RecentGroupDeletions, dispatcher: Dispatcher, recurring: RecurringPublisher,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._writer = writer
        self._wakeups = wakeups
        self._groups = groups
        self._deleted = deleted
        self._dispatcher = dispatcher
        self._recurring = recurring

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete a consumer group: its position, deliveries and dead letters. Messages stay for other groups.

        A group is in use if pulls wait for it, or consumers hold messages of it. If forced, waiting pulls end with
        GroupDeleted, and receipts become unknown, or stale once there is another group of this name.
        """
        with self._lock:
            self._context.refuse_if_closed()
            known_group = self._groups.known_group(topic, group)
            if not force:
                self._refuse_if_group_used(topic, known_group)
            self._act_durably(DeletedGroup(topic=topic, group=group, at_ms=self._clock.now_ms()))
            self._tell_deleted(topic, [group])
        logger.info("group_deleted", extra={"topic": topic, "group": group, "forced": force})

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic: its messages are no longer delivered, and its scheduled ones are canceled.

        A topic is in use if it has consumer groups, scheduled or recurring messages. If forced, its groups are deleted,
        as by delete_group(), and its recurring messages, which would create it again. A topic of this name that is
        created later continues its sequences.
        """
        if force:
            self._delete_recurring(topic)
        with self._lock:
            self._context.refuse_if_closed()
            known_topic = self._groups.known_topic(topic)
            if not force:
                self._refuse_if_topic_used(topic, known_topic)
            self._refuse_if_too_many_deleted(topic)
            groups = sorted(known_topic.groups)
            has_scheduled = (
                self._context.schedule.queries.count(topic)
                or self._dispatcher.is_dispatching
                or self._dispatcher.has_taken()
            )
            self._act_durably(
                DeletedTopic(
                    topic=topic, at_ms=self._clock.now_ms(), end=known_topic.index.end, groups=groups,
                    scheduled_end=self._context.schedule.next_seq() if has_scheduled else 0,
                    messages_end=self._context.messages.end, actions_end=self._context.actions.end,
                )
            )  # fmt: skip
            self._tell_deleted(topic, [*groups, READERS])
        self._cancel_void(topic)
        logger.info("topic_deleted", extra={"topic": topic, "groups": len(groups), "forced": force})

    def _delete_recurring(self, topic: str) -> None:
        with self._lock:
            self._context.refuse_if_closed()
            self._groups.known_topic(topic)
            names = self._state.recurring.of_topic(topic)
        for name in names:
            with suppress(KeyError):  # it was deleted meanwhile
                self._recurring.delete(name)

    def finish_deletions(self) -> None:
        """Finish at startup: cancel what a kill left in the schedule of deleted topics."""
        for topic, count in self._context.schedule.queries.topics().items():
            if count and topic in self._state.deleted:
                self._cancel_void(topic)
                if self._context.schedule.queries.count(topic):
                    self._state.topic(topic)  # it was created again, for these

    def _cancel_void(self, topic: str) -> None:
        """Cancel a deleted topic's scheduled messages in steps. Logged first, since none of them can be delivered."""
        scope = scope_of([topic])
        for _ in range(LOOKS_MAX):
            with self._lock:
                deleted = self._state.deleted.get(topic)
            if deleted is None or not deleted.scheduled_end:
                return
            is_clear = True
            for ids in self._context.schedule.queries.ids_of(topic, before_seq=deleted.scheduled_end):
                is_clear = False
                with self._lock:
                    self._context.refuse_if_closed()
                    self._dispatcher.tell_void([(topic, message_id) for message_id in ids])
                self._context.actions.commit()
                self._context.schedule.commit(
                    self._context.schedule.stop(ids, now_ms=self._clock.now_ms(), scope=scope).place
                )
            if is_clear:
                self._note_clear(topic, deleted)
                return
        # What remains is discarded when it is due, so none of it is delivered.
        logger.warning("scheduled_messages_left", extra={"topic": topic})

    def _note_clear(self, topic: str, deleted: Tombstone) -> None:
        """Record that the schedule has no discarded messages of a topic, unless some are in progress."""
        with self._lock:
            if self._state.deleted.get(topic) == deleted and not (
                self._dispatcher.is_dispatching or self._dispatcher.has_taken()
            ):
                self._state.deleted[topic] = replace(deleted, scheduled_end=0)

    def _act_durably(self, action: journal.Action) -> None:
        """Log an action durably, then apply it: no footer may lack messages that a power failure brings back."""
        self._writer.write_action(action)
        self._context.actions.commit()
        self._state.replay_action(action)

    def _tell_deleted(self, topic: str, groups: Sequence[str]) -> None:
        """Wake pulls of what was deleted, and those that waited for in-flight capacity."""
        self._deleted.note(topic, groups)
        for group in groups:
            self._wakeups.wake(topic, group)
        self._wakeups.wake_short()

    def _refuse_if_group_used(self, topic: str, group: Group) -> None:
        waiting, in_flight = self._wakeups.pulls_waiting[topic, group.name], group.in_flight_at(self._clock.now_ms())
        if waiting or in_flight:
            raise InUse(
                f"the consumer group {group.name} of {topic} is in use: {waiting} pulls wait, and consumers hold "
                f"{in_flight} messages; stop its consumers, or force the deletion"
            )

    def _refuse_if_topic_used(self, topic: str, known_topic: Topic) -> None:
        scheduled, recurring = self._context.schedule.queries.count(topic), len(self._state.recurring.of_topic(topic))
        if known_topic.groups or scheduled or recurring:
            raise InUse(
                f"the topic {topic} is in use: it has {len(known_topic.groups)} consumer groups, {scheduled} "
                f"scheduled and {recurring} recurring messages; delete its groups and recurring messages and cancel "
                "what is scheduled, or force the deletion"
            )

    def _refuse_if_too_many_deleted(self, topic: str) -> None:
        deleted = self._state.deleted
        if topic not in deleted and len(deleted) >= self._options.topics_max:
            raise InUse(
                f"{len(deleted)} deleted topics are remembered, as many as there may be topics (topics_max): until "
                "retention has dropped the log's segments that hold their messages, no other is deleted"
            )
