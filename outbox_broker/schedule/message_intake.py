"""Accepts messages into the schedule: decides which are stored, duplicates, or canceled in advance."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.recent_message_ids import RecentMessageIds
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_log import Place
from outbox_broker.schedule.schedule_records import Scheduled
from outbox_broker.schedule.sorted_run import DUE, ID, TOPIC, Entry, TimedMessage, new_entries
from outbox_core.messages.limits import DELAY_ACCEPTED_MS_MAX
from outbox_core.messages.message import PublishStatus


class MessageIntake:
    """Decides on arriving messages, and writes them to the log."""

    def __init__(self, context: ScheduleContext, *, horizon: DueSoon, recent: RecentMessageIds) -> None:
        self._context = context
        self._horizon = horizon
        self._recent = recent

    def put(self, batch: Sequence[TimedMessage], *, now_ms: int) -> tuple[list[PublishStatus], Place]:
        """Store messages without waiting for the disk; returns one status each, in order, and the log position that
        must be committed before they are acknowledged. Raises StorageFailed with nothing stored.
        """
        with self._context.lock:
            self._context.refuse_if_closed()
            statuses, record = self._decide(batch, now_ms=now_ms)
            place = self._context.log.end
            if record.entries or record.dead:
                place = self._context.act(record)
                self._horizon.add(record.entries)
            return statuses, place

    def _decide(self, batch: Sequence[TimedMessage], *, now_ms: int) -> tuple[list[PublishStatus], Scheduled]:
        state = self._context.state
        entries: list[Entry] = []
        dead: list[TimedMessage] = []
        statuses: list[PublishStatus] = []
        canceled, seq = state.canceled, state.next_seq
        seen: set[tuple[str, str]] = set()
        latest_ms = now_ms + DELAY_ACCEPTED_MS_MAX
        ids = [one.id for one in batch]
        is_plain = batch and max(map(DUE, batch)) <= latest_ms and len(set(ids)) == len(ids)
        if is_plain and not self._recent.may_know(ids, map(TOPIC, batch)):
            return [PublishStatus.STORED] * len(batch), Scheduled(new_entries(batch, first_seq=seq), [], [])
        for one in batch:
            topic, message_id = place = one.topic, one.id
            is_repeat = place in seen or canceled.has_stopped(topic, message_id)
            if one.due_ms > latest_ms:
                statuses.append(PublishStatus.REJECTED)
            elif not is_repeat and canceled.will_stop(topic, message_id):
                statuses.append(PublishStatus.STORED)
                seen.add(place)
                dead.append(one)
            elif is_repeat or state.known.get(topic, message_id) is not None or self._recent.has(topic, message_id):
                statuses.append(PublishStatus.DUPLICATE)
            else:
                seen.add(place)
                entries += new_entries([one], first_seq=seq)
                seq += 1
                statuses.append(PublishStatus.STORED)
        return statuses, Scheduled(entries, list(map(ID, dead)), list(map(TOPIC, dead)))
