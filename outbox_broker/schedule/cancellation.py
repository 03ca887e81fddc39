"""Cancels scheduled messages, and remembers cancels that arrive before their messages."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from outbox_broker.common.cancel_topic_patterns import Scope
from outbox_broker.schedule.recent_cancels import CANCEL_RENEWED_MS
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_log import Place
from outbox_broker.schedule.schedule_records import ScheduleCanceled
from outbox_broker.schedule.schedule_search import CoveredTopics, ScheduleSearch
from outbox_broker.schedule.sorted_run import topic_hash
from outbox_core.messages.message import CancelStatus


@dataclass(slots=True)
class CancelResult:
    """Result of cancels: the status of each, the topics on which each id is canceled, and the position in the log."""

    statuses: list[CancelStatus]
    topics: dict[str, set[str]]
    place: Place


class Cancellation:
    """Decides on cancels, and writes them to the log."""

    def __init__(self, context: ScheduleContext, search: ScheduleSearch) -> None:
        self._context = context
        self._search = search

    def stop(
        self, ids: Sequence[str], *, now_ms: int, scope: Scope = None, late: Container[str] = ()
    ) -> CancelResult:  # fmt: skip
        """Cancel without waiting for the disk: durable once the log is committed up to the returned place. For ids in
        `late` the caller knows of a delivered message within the scope. Raises StorageFailed.
        """
        with self._context.lock:
            self._context.refuse_if_closed()
            record = ScheduleCanceled(now_ms, [], [], [], {}, [], scope)
            covered = CoveredTopics(scope, self._context.state.topics)
            stopped = CancelResult([], {}, self._context.log.end)
            decided: dict[str, CancelStatus] = {}
            for one in dict.fromkeys(ids):
                decided[one], stopped.topics[one] = self._decide_cancel(
                    one, record, covered=covered, is_late=one in late
                )
            stopped.statuses.extend(decided[one] for one in ids)
            if record.stopped or record.early:
                stopped.place = self._context.act(record)
            return stopped

    def _decide_cancel(
        self, message_id: str, record: ScheduleCanceled, *, covered: CoveredTopics, is_late: bool
    ) -> tuple[CancelStatus, set[str]]:
        """Decide one cancel: this id may be waiting, canceled, delivered, or unknown. Also returns the topics on which
        it is canceled.
        """
        remembered = self._context.state.canceled
        canceled = remembered.topics(message_id, covered.scope)
        # A repeated cancel holds as long as a first one: otherwise it is answered as remembered and forgotten at once.
        for topic in remembered.renewable(message_id, covered.scope, before_ms=record.at_ms - CANCEL_RENEWED_MS):
            record.stopped.append(message_id)
            record.stopped_topics.append(topic)
        places, fired = self._search.places(message_id, covered, canceled=canceled)
        for topic, some in places.items():
            alive = [one for one in some if one is None or not one.run.is_gone(one.index)]
            # Gone and not dispatched: canceled so long ago that the cancel is forgotten. The clock proves nothing here.
            if not alive and (topic_hash(topic) in fired or any(one and one.has_fired for one in some)):
                is_late = True
                continue
            record.marks.extend((one.run.id, one.index) for one in alive if one is not None)
            if alive:
                record.topics[topic] = record.topics.get(topic, 0) + len(alive)
            if topic not in canceled:
                canceled.add(topic)
                record.stopped.append(message_id)
                record.stopped_topics.append(topic)
        if canceled:
            return CancelStatus.CANCELED, canceled
        if is_late or covered.has_any(fired):
            return CancelStatus.TOO_LATE, canceled
        if not remembered.awaits(message_id, covered.scope, since_ms=record.at_ms - CANCEL_RENEWED_MS):
            record.early.append(message_id)
        return CancelStatus.UNKNOWN, canceled
