"""The schedule: messages in until two years ahead, out when they are due, canceled or delivered, never early.

Everything durable is in a segment store, of whatever kind. A message is written to the log, which is synced before the
answer; from memory it is flushed to a bucket with many others, re-filed into finer buckets as its time comes nearer
(levels), and handed out when it is due (due_horizon). It knows nothing of topics' consumers, of HTTP or of the clock.

Guarantees, each kept across a kill or a power cut at any point:
- scheduled() as stored: delivered, unless canceled; handed out at its due time or later.
- a batch that was handed out and not settled by fired() is handed out again after a restart, the same batch.
- cancel() says canceled: never handed out. too_late: it was, or is about to be, delivered.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Self

from outbox_broker.common.cancel_scope import Scope
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.schedule.bucket_expansion import BucketExpansion
from outbox_broker.schedule.bucket_filing import BucketFiling
from outbox_broker.schedule.cancellation import Cancellation, Stopped
from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.due_dispatch import DueDispatch
from outbox_broker.schedule.due_horizon import DueHorizon
from outbox_broker.schedule.flushed_ids import FlushedIds, Identified
from outbox_broker.schedule.housekeeping import Housekeeping
from outbox_broker.schedule.id_index import IndexMerge
from outbox_broker.schedule.index_housekeeping import IndexHousekeeping
from outbox_broker.schedule.memory_flush import MemoryFlush
from outbox_broker.schedule.message_intake import MessageIntake
from outbox_broker.schedule.run_quarantine import RunQuarantine
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_log import PREFIX, Place
from outbox_broker.schedule.schedule_search import Listed, ScheduleSearch
from outbox_broker.schedule.schedule_statistics import ScheduleStatistics
from outbox_broker.schedule.segment_garbage import SegmentGarbage
from outbox_broker.schedule.segment_store import SegmentStore
from outbox_broker.schedule.sorted_run import Timed
from outbox_core.messages.message import CancelStatus, PublishStatus

__all__ = ["DelayOptions", "DelayStore", "DueBatch", "Stopped", "Timed"]


class DelayStore:
    """One schedule on one segment store. All methods may be called from any thread; times are UTC milliseconds.

    Its owner calls due() and fired() as time passes, and maintain() whenever there is nothing due.
    """

    def __init__(self, context: ScheduleContext) -> None:
        """Recover the schedule that is in the context's store, which nobody else uses. Raises as open() does."""
        self._context = context
        self._horizon = DueHorizon(context, RunQuarantine(context))
        self._recent = FlushedIds(context)
        merge = IndexMerge()
        garbage = SegmentGarbage(context, self._horizon, merge)
        index = IndexHousekeeping(
            context, horizon=self._horizon, recent=self._recent, garbage=garbage, merge=merge
        )  # fmt: skip
        filing = BucketFiling(context.store, context.state)
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
        segments = _recover_state(context)
        self._dispatch.recover()
        self._horizon.rebuild()
        garbage.finish_empty()
        index.open(segments)

    @classmethod
    def open(
        cls, store: SegmentStore, *, options: DelayOptions | None = None, reserve: Reserve | None = None
    ) -> Self:  # fmt: skip
        """Recover the schedule that is in the store. The store stays its caller's to close.

        `reserve`: room that is kept, where the store is on a disk, for all but new messages. Raises StorageFailed, or
        SegmentDamaged where the log itself is.
        """
        return cls(ScheduleContext(store, options=options, reserve=reserve))

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
        return self._intake.put(batch, now_ms=now_ms)

    def stop(
        self, ids: Sequence[str], *, now_ms: int, scope: Scope = None, late: Container[str] = ()
    ) -> Stopped:  # fmt: skip
        """cancel() without waiting for the disk, as put() is to schedule(). Of those that are `late`, the caller knows
        a message within the scope that was delivered.
        """
        return self._cancellation.stop(ids, now_ms=now_ms, scope=scope, late=late)

    def commit(self, place: Place | None = None) -> None:
        """Return once everything up to a place (all, by default) is durable."""
        self._context.log.commit(place)

    def due(self, now_ms: int) -> DueBatch | None:
        """What is due now and was not handed out yet, a batch of it; None where nothing is, or too much is out.

        That it is handed out is durable before it is: no cancel wins after that.
        """
        return self._dispatch.due(now_ms)

    def unsettled(self) -> list[DueBatch]:
        """The batches that were out when the schedule was last closed, or killed. due() then hands them out no more."""
        return self._dispatch.unsettled()

    def is_due(self, now_ms: int) -> bool:
        """Whether due() may have something. Waits for nobody."""
        return self._dispatch.is_due(now_ms)

    def soonest_ms(self) -> int:
        """A time before which nothing is due, as far as is known without waiting for anybody."""
        return self._horizon.soonest_ms

    def fired(self, number: int, *, again: Sequence[Timed] = ()) -> None:
        """A batch was delivered, but for those that are to be tried `again`, at the due times given with them.

        Durable with the next thing that is. A batch that is not out is passed over.
        """
        self._dispatch.fired(number, again=again)

    def maintain(self, now_ms: int) -> bool:
        """Do one step of what is to be done; True where more waits. Safe to be ended anywhere.

        Raises StorageFailed with nothing lost; the step is then done again.
        """
        return self._housekeeping.step(now_ms)

    def is_full(self) -> bool:
        """Whether memory is to be flushed. Waits for nobody."""
        return self._flush.is_full()

    def make_room(self, now_ms: int, *, fill: int = 1) -> None:
        """Flush memory where it is `fill` times as full as it may be, before more is taken in. Raises StorageFailed.

        To be called without the lock, or one's own, since it may take long.
        """
        self._flush.make_room(now_ms, fill=fill)

    def may_know(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Whether anything may be known of messages of these ids on these topics. Waits for nobody.

        Every id is looked for in the places that it passes, in the order in which it passes them.
        """
        return self._recent.may_know(ids, topics)

    def knows(self, topic: str, message_id: str) -> bool:
        """Whether this message waits, fired lately, or was canceled, before or after it came. Waits for nobody."""
        return self._recent.knows(topic, message_id)

    def canceled_among(self, messages: Sequence[Identified]) -> list[int]:
        """Which of these messages were canceled, before or after they came, as far as remembered. Waits for nobody."""
        return self._recent.canceled_among(messages)

    def find(self, message_id: str, scope: Scope = None) -> Listed | None:
        """The scheduled message of this id on the topics of a scope, the first to be due where there are several; None
        where there is none, or it has fired or was canceled.
        """
        return self._search.find(message_id, scope)

    def ids_of(self, topic: str, *, before_seq: int) -> Iterator[list[str]]:
        """The ids of a topic's scheduled messages whose numbers are lower, some at a time.

        Whoever takes some may cancel them before asking for more. What moves to another bucket meanwhile may be passed
        over.
        """
        return self._search.ids_of(topic, before_seq=before_seq)

    def count(self, topic: str | None = None) -> int:
        """How many are scheduled, of a topic or in all."""
        return self._statistics.count(topic)

    def topics(self) -> dict[str, int]:
        """How many are scheduled, by topic."""
        return self._statistics.topics()

    def next_seq(self) -> int:
        """The number that the next message gets which comes."""
        with self._context.lock:
            return self._context.state.next_seq

    def histogram(self, *, topic: str | None, from_ms: int, to_ms: int, bucket_ms: int) -> list[tuple[int, int]]:
        """(start, how many are due in it) for each `bucket_ms` of [from_ms, to_ms) in which any are.

        Reads columns, no messages, and holds up nothing meanwhile: what fires while it reads may be counted or not.
        """
        return self._statistics.histogram(topic=topic, from_ms=from_ms, to_ms=to_ms, bucket_ms=bucket_ms)

    def due_within(self, spans_ms: Sequence[int], *, now_ms: int) -> list[int]:
        """How many are due within each span from now, which ascend; and last, how many there are.

        Of the runs only those are read that go across the end of a span.
        """
        return self._statistics.due_within(spans_ms, now_ms=now_ms)

    def next_due_ms(self) -> int | None:
        """A time before which nothing is due; None where nothing is scheduled."""
        return self._statistics.next_due_ms()

    def figures(self) -> dict[str, int]:
        """Sizes, for operators."""
        return self._statistics.figures()

    def check_ready(self) -> None:
        """Raise StorageFailed where nothing can be made durable."""
        with self._context.lock:
            self._context.refuse_if_closed()
        self._context.log.check_ready()

    def close(self) -> None:
        """Take nothing any more; idempotent. What is in memory is in the log too."""
        with self._context.lock:
            if self._context.is_closed:
                return
            self._context.is_closed = True
        self._context.log.commit()
        self._context.log.seal()


def _recover_state(context: ScheduleContext) -> set[str]:
    """Rebuild the state from the log, and remove segments that it does not name; returns all there were."""
    for record in context.log.recover():
        context.state.apply(record)
    context.log.begin_anew(context.state.checkpoint())
    used = {context.log.name, *context.state.segments()}
    names = set(context.store.list())
    context.store.delete(sorted(names - used))
    for name in used:
        if not name.startswith(PREFIX):
            context.store.seal(name)  # opened again when it is written to
    return names
