"""Purges a topic: none of its groups gets what is in it now. Dead letters and scheduled messages go only if asked.

All groups are moved by one action: a process that is killed has purged all of them, or none. To the reconciliation it
is a seek of each group to the topic's end, so what was passed over is explained and not lost. The messages leave the
disk with their segments, which no group holds back any more.
"""

from __future__ import annotations

from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_operations import DeadLetterOperations
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.publisher import Publisher
from outbox_broker.engine.wakeups import Wakeups
from outbox_core.journal.deletion_records import PurgedTopic
from outbox_core.messages.message import CancelStatus
from outbox_core.protocol.wire import PurgeAnswer
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

WHY: Final = "the topic was purged"
"""The reason in the records of dead letters that are discarded."""
LOOKS_MAX: Final = 100
"""How many passes over the schedule are made: messages move during a pass."""
ROUNDS_MAX: Final = 10
"""How many rounds of the dispatcher are waited for: it may find no room on the disk."""


class Purger:
    """Operators' purges. An unknown topic is a KeyError."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry, publisher: Publisher,
        dead_letters: DeadLetterOperations,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._lock = context.lock
        self._writer = writer
        self._wakeups = wakeups
        self._groups = groups
        self._publisher = publisher
        self._dead_letters = dead_letters

    def purge_topic(self, topic: str, *, scheduled: bool = False, dead: bool = False, by: str = "") -> PurgeAnswer:
        """Move each group of a topic behind all that is stored in it, durably on return. Idempotent.

        `scheduled`: cancel what is scheduled, too, page by page, before that: whatever falls due meanwhile is in the
        topic then. `dead`: discard the dead letters, too, group by group, after it; `by`: who asks, for their records.
        A purge that was interrupted is repeated.
        """
        with self._lock:
            self._context.refuse_if_closed()
            self._groups.known_topic(topic)
        canceled = self._cancel_scheduled(topic) if scheduled else 0
        self._context.messages.commit()  # no position may be ahead of the messages
        with self._lock:
            self._context.refuse_if_closed()
            known_topic = self._groups.known_topic(topic)
            groups, end = list(known_topic.groups.values()), self._groups.durable_end(known_topic)
            for group in groups:
                self._groups.skip_filtered(known_topic, group)
            waiting = sum(max(0, end - group.position) + group.waiting() for group in groups)
            in_flight = sum(group.in_flight() for group in groups)
            if groups:
                self._writer.act(
                    PurgedTopic(
                        topic=topic, at_ms=self._clock.now_ms(), end=end,
                        groups=[(group.name, group.generation + 1) for group in groups],
                    )
                )  # fmt: skip
            actions_end = self._context.actions.end
            for group in groups:
                self._wakeups.wake_next(topic, group)
        self._context.actions.commit(actions_end)
        discarded = sum(self._discard(topic, group.name, by=by) for group in groups) if dead else 0
        purge = PurgeAnswer(
            groups=len(groups), waiting=waiting, in_flight=in_flight, scheduled_canceled=canceled,
            scheduled_kept=self._context.schedule.count_undelivered(topic), dead_discarded=discarded,
            dead_kept=sum(len(group.dead) for group in groups),
        )  # fmt: skip
        logger.info(
            "topic_purged",
            extra={
                "topic": topic, "groups": purge.groups, "waiting": waiting, "in_flight": in_flight,
                "scheduled_canceled": canceled, "dead_discarded": discarded,
            },
        )  # fmt: skip
        return purge

    def _discard(self, topic: str, group: str, *, by: str) -> int:
        try:
            return self._dead_letters.discard(topic, group, by=by, why=WHY)
        except KeyError:  # it was deleted meanwhile, and its dead letters with it
            return 0

    def _cancel_scheduled(self, topic: str) -> int:
        """Cancel what is scheduled for a topic by now; returns how many."""
        before_seq, canceled = self._context.schedule.next_seq(), 0
        for _ in range(LOOKS_MAX):
            is_clear = True
            for ids in self._context.schedule.queries.ids_of(topic, before_seq=before_seq):
                is_clear = False
                statuses = self._publisher.cancel(ids, topics=[topic])
                canceled += sum(status is CancelStatus.CANCELED for status in statuses)
            if is_clear:
                break
        # What the dispatcher has claimed is neither scheduled nor in its topic yet: it is waited for.
        schedule = self._context.schedule
        for _ in range(ROUNDS_MAX):
            if schedule.count_undelivered(topic) <= schedule.queries.count(topic):
                break
            self._publisher.cancel([], topics=[topic])
        return canceled
