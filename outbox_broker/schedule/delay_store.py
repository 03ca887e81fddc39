"""The schedule: messages in until two years ahead, out when they are due, canceled or delivered, never early.

Everything durable is in a segment store, of whatever kind. A message is written to the log, which is synced before the
answer; from memory it is flushed to a bucket with many others, re-filed into finer buckets as its time comes nearer
(levels), and handed out when it is due (wheel). It knows nothing of topics' consumers, of HTTP or of the clock.

Guarantees, each kept across a kill or a power cut at any point:
- scheduled() as stored: delivered, unless canceled; handed out at its due time or later.
- a batch that was handed out and not settled by fired() is handed out again after a restart, the same batch.
- cancel() says canceled: never handed out. too_late: it was, or is about to be, delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Self

from outbox_broker.common.cancel_scope import Scope
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.schedule.bucket_keeper import Keeping
from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.due_queue import TakenMessages
from outbox_broker.schedule.run_merge import Piece
from outbox_broker.schedule.schedule_log import Place
from outbox_broker.schedule.schedule_records import (
    FROM_MEMORY,
    BatchFired,
    BatchHanded,
    Part,
    ScheduleCanceled,
    Scheduled,
)
from outbox_broker.schedule.schedule_search import Covered, Searching
from outbox_broker.schedule.segment_store import SegmentStore
from outbox_broker.schedule.sorted_run import DUE, ID, TOPIC, UNKNOWN_TOPIC, Entry, Timed, topic_hash
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.limits import DELAY_MAX_MS
from outbox_core.messages.message import CancelStatus, PublishStatus

__all__ = ["DelayOptions", "DelayStore", "DueBatch", "Timed"]


@dataclass(slots=True)
class Stopped:
    """What became of cancels: the status of each, the topics on which each id is canceled, and the log's place."""

    statuses: list[CancelStatus]
    topics: dict[str, set[str]]
    place: Place


class DelayStore(Keeping, Searching):
    """One schedule on one segment store. All methods may be called from any thread; times are UTC milliseconds.

    Its owner calls due() and fired() as time passes, and maintain() whenever there is nothing due.
    """

    @classmethod
    def open(
        cls, store: SegmentStore, *, options: DelayOptions | None = None, reserve: Reserve | None = None
    ) -> Self:  # fmt: skip
        """Recover the schedule that is in the store. The store stays its caller's to close.

        `reserve`: room that is kept, where the store is on a disk, for all but new messages. Raises StorageFailed, or
        SegmentDamaged where the log itself is.
        """
        schedule = cls(store, options or DelayOptions(), reserve)
        schedule._recover()
        schedule._open_index()
        return schedule

    def schedule(self, batch: Sequence[Timed], *, now_ms: int) -> list[PublishStatus]:
        """Take messages in; one status each, in order, once they are durable. Rejected: more than 731 days ahead.

        A due time in the past means now. An id that came lately is a duplicate; one that was canceled before it came
        is stored, and never delivered. Raises StorageFailed with nothing stored.
        """
        self.make_room(now_ms)
        statuses, place = self.put(batch, now_ms=now_ms)
        self.commit(place)
        return statuses

    def cancel(self, ids: Sequence[str], *, now_ms: int, scope: Scope = None) -> list[CancelStatus]:
        """Cancel what has these ids on the topics of a scope, durably. Where there is none, the cancel is remembered,
        and what comes yet under the id within the scope is not delivered.
        """
        stopped = self.stop(ids, now_ms=now_ms, scope=scope)
        self.commit(stopped.place)
        return stopped.statuses

    def put(self, batch: Sequence[Timed], *, now_ms: int) -> tuple[list[PublishStatus], Place]:
        """schedule() without waiting for the disk: durable, and to be answered, once commit() of the place returns.

        For callers that hold a lock of their own; they call make_room() before they take it.
        """
        with self._lock:
            self._refuse_if_closed()
            statuses, record = self._decide(batch, now_ms=now_ms)
            place = self._log.place
            if record.entries or record.dead:
                place = self._act(record)
                self._remember(record.entries)
            return statuses, place

    def stop(
        self, ids: Sequence[str], *, now_ms: int, scope: Scope = None, late: Container[str] = ()
    ) -> Stopped:  # fmt: skip
        """cancel() without waiting for the disk, as put() is to schedule(). Of those that are `late`, the caller knows
        a message within the scope that was delivered.
        """
        with self._lock:
            self._refuse_if_closed()
            record, covered = ScheduleCanceled(now_ms, [], [], [], {}, [], scope), Covered(scope, self._state.topics)
            stopped = Stopped([], {}, self._log.place)
            decided: dict[str, CancelStatus] = {}
            for one in dict.fromkeys(ids):
                decided[one], stopped.topics[one] = self._decide_cancel(
                    one, record, covered=covered, is_late=one in late
                )
            stopped.statuses.extend(decided[one] for one in ids)
            if record.stopped or record.early:
                stopped.place = self._act(record)
            return stopped

    def commit(self, place: Place | None = None) -> None:
        """Return once everything up to a place (all, by default) is durable."""
        self._log.commit(place)

    def due(self, now_ms: int) -> DueBatch | None:
        """What is due now and was not handed out yet, a batch of it; None where nothing is, or too much is out.

        That it is handed out is durable before it is: no cancel wins after that.
        """
        with self._lock:
            self._refuse_if_closed()
            if self._again:
                return self._hand_again()
            if len(self._state.hand_outs) >= self._options.hand_outs_max:
                return None
            self._advance(now_ms)
            batch = self._take(now_ms)
            self._look_ahead()
            place = self._log.place
        if batch is not None:
            self._log.commit(place)
        return batch

    def unsettled(self) -> list[DueBatch]:
        """The batches that were out when the schedule was last closed, or killed. due() then hands them out no more."""
        with self._lock:
            self._refuse_if_closed()
            return [self._hand_again() for _ in range(len(self._again))]

    def is_due(self, now_ms: int) -> bool:
        """Whether due() may have something. Waits for nobody."""
        return bool(self._again) or self._soonest_ms <= now_ms

    def soonest_ms(self) -> int:
        """A time before which nothing is due, as far as is known without waiting for anybody."""
        return self._soonest_ms

    def fired(self, number: int, *, again: Sequence[Timed] = ()) -> None:
        """A batch was delivered, but for those that are to be tried `again`, at the due times given with them.

        Durable with the next thing that is. A batch that is not out is passed over.
        """
        with self._lock:
            self._refuse_if_closed()
            if number in self._state.hand_outs:
                seq = self._state.next_seq
                entries = _entries(again, first_seq=seq)
                self._act(BatchFired(number, entries))
                self._remember(entries)

    def check_ready(self) -> None:
        """Raise StorageFailed where nothing can be made durable."""
        with self._lock:
            self._refuse_if_closed()
        self._log.check_ready()

    def close(self) -> None:
        """Take nothing any more; idempotent. What is in memory is in the log too."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._log.commit()
        self._log.seal()

    # -- taking in ---------------------------------------------------------------------------------------------------

    def _decide(self, batch: Sequence[Timed], *, now_ms: int) -> tuple[list[PublishStatus], Scheduled]:
        state = self._state
        entries: list[Entry] = []
        dead: list[Timed] = []
        statuses: list[PublishStatus] = []
        canceled, seq = state.canceled, state.next_seq
        seen: set[tuple[str, str]] = set()
        latest_ms = now_ms + DELAY_MAX_MS
        ids = [one.id for one in batch]
        is_plain = batch and max(map(DUE, batch)) <= latest_ms and len(set(ids)) == len(ids)
        if is_plain and not self.may_know(ids, map(TOPIC, batch)):
            return [PublishStatus.STORED] * len(batch), Scheduled(_entries(batch, first_seq=seq), [], [])
        for one in batch:
            topic, message_id = place = one.topic, one.id
            is_repeat = place in seen or canceled.has_stopped(topic, message_id)
            if one.due_ms > latest_ms:
                statuses.append(PublishStatus.REJECTED)
            elif not is_repeat and canceled.will_stop(topic, message_id):
                statuses.append(PublishStatus.STORED)
                seen.add(place)
                dead.append(one)
            elif is_repeat or state.known.get(topic, message_id) is not None or self._is_recent(topic, message_id):
                statuses.append(PublishStatus.DUPLICATE)
            else:
                seen.add(place)
                entries += _entries([one], first_seq=seq)
                seq += 1
                statuses.append(PublishStatus.STORED)
        return statuses, Scheduled(entries, list(map(ID, dead)), list(map(TOPIC, dead)))

    def _decide_cancel(
        self, message_id: str, record: ScheduleCanceled, *, covered: Covered, is_late: bool
    ) -> tuple[CancelStatus, set[str]]:
        """What becomes of a cancel: of what waits under this id, was canceled, was delivered, or never came. And the
        topics on which it is canceled.
        """
        remembered = self._state.canceled
        canceled = remembered.topics(message_id, covered.scope)
        places, fired = self._places(message_id, covered, canceled=canceled)
        for topic, some in places.items():
            alive = [one for one in some if one is None or not one.run.is_gone(one.index)]
            # Gone and not fired: canceled so long ago that it is forgotten. What the clock says proves nothing.
            if not alive and (fired & {topic_hash(topic), UNKNOWN_TOPIC} or any(one and one.has_fired for one in some)):
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
        if not remembered.awaits(message_id, covered.scope):
            record.early.append(message_id)
        return CancelStatus.UNKNOWN, canceled

    # -- handing out -------------------------------------------------------------------------------------------------

    def _take(self, now_ms: int) -> DueBatch | None:
        """Take a batch out of the wheel, and write down that it is handed out."""
        while True:
            try:
                taken = self._wheel.take(
                    now_ms,
                    count_max=self._options.batch_messages_max,
                    bytes_max=self._options.batch_bytes_max,
                    is_alive=self._state.is_alive,
                )
                batch = self._batch(taken, number=self._state.next_batch)
            except RunDamaged as damage:
                self._quarantine(damage)
                self._advance(now_ms)
                continue
            except StorageFailed:
                self._rebuild_wheel()  # what was taken already is not handed out
                raise
            if not taken.parts:
                return None
            self._hand_out(taken, batch)
            if len(batch):
                return batch
            self._act(BatchFired(batch.number))  # all of them were canceled

    def _hand_out(self, taken: TakenMessages, batch: DueBatch) -> None:
        try:
            self._act(BatchHanded(batch.number, [_part(part) for part in taken.parts], [], Counter(batch.topics)))
        except StorageFailed:
            self._rebuild_wheel()  # nothing was handed out
            raise

    def _batch(self, taken: TakenMessages, *, number: int) -> DueBatch:
        """All that was taken and not canceled, in order: its parts come lane by lane."""
        batch = DueBatch(number)
        for part in taken.parts:
            if isinstance(part, Entry):
                batch.add_entry(part)
            else:
                run = part.run
                columns, stored = self._reader.columns(run), self._reader.messages(run)
                batch.add_piece(columns, stored, gone=run.gone, start=part.start, stop=part.stop)
        if taken.is_mixed:
            batch.sort()
        return batch

    def _hand_again(self) -> DueBatch:
        """A batch that was out when the schedule was last closed, or killed: the same once more."""
        out = self._state.hand_outs[self._again[0]]
        taken = TakenMessages()
        for run_id, start, stop in out.parts:
            if run_id == FROM_MEMORY:
                taken.add(out.entries[start])
            else:
                run = self._state.run(run_id)[1]
                if not run.is_unreadable:
                    taken.add(Piece(run, start, stop))
        try:
            batch = self._batch(taken, number=out.batch)
        except RunDamaged as damage:
            self._quarantine(damage)
            return self._hand_again()
        self._again.popleft()
        return batch


def _entries(batch: Sequence[Timed], *, first_seq: int) -> list[Entry]:
    """Messages that come, in order of arrival. One that was due before 1970 is due in 1970."""
    return [
        Entry(max(0, one.due_ms), seq, one.id, one.topic, one.payload)
        for seq, one in enumerate(batch, first_seq)
    ]  # fmt: skip


def _part(part: Piece | Entry) -> Part:
    if isinstance(part, Entry):
        return (FROM_MEMORY, part.seq, 0)
    return (part.run.id, part.start, part.stop)
