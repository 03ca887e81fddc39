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
from collections.abc import Sequence
from typing import Self

from broker.delay.batch import Batch
from broker.delay.core import DelayOptions
from broker.delay.keeping import Keeping
from broker.delay.merging import Piece
from broker.delay.records import FROM_MEMORY, Canceled, Fired, Handed, Part, Scheduled
from broker.delay.run import DUE, Entry, Timed
from broker.delay.run_reader import RunDamaged
from broker.delay.schedule_log import Place
from broker.delay.searching import Searching
from broker.delay.segment_store import SegmentStore
from broker.delay.wheel import Taken
from messaging.errors import StorageFailed
from messaging.limits import DELAY_MAX_MS
from messaging.message import CancelStatus, PublishStatus

__all__ = ["Batch", "DelayOptions", "DelayStore", "Timed"]


class DelayStore(Keeping, Searching):
    """One schedule on one segment store. All methods may be called from any thread; times are UTC milliseconds.

    Its owner calls due() and fired() as time passes, and maintain() whenever there is nothing due.
    """

    @classmethod
    def open(cls, store: SegmentStore, *, options: DelayOptions | None = None) -> Self:
        """Recover the schedule that is in the store. The store stays its caller's to close.

        Raises StorageFailed, or SegmentDamaged where the log itself is.
        """
        schedule = cls(store, options or DelayOptions())
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

    def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[CancelStatus]:
        """Cancel, durably; an unknown id is remembered, and its message, should it come yet, is not delivered."""
        statuses, place = self.stop(ids, now_ms=now_ms)
        self.commit(place)
        return statuses

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

    def stop(self, ids: Sequence[str], *, now_ms: int) -> tuple[list[CancelStatus], Place]:
        """cancel() without waiting for the disk, as put() is to schedule()."""
        with self._lock:
            self._refuse_if_closed()
            statuses, record = self._decide_cancels(ids, now_ms=now_ms)
            place = self._act(record) if record.stopped or record.early else self._log.place
            return statuses, place

    def commit(self, place: Place | None = None) -> None:
        """Return once everything up to a place (all, by default) is durable."""
        self._log.commit(place)

    def due(self, now_ms: int) -> Batch | None:
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

    def unsettled(self) -> list[Batch]:
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
                self._act(Fired(number, entries))
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

    # -- taking in ---------------------------------------------------------------------------------------------------

    def _decide(self, batch: Sequence[Timed], *, now_ms: int) -> tuple[list[PublishStatus], Scheduled]:
        state = self._state
        entries: list[Entry] = []
        dead: list[str] = []
        statuses: list[PublishStatus] = []
        pending, passed, canceled, seq = state.pending, state.passed, state.canceled, state.next_seq
        seen: set[str] = set()
        latest_ms = now_ms + DELAY_MAX_MS
        ids = [one.id for one in batch]
        if batch and max(map(DUE, batch)) <= latest_ms and self._are_new(ids):
            return [PublishStatus.STORED] * len(batch), Scheduled(_entries(batch, first_seq=seq), dead)
        for one in batch:
            message_id = one.id
            if one.due_ms > latest_ms:
                statuses.append(PublishStatus.REJECTED)
            elif message_id in canceled:
                is_repeat = message_id in seen or canceled.has_stopped(message_id)
                statuses.append(PublishStatus.DUPLICATE if is_repeat else PublishStatus.STORED)
                if not is_repeat:
                    seen.add(message_id)
                    dead.append(message_id)
            elif message_id in pending or message_id in passed or message_id in seen or self._are_recent([message_id]):
                statuses.append(PublishStatus.DUPLICATE)
            else:
                seen.add(message_id)
                entries += _entries([one], first_seq=seq)
                seq += 1
                statuses.append(PublishStatus.STORED)
        return statuses, Scheduled(entries, dead)

    def _are_new(self, ids: list[str]) -> bool:
        """Whether nothing is known of any of them, nor is any twice among them: the usual case, decided in one go."""
        state = self._state
        return (
            len(set(ids)) == len(ids)
            and state.pending.keys().isdisjoint(ids)
            and state.passed.keys().isdisjoint(ids)
            and not state.canceled.has_any(ids)
            and not self._are_recent(ids)
        )

    def _decide_cancels(self, ids: Sequence[str], *, now_ms: int) -> tuple[list[CancelStatus], Canceled]:
        state = self._state
        record = Canceled(now_ms, [], [], [], {})
        decided: dict[str, CancelStatus] = {}
        topics: Counter[str] = Counter()
        for message_id in dict.fromkeys(ids):
            if message_id in state.canceled:
                known = state.canceled.has_stopped(message_id)
                decided[message_id] = CancelStatus.CANCELED if known else CancelStatus.UNKNOWN
            elif message_id in state.pending:
                decided[message_id] = CancelStatus.CANCELED
                topics[state.pending[message_id].topic] += 1
                record.stopped.append(message_id)
            elif message_id in state.passed:
                decided[message_id] = CancelStatus.TOO_LATE
            else:
                decided[message_id] = self._decide_standing(message_id, record, topics)
        record.topics.update(topics)
        return [decided[message_id] for message_id in ids], record

    def _decide_standing(self, message_id: str, record: Canceled, topics: Counter[str]) -> CancelStatus:
        """What becomes of the cancel of a message that is in a bucket, was in one, or never came."""
        standing, has_fired = self._standing(message_id)
        for one in standing:
            if not one.run.is_gone(one.index):
                topics[one.topic] += 1
                record.marks.append((one.run.id, one.index))
        is_gone = all(one.run.is_gone(one.index) for one in standing)
        # Gone and not fired: canceled so long ago that it is forgotten. What the clock says proves nothing.
        has_fired = has_fired or any(one.has_fired(record.at_ms) for one in standing)
        if standing and not (is_gone and has_fired):
            record.stopped.append(message_id)
            return CancelStatus.CANCELED
        if has_fired:
            return CancelStatus.TOO_LATE
        record.early.append(message_id)
        return CancelStatus.UNKNOWN

    # -- handing out -------------------------------------------------------------------------------------------------

    def _take(self, now_ms: int) -> Batch | None:
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
            self._act(Fired(batch.number))  # all of them were canceled

    def _hand_out(self, taken: Taken, batch: Batch) -> None:
        parts, ids = [_part(part) for part in taken.parts], [entry.id for entry in taken.entries]
        try:
            self._act(Handed(batch.number, parts, ids, Counter(batch.topics)))
        except StorageFailed:
            self._rebuild_wheel()  # nothing was handed out
            raise

    def _batch(self, taken: Taken, *, number: int) -> Batch:
        """All that was taken and not canceled, in order: its parts come lane by lane."""
        batch = Batch(number)
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

    def _hand_again(self) -> Batch:
        """A batch that was out when the schedule was last closed, or killed: the same once more."""
        out = self._state.hand_outs[self._again[0]]
        taken = Taken()
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
