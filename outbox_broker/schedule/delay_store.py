"""The schedule: stores messages up to two years ahead, and dispatches them when due unless canceled, never early.

All durable data is in segments, on any medium. A message is written to the log, which is synced before
the response; from memory it is flushed to a bucket with many others, re-filed into finer buckets as its time comes
nearer (levels), and dispatched when it is due (due_soon). Consumers, HTTP and the clock are outside.
Guarantees, each across a kill or a power failure at any point:
- schedule() returned stored: delivered, unless canceled; dispatched at its due time or later.
- a batch that was dispatched and not settled by fired() is dispatched again after a restart, the same batch.
- cancel() returned canceled: never dispatched. too_late: it was, or is about to be, delivered.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Self

from outbox_broker.common.cancel_topic_patterns import Scope
from outbox_broker.journal.journal import Journal
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.schedule.bucket_expansion import BucketExpansion
from outbox_broker.schedule.bucket_filing import BucketFiling
from outbox_broker.schedule.cancellation import Cancellation, CancelResult
from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.due_dispatch import BatchClaim, DueDispatch
from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.id_index import IndexMerge
from outbox_broker.schedule.index_housekeeping import IDS_PREFIX, IndexHousekeeping
from outbox_broker.schedule.memory_flush import MemoryFlush
from outbox_broker.schedule.message_intake import MessageIntake
from outbox_broker.schedule.recent_message_ids import MessageIdentity, RecentMessageIds
from outbox_broker.schedule.run_quarantine import RunQuarantine
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_housekeeping import Housekeeping
from outbox_broker.schedule.schedule_log import (
    FIRST_CHECKPOINT_BYTES_MAX,
    PREFIX,
    Place,
    filed,
    records_of,
    resume,
)
from outbox_broker.schedule.schedule_search import ScheduledListing, ScheduleSearch
from outbox_broker.schedule.schedule_statistics import ScheduleStatistics
from outbox_broker.schedule.segment_garbage import SegmentGarbage
from outbox_broker.schedule.sorted_run import TimedMessage
from outbox_broker.segments.port import Segments
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.message import CancelStatus, PublishStatus

__all__ = ["BatchClaim", "CancelResult", "DelayOptions", "DelayStore", "DueBatch", "TimedMessage"]


class DelayStore:
    """One schedule on the segments of one owner. Thread-safe; times are UTC milliseconds.

    The owner calls due() and fired() as time passes, and maintain() when nothing is due.
    """

    def __init__(self, context: ScheduleContext) -> None:
        """Recover the schedule from the context's segments, which must have no other user. Raises as open() does."""
        self._context = context
        self._horizon = DueSoon(context, RunQuarantine(context))
        self._recent = RecentMessageIds(context)
        merge = IndexMerge()
        filing = BucketFiling(context.segments, context.state, writers_max=context.options.bucket_writers_max)
        garbage = SegmentGarbage(context, horizon=self._horizon, merge=merge, filing=filing)
        index = IndexHousekeeping(
            context, horizon=self._horizon, recent=self._recent, garbage=garbage, merge=merge
        )  # fmt: skip
        self._flush = MemoryFlush(
            context=context, horizon=self._horizon, recent=self._recent, filing=filing, garbage=garbage, index=index
        )
        expansion = BucketExpansion(context=context, horizon=self._horizon, filing=filing, garbage=garbage)
        self._housekeeping = Housekeeping(
            context=context, garbage=garbage, flush=self._flush, expansion=expansion, index=index
        )
        self._search = ScheduleSearch(context, self._horizon)
        self._statistics = ScheduleStatistics(context, self._horizon)
        self._intake = MessageIntake(context, horizon=self._horizon, recent=self._recent)
        self._cancellation = Cancellation(context, self._search)
        self._dispatch = DueDispatch(context, self._horizon)
        segments, index_pieces = _recover_state(context)
        garbage.add_named_before(index_pieces)
        self._dispatch.recover()
        self._horizon.rebuild()
        garbage.finish_empty()
        index.open(segments)

    @classmethod
    def open(
        cls, segments: Segments, *, options: DelayOptions | None = None, reserve: Reserve | None = None
    ) -> Self:  # fmt: skip
        """Recover the schedule from its segments. Closing them stays the caller's task.

        `reserve`: disk space withheld from new messages, if the segments are on a disk. Raises StorageFailed, or
        SegmentDamaged if the log itself is damaged.
        """
        return cls(ScheduleContext(segments, options=options, reserve=reserve))

    def schedule(self, batch: Sequence[TimedMessage], *, now_ms: int) -> list[PublishStatus]:
        """Schedule messages; returns one status each, in order, once they are durable. Rejected: more than 731 days
        ahead.

        A due time in the past means now. A recent id is a duplicate; a message that was canceled before it arrived is
        reported as stored, and never delivered. Raises StorageFailed with nothing stored.
        """
        self.make_room(now_ms, fill=1)
        statuses, place = self.put(batch, now_ms=now_ms)
        self.commit(place)
        return statuses

    def cancel(self, ids: Sequence[str], *, now_ms: int, scope: Scope = None) -> list[CancelStatus]:
        """Cancel the messages with these ids on the topics of a scope, durably. If there is none, the cancel is
        remembered, and a message that arrives later under the id within the scope is not delivered.
        """
        stopped = self.stop(ids, now_ms=now_ms, scope=scope)
        self.commit(stopped.place)
        return stopped.statuses

    def put(self, batch: Sequence[TimedMessage], *, now_ms: int) -> tuple[list[PublishStatus], Place]:
        """Like schedule(), without waiting for the disk: durable, and to be answered, once commit() of the place
        returns.

        For callers that hold a lock of their own; they must call make_room() before taking it.
        """
        return self._intake.put(batch, now_ms=now_ms)

    def stop(
        self, ids: Sequence[str], *, now_ms: int, scope: Scope = None, late: Container[str] = ()
    ) -> CancelResult:  # fmt: skip
        """Like cancel(), without waiting for the disk, as put() is to schedule(). For ids in `late` the caller knows of
        a delivered message within the scope.
        """
        return self._cancellation.stop(ids, now_ms=now_ms, scope=scope, late=late)

    def commit(self, place: Place | None = None) -> None:
        """Return once everything up to a place (all, by default) is durable."""
        self._context.log.commit(place)

    def due(self, now_ms: int) -> DueBatch | None:
        """Returns a batch of due messages that were not dispatched yet; None if there are none, or too many batches are
        unsettled.

        The dispatch is durable before this returns: a cancel is too late after that.
        """
        return self._dispatch.due(now_ms)

    def claim(self, until_ms: int) -> BatchClaim | None:
        """Like due(), for messages that are due by a time that may be ahead, without waiting for the disk: they may
        leave once the claim is committed, each when it is due. A cancel is too late from the claim on. Batches that
        were unsettled come first, whatever the time.
        """
        return self._dispatch.claim(until_ms)

    def unsettled(self) -> list[DueBatch]:
        """Returns the batches left unsettled by the last close or kill; due() skips them from then on."""
        return self._dispatch.unsettled()

    def is_due(self, now_ms: int) -> bool:
        """Returns whether due() may have something. Takes no lock."""
        return self._dispatch.is_due(now_ms)

    def soonest_ms(self) -> int:
        """Returns a time before which nothing is due, as far as is known without a lock."""
        return self._dispatch.soonest_ms()

    def fired(self, number: int, *, again: Sequence[TimedMessage] = ()) -> None:
        """Settle a batch as delivered, except for messages to be dispatched `again` at the due times given with them.

        Durable with the next durable write. A batch that is not unsettled is ignored.
        """
        self._dispatch.fired(number, again=again)

    def fired_in_part(self, number: int, *, done: Sequence[int], again: Sequence[TimedMessage] = ()) -> None:
        """Like fired() for those messages of a batch that arrived as `done`: the others stay unsettled, in their order.
        The caller may go on with them until the schedule is closed; opened anew, the batch comes again without these.
        """
        self._dispatch.fired_in_part(number, done=done, again=again)

    def maintain(self, now_ms: int) -> bool:
        """Do one step of housekeeping; True if more remains. Safe to interrupt anywhere.

        Raises StorageFailed with nothing lost; the step is repeated then.
        """
        return self._housekeeping.step(now_ms)

    def is_full(self) -> bool:
        """Returns whether memory should be flushed. Takes no lock."""
        return self._flush.is_full()

    def make_room(self, now_ms: int, *, fill: float | None = None) -> None:
        """Flush memory if it is at `fill` times its limits (the option `fill_max` by default), before more is accepted.
        Raises StorageFailed.

        May take long: call it without holding the lock, or one of your own.
        """
        self._flush.make_room(now_ms, fill=self._context.options.fill_max if fill is None else fill)

    def may_know(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Returns whether any message with these ids on these topics may be known. Takes no lock.

        Every id is searched in the places through which it moves, in that order, so that none is missed in transit.
        """
        return self._recent.may_know(ids, topics)

    def knows(self, topic: str, message_id: str) -> bool:
        """Returns whether this message is waiting, was dispatched recently, or was canceled. Takes no lock."""
        return self._recent.knows(topic, message_id)

    def canceled_among(self, messages: Sequence[MessageIdentity]) -> list[int]:
        """Returns the indexes of messages that were canceled, as far as remembered. Takes no lock."""
        return self._recent.canceled_among(messages)

    def find(self, message_id: str, scope: Scope = None) -> ScheduledListing | None:
        """Returns the scheduled message with this id on the topics of a scope, the first to be due if there are
        several; None if there is none, or it was dispatched or canceled.
        """
        return self._search.find(message_id, scope)

    def read(self, message_id: str, scope: Scope = None) -> TimedMessage | None:
        """Returns the message that find() finds, with its payload."""
        return self._search.read(message_id, scope)

    def ids_of(self, topic: str, *, before_seq: int) -> Iterator[list[str]]:
        """Yields the ids of a topic's scheduled messages with arrival numbers below `before_seq`, in pages.

        The caller may cancel the ids of a page before it requests the next. Messages moved to another bucket meanwhile
        may be missed.
        """
        return self._search.ids_of(topic, before_seq=before_seq)

    def count(self, topic: str | None = None) -> int:
        """Returns how many messages are scheduled, of a topic or in all."""
        return self._statistics.count(topic)

    def count_undelivered(self, topic: str, *, after: int = -1) -> int:
        """Returns how many messages of a topic are scheduled, or in batches behind this number that are not settled."""
        return self._dispatch.count(topic, after=after)

    def topics(self) -> dict[str, int]:
        """Returns how many messages are scheduled, by topic."""
        return self._statistics.topics()

    def next_seq(self) -> int:
        """Returns the arrival number of the next message."""
        with self._context.lock:
            return self._context.state.next_seq

    def histogram(self, *, topic: str | None, from_ms: int, to_ms: int, bucket_ms: int) -> list[tuple[int, int]]:
        """Returns (start, number of messages due) for each non-empty `bucket_ms` of [from_ms, to_ms).

        Reads columns only, and blocks nothing: messages dispatched during the read may be counted or not.
        """
        return self._statistics.histogram(topic=topic, from_ms=from_ms, to_ms=to_ms, bucket_ms=bucket_ms)

    def due_within(self, spans_ms: Sequence[int], *, now_ms: int) -> list[int]:
        """Returns how many messages are due within each ascending span from now; and last, the total.

        Only runs that cross the end of a span are read.
        """
        return self._statistics.due_within(spans_ms, now_ms=now_ms)

    def next_due_ms(self) -> int | None:
        """Returns a time before which nothing is due; None if nothing is scheduled."""
        return self._statistics.next_due_ms()

    def figures(self) -> dict[str, int]:
        """Returns sizes, for operators."""
        return self._statistics.figures()

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


def _recover_state(context: ScheduleContext) -> tuple[set[str], list[str]]:
    """Rebuild the state from the log, and delete segments that it does not reference; returns all segments found, and
    of those that it does not reference the pieces of the id index.

    What is in buckets is not read.
    """
    recovered = context.log.recovered
    names = filed(context.segments)
    if not recovered.end:
        # The first checkpoint was durable, alone, before anything else was written: to begin anew would lose all.
        for info in recovered.segments:
            if names or context.segments.read(info.name, FIRST_CHECKPOINT_BYTES_MAX, 1):
                raise SegmentDamaged(f"{info.name}: all of it is damaged; restore {info.name} from a copy")
        if names:
            raise SegmentDamaged(
                f"{min(names)} is there, and no log that says what is in it: restore the segments {PREFIX}* from a "
                "copy; or empty the store, to begin anew"
            )
    for record in records_of(recovered):
        context.state.apply(record)
    resume(context.log, context.state.checkpoint)
    unnamed = sorted(names - {*context.state.segments()})
    # No record tells of a merge, only a checkpoint does: if the newest is found damaged, the one before it counts.
    index_pieces = [name for name in unnamed if name.startswith(IDS_PREFIX)]
    context.segments.delete([name for name in unnamed if name not in index_pieces])
    return names, index_pieces
