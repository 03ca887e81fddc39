"""The schedule: stores messages up to two years ahead, and dispatches them when due unless canceled, never early.

All durable data is in segments, on any medium. A message is written to a log (arrivals), which is synced before
the response; from memory it is flushed to a bucket with many others, re-filed into finer buckets as its time comes
nearer (levels), and dispatched when it is due (due_soon). Consumers, HTTP and the clock are outside.
Below is what happens to a message, in order: it arrives, may be canceled, is dispatched in a batch, which is settled.
What is asked about messages is in schedule_queries, and what is done beside in schedule_housekeeping.
Guarantees, each across a kill or a power failure at any point:
- schedule() returned stored: delivered, unless canceled; dispatched at its due time or later.
- a batch that was dispatched and not settled by fired() is dispatched again after a restart, the same batch.
- cancel() returned canceled: never dispatched. too_late: it was, or is about to be, delivered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, Self

from outbox_broker.common.cancel_topic_patterns import Scope
from outbox_broker.journal.journal import CHECKPOINTS_KEPT, Journal
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.schedule.arrivals import ArrivalLog, ArrivalsInOrder
from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.due_queue import Piece, TakenMessages
from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.recent_cancels import CANCEL_RENEWED_MS
from outbox_broker.schedule.recent_message_ids import RecentMessageIds
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_housekeeping import IDS_PREFIX, Housekeeping
from outbox_broker.schedule.schedule_log import (
    CONTINUED_MAX,
    FIRST_CHECKPOINT_BYTES_MAX,
    PREFIX,
    Place,
    filed,
    records_of,
)
from outbox_broker.schedule.schedule_queries import CoveredTopics, ScheduleQueries
from outbox_broker.schedule.schedule_records import (
    FROM_MEMORY,
    BatchFired,
    BatchFiredInPart,
    BatchHanded,
    Part,
    ScheduleCanceled,
    ScheduleCheckpoint,
    Scheduled,
    arrivals_before,
)
from outbox_broker.schedule.schedule_state import ScheduleHandOut
from outbox_broker.schedule.sorted_run import DUE, ID, TOPIC, Entry, TimedMessage, new_entries, topic_hash
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_broker.segments.port import Segments
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.limits import DELAY_ACCEPTED_MS_MAX
from outbox_core.messages.message import CancelStatus, PublishStatus

__all__ = ["BatchClaim", "CancelResult", "DelayOptions", "DelayStore", "DueBatch", "TimedMessage"]

_NO_BATCH: Final = 0
"""No batch has this number: to settle it changes nothing, and proves that this process can still write."""


@dataclass(slots=True)
class CancelResult:
    """Result of cancels: the status of each, the topics on which each id is canceled, and the position in the log."""

    statuses: list[CancelStatus]
    topics: dict[str, set[str]]
    place: Place


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """A batch whose dispatch is in the log, and durable once commit() has returned: from then on it may leave. If
    commit() raises, a later claim returns the batch again.
    """

    batch: DueBatch
    commit: Callable[[], None]


class DelayStore:
    """One schedule on the segments of one owner. Thread-safe; times are UTC milliseconds.

    The owner calls due() and fired() as time passes, and housekeeping.step() when nothing is due. `queries` finds and
    counts what is scheduled; `recent` knows which messages have arrived.

    A batch whose dispatch is in the log is in one of two places until it is settled: with the caller of due() or
    unsettled(), or in the queue of batches that due() returns again. Messages that were taken from the due queue, and
    whose dispatch is not in the log, are in the due queue again. Both hold whatever error ends a call.
    """

    def __init__(self, context: ScheduleContext) -> None:
        """Recover the schedule from the context's segments, which must have no other user. Raises as open() does."""
        self._context = context
        self._horizon = DueSoon(context)
        self.recent = RecentMessageIds(context)
        self.queries = ScheduleQueries(context, self._horizon)
        self.housekeeping = Housekeeping(context, horizon=self._horizon, recent=self.recent)
        self._claimed: dict[int, Counter[str]] = {}
        """The topics of the batches that were claimed since the start, and are not settled."""
        segments, unnamed_pieces = _recover_state(context)
        # Those that were unsettled when the schedule was last closed, or killed, come again ahead of others.
        self._again: deque[int] = deque(sorted(context.state.hand_outs))
        self._horizon.rebuild()
        self.housekeeping.open(segments, unnamed_pieces=unnamed_pieces)

    @classmethod
    def open(
        cls, segments: Segments, *, options: DelayOptions | None = None, reserve: Reserve | None = None,
        arrivals: ArrivalLog | None = None,
    ) -> Self:  # fmt: skip
        """Recover the schedule from its segments. Closing them stays the caller's task.

        `reserve`: disk space withheld from new messages, if the segments are on a disk. `arrivals`: where messages
        arrive, if not in the schedule's own log. Raises StorageFailed, or SegmentDamaged if the log itself is damaged.
        """
        return cls(ScheduleContext(segments, options=options, reserve=reserve, arrivals=arrivals))

    # -- arrivals ----------------------------------------------------------------------------------------------------

    def schedule(self, batch: Sequence[TimedMessage], *, now_ms: int) -> list[PublishStatus]:
        """Schedule messages; returns one status each, in order, once they are durable. Rejected: more than 731 days
        ahead.

        A due time in the past means now. A recent id is a duplicate; a message that was canceled before it arrived is
        reported as stored, and never delivered. Raises StorageFailed with nothing stored.
        """
        self.housekeeping.make_room(now_ms, fill=1)
        statuses, place = self.put(batch, now_ms=now_ms)
        self.commit_arrivals(place)
        return statuses

    def put(self, batch: Sequence[TimedMessage], *, now_ms: int) -> tuple[list[PublishStatus], Place]:
        """Like schedule(), without waiting for the disk: durable, and to be answered, once commit_arrivals() of the
        place returns.

        For callers that hold a lock of their own; they must call housekeeping.make_room() before taking it.
        """
        context = self._context
        with context.lock:
            context.refuse_if_closed()
            statuses, entries, dead = self._decide_arrivals(batch, now_ms=now_ms)
            if dead:
                context.log.commit()  # the cancels: a power failure must not take these, and leave what they stopped
            if entries or dead:
                context.arrivals.append(entries, dead, at_ms=now_ms)
                context.state.apply(Scheduled(entries, list(map(ID, dead)), list(map(TOPIC, dead))))
                self._horizon.add(entries)
            return statuses, context.arrivals.end

    def _decide_arrivals(
        self, batch: Sequence[TimedMessage], *, now_ms: int
    ) -> tuple[list[PublishStatus], list[Entry], list[TimedMessage]]:
        """Decide which messages are stored, duplicates, or canceled in advance; returns the status of each, the first
        as entries, and the last.
        """
        state, recent = self._context.state, self.recent
        entries: list[Entry] = []
        dead: list[TimedMessage] = []
        statuses: list[PublishStatus] = []
        canceled, seq = state.canceled, state.next_seq
        seen: set[tuple[str, str]] = set()
        latest_ms = now_ms + DELAY_ACCEPTED_MS_MAX
        ids = [message.id for message in batch]
        is_plain = batch and max(map(DUE, batch)) <= latest_ms and len(set(ids)) == len(ids)
        if is_plain and not recent.may_know(ids, map(TOPIC, batch)):
            return [PublishStatus.STORED] * len(batch), new_entries(batch, first_seq=seq), []
        for message in batch:
            topic, message_id = identity = message.topic, message.id
            is_repeat = identity in seen or canceled.has_stopped(topic, message_id)
            if message.due_ms > latest_ms:
                statuses.append(PublishStatus.REJECTED)
            elif not is_repeat and canceled.will_stop(topic, message_id):
                statuses.append(PublishStatus.STORED)
                seen.add(identity)
                dead.append(message)
            elif is_repeat or state.known.get(topic, message_id) is not None or recent.has(topic, message_id):
                statuses.append(PublishStatus.DUPLICATE)
            else:
                seen.add(identity)
                entries += new_entries([message], first_seq=seq)
                seq += 1
                statuses.append(PublishStatus.STORED)
        return statuses, entries, dead

    # -- cancels -----------------------------------------------------------------------------------------------------

    def cancel(self, ids: Sequence[str], *, now_ms: int, scope: Scope = None) -> list[CancelStatus]:
        """Cancel the messages with these ids on the topics of a scope, durably. If there is none, the cancel is
        remembered, and a message that arrives later under the id within the scope is not delivered.
        """
        stopped = self.stop(ids, now_ms=now_ms, scope=scope)
        self.commit(stopped.place)
        return stopped.statuses

    def stop(
        self, ids: Sequence[str], *, now_ms: int, scope: Scope = None, late: Container[str] = ()
    ) -> CancelResult:  # fmt: skip
        """Like cancel(), without waiting for the disk, as put() is to schedule(). For ids in `late` the caller knows of
        a delivered message within the scope. Raises StorageFailed.
        """
        with self._context.lock:
            self._context.refuse_if_closed()
            record = ScheduleCanceled(now_ms, [], [], [], {}, [], scope)
            covered = CoveredTopics(scope, self._context.state.topics)
            stopped = CancelResult([], {}, self._context.log.end)
            decided: dict[str, CancelStatus] = {}
            for message_id in dict.fromkeys(ids):
                decided[message_id], stopped.topics[message_id] = self._decide_cancel(
                    message_id, record, covered=covered, is_late=message_id in late
                )
            stopped.statuses.extend(decided[message_id] for message_id in ids)
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
        locations, fired = self.queries.locations(message_id, covered, canceled=canceled)
        for topic, some in locations.items():
            alive = [location for location in some if location is None or not location.run.is_gone(location.index)]
            # Gone and not dispatched: canceled so long ago that the cancel is forgotten. The clock proves nothing here.
            if not alive and (topic_hash(topic) in fired or any(location and location.has_fired for location in some)):
                is_late = True
                continue
            marks = [(location.run.id, location.index) for location in alive if location is not None]
            record.marks.extend(marks)
            if marks:
                record.topics[topic] = record.topics.get(topic, 0) + len(marks)
            known = self._context.state.known.get(topic, message_id) if len(marks) < len(alive) else None
            if known is not None:
                record.arrivals.append(known.seq)
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

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def is_due(self, now_ms: int) -> bool:
        """Returns whether due() may have something. Takes no lock."""
        return self.soonest_ms() <= now_ms

    def soonest_ms(self) -> int:
        """Returns a time before which nothing is due, as far as is known without a lock."""
        return 0 if self._again else self._horizon.soonest_ms

    def due(self, now_ms: int) -> DueBatch | None:
        """Returns a batch of due messages that were not dispatched yet; None if there are none, or too many batches are
        unsettled.

        The dispatch is durable before this returns: a cancel is too late after that.
        """
        claim = self.claim(now_ms)
        if claim is None:
            return None
        claim.commit()
        return claim.batch

    def claim(self, until_ms: int) -> BatchClaim | None:
        """Like due(), for messages that are due by a time that may be ahead, without waiting for the disk: they may
        leave once the claim is committed, each when it is due. A cancel is too late from the claim on. Batches that
        were unsettled come first, whatever the time: they may have been claimed ahead, too.
        """
        with self._context.lock:
            self._context.refuse_if_closed()
            batch = self._hand_again()
            if batch is None and len(self._context.state.hand_outs) < self._context.options.hand_outs_max:
                batch = self._hand_next(until_ms)
            place = self._context.log.end
        return None if batch is None else BatchClaim(batch, lambda: self._commit_claim(batch, place))

    def unsettled(self) -> list[DueBatch]:
        """Returns the batches left unsettled by the last close or kill; due() skips them from then on.

        For an owner that nobody can replace. It writes nothing, so that a schedule opens on a full disk.
        """
        batches: list[DueBatch] = []
        with self._context.lock:
            self._context.refuse_if_closed()
            while (batch := self._next_again()) is not None:
                self._again.popleft()
                batches.append(batch)
        return batches

    def count_undelivered(self, topic: str, *, after: int = -1) -> int:
        """Returns how many messages of a topic are scheduled, or in batches behind this number that are not settled."""
        with self._context.lock:
            claimed = (topics[topic] for batch_number, topics in self._claimed.items() if batch_number > after)
            return self._context.state.topics[topic] + sum(claimed)

    def _commit_claim(self, batch: DueBatch, place: Place) -> None:
        """Make the dispatch of a batch durable; if that fails it was returned to nobody, and comes again."""
        try:
            self._context.log.commit(place)
        except BaseException:
            with self._context.lock:
                self._again.appendleft(batch.number)
            raise

    def _hand_next(self, now_ms: int) -> DueBatch | None:
        self._horizon.advance(now_ms)
        try:
            batch = self._take(now_ms)
        except BaseException:
            self._horizon.rebuild()  # what was taken from the queue may not be dispatched
            raise
        self._horizon.update_soonest()
        return batch

    def _take(self, now_ms: int) -> DueBatch | None:
        """Take a batch from the due queue, and log its dispatch."""
        while True:
            try:
                taken = self._horizon.take(now_ms)
                batch = self._batch(taken, number=self._context.state.next_batch)
            except RunDamaged as damage:
                self._horizon.quarantine(damage)
                self._horizon.advance(now_ms)
                continue
            if not taken.parts:
                return None
            parts = [_part(part) for part in taken.parts]
            topics = self._claimed[batch.number] = Counter(batch.topics)
            in_runs = topics - Counter(entry.topic for entry in taken.entries)
            self._context.act(BatchHanded(batch.number, parts, in_runs))
            if len(batch):
                return batch
            # All of it was canceled. If it cannot be settled now, the next call does so.
            self._again.append(batch.number)
            self._settle_first_of_again()

    def _settle_first_of_again(self) -> None:
        """Settle a batch without messages."""
        self._context.act(BatchFired(self._again[0]))
        self._claimed.pop(self._again.popleft(), None)

    def _batch(self, taken: TakenMessages, *, number: int) -> DueBatch:
        """Returns the messages taken that were not canceled, in order: parts arrive lane by lane."""
        batch = DueBatch(number)
        for part in taken.parts:
            if isinstance(part, Entry):
                batch.add_entry(part)
            else:
                run = part.run
                columns, stored = self._context.reader.columns(run), self._context.reader.messages(run)
                batch.add_piece(columns, stored, gone=run.gone, start=part.start, stop=part.stop)
        if taken.is_mixed:
            batch.sort()
        return batch

    def _hand_again(self) -> DueBatch | None:
        """Returns the next unsettled batch, and logs a record for it: a process that was replaced must learn so before
        it dispatches, and the dispatch itself was logged by an earlier one, perhaps ahead of the due time.
        """
        while (batch := self._next_again()) is not None:
            if len(batch):
                self._context.act(BatchFired(_NO_BATCH))
                self._again.popleft()
                return batch
            self._settle_first_of_again()
        return None

    def _next_again(self) -> DueBatch | None:
        """Returns the batch that was unsettled first when the schedule was last closed, or killed, with the same
        content; None if all of them were settled meanwhile.
        """
        while self._again:
            out = self._context.state.hand_outs.get(self._again[0])
            if out is None:
                self._again.popleft()
                continue
            try:
                batch = self._batch(self._taken_in(out), number=out.batch)
                if out.done:
                    batch = batch.without({index for index, seq in enumerate(batch.seqs) if seq in out.done})
                self._claimed[out.batch] = Counter(batch.topics)
                return batch
            except RunDamaged as damage:
                self._horizon.quarantine(damage)
        return None

    def _taken_in(self, out: ScheduleHandOut) -> TakenMessages:
        taken = TakenMessages()
        for run_id, start, stop in out.parts:
            if run_id == FROM_MEMORY:
                taken.add(out.entries[start])
            else:
                run = self._context.state.run(run_id)[1]
                if not run.is_unreadable:
                    taken.add(Piece(run, start, stop))
        return taken

    # -- settlement --------------------------------------------------------------------------------------------------

    def fired(self, number: int, *, again: Sequence[TimedMessage] = ()) -> None:
        """Settle a batch as delivered, except for messages to be dispatched `again` at the due times given with them.

        Durable with the next durable write. A batch that is not unsettled is ignored.
        """
        with self._context.lock:
            self._context.refuse_if_closed()
            if number in self._context.state.hand_outs:
                entries = new_entries(again, first_seq=self._context.state.next_seq)
                self._context.act(BatchFired(number, entries))
                self._claimed.pop(number, None)
                self._horizon.add(entries)

    def fired_in_part(self, number: int, *, done: Sequence[int], again: Sequence[TimedMessage] = ()) -> None:
        """Like fired() for those messages of a batch that arrived as `done`: the others stay unsettled, in their order.
        The caller may go on with them until the schedule is closed; opened anew, the batch comes again without these.
        """
        with self._context.lock:
            self._context.refuse_if_closed()
            if number in self._context.state.hand_outs:
                entries = new_entries(again, first_seq=self._context.state.next_seq)
                self._context.act(BatchFiredInPart(number, list(done), entries))
                self._horizon.add(entries)

    # -- the whole of it ---------------------------------------------------------------------------------------------

    def commit(self, place: Place | None = None) -> None:
        """Return once every change up to a place of the log (all, by default) is durable."""
        self._context.log.commit(place)

    def commit_arrivals(self, place: Place) -> None:
        """Return once every message is durable that arrived up to this place."""
        self._context.arrivals.commit(place)

    def next_seq(self) -> int:
        """Returns the arrival number of the next message."""
        with self._context.lock:
            return self._context.state.next_seq

    def skip_numbers(self, before: int) -> None:
        """Give no arrival number below this one any more."""
        with self._context.lock:
            self._context.state.next_seq = max(self._context.state.next_seq, before)

    def limit_memory(self, *, bytes_max: int, messages_max: int, log_bytes_max: int) -> None:
        """Change the limits of messages in memory, and of the log; what is above them is flushed by the next step of
        housekeeping, or call that makes room.
        """
        self._context.options = replace(
            self._context.options, memory_bytes_max=bytes_max, memory_messages_max=messages_max,
            log_bytes_max=log_bytes_max,
        )  # fmt: skip

    def check_ready(self) -> None:
        """Raise StorageFailed if nothing can be made durable. Takes no lock, which is held while runs are read: the
        contact of a node with ZooKeeper waits for this answer.
        """
        self._context.refuse_if_closed()
        self._context.segments.check()

    @property
    def log(self) -> Journal:
        """Where what waits, and what became of it, is written first."""
        return self._context.log

    def standing_still(self) -> AbstractContextManager[object]:
        """Returns the lock under which nothing is written to the log, and the state does not change. Held briefly."""
        return self._context.lock

    def close(self) -> None:
        """Refuse further calls; idempotent. What is in memory is in the log too."""
        with self._context.lock:
            if self._context.is_closed:
                return
            self._context.is_closed = True
        self._context.log.commit()
        self._context.log.seal()


def _part(part: Piece | Entry) -> Part:
    if isinstance(part, Entry):
        return (FROM_MEMORY, part.seq, 0)
    return (part.run.id, part.start, part.stop)


def _recover_state(context: ScheduleContext) -> tuple[set[str], list[str]]:
    """Rebuild the state from the log, and delete segments that it does not reference; returns all segments found, and
    of those that it does not reference the pieces of the id index.

    What is in buckets is not read.
    """
    recovered = context.log.recovered
    names = filed(context.segments)
    if not recovered.segments and context.arrivals.end:
        # Its first checkpoint was durable before anything arrived: without it, all that arrived would be due again.
        raise SegmentDamaged(
            f"all segments {PREFIX}* of the schedule are missing, and there is a log of what arrived: restore them "
            "from a copy; or empty the data folder, to begin anew"
        )
    if not recovered.end:
        # The first checkpoint was durable, alone, before anything else was written: to begin anew would lose all.
        for segment in recovered.segments:
            if names or context.segments.read(segment.name, FIRST_CHECKPOINT_BYTES_MAX, 1):
                raise SegmentDamaged(f"{segment.name}: all of it is damaged; restore {segment.name} from a copy")
        if names:
            raise SegmentDamaged(
                f"{min(names)} is there, and no log that says what is in it: restore the segments {PREFIX}* from a "
                "copy; or empty the store, to begin anew"
            )
    _replay(context)
    _resume(context)
    unnamed = sorted(names - {*context.state.segments()})
    # No record tells of a merge, only a checkpoint does: if the newest is found damaged, the one before it counts.
    index_pieces = [name for name in unnamed if name.startswith(IDS_PREFIX)]
    context.segments.delete([name for name in unnamed if name not in index_pieces])
    return names, index_pieces


def _replay(context: ScheduleContext) -> None:
    """Apply what the logs say: each change, once all that arrived before it was written is known."""
    recovered = context.log.recovered
    captured = 0 if recovered.checkpoint is None else recovered.checkpoint.captured
    arrived = ArrivalsInOrder(context.arrivals.since(0), next_number=1)
    for record in records_of(recovered):
        if isinstance(record, ScheduleCheckpoint):
            arrived = ArrivalsInOrder(context.arrivals.since(record.arrived_to), next_number=record.next_seq)
            context.note_checkpoint(captured, arrived_to=record.arrived_to)
        for messages in arrived.before(arrivals_before(record)):
            context.state.apply(messages)
        context.state.apply(record)
    for messages in arrived.before():
        context.state.apply(messages)


def _resume(context: ScheduleContext) -> None:
    """Go on after recovery. Only a log that is new, or in many segments, begins with a checkpoint: the time until it
    can be written to does not depend on what it holds. Raises StorageFailed.
    """
    log = context.log
    captured = -1 if log.recovered.checkpoint is None else log.recovered.checkpoint.captured
    count = sum(segment.first >= captured for segment in log.recovered.segments)
    log.resume()
    # Where syncs are left to the system, a power failure may have taken what the checkpoint has of another log: what
    # arrives there next would be taken for known, also by the checkpoint before, if the newest is damaged.
    is_shorter = context.arrivals.end < context.newest_arrived_to
    wanted = CHECKPOINTS_KEPT if is_shorter else int(captured < 0 or count >= CONTINUED_MAX)
    for _ in range(wanted):
        context.write_checkpoint(context.capture_checkpoint())
