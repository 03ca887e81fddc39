"""Dispatches due messages in batches, and settles the batches.

A batch whose dispatch is in the log is in one of two places until it is settled: with the caller of due() or
unsettled(), or in the queue of batches that due() returns again. Messages that were taken from the due queue, and whose
dispatch is not in the log, are in the due queue again. Both hold whatever error ends a call.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.due_queue import TakenMessages
from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.merge_cursor import Piece
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_log import Place
from outbox_broker.schedule.schedule_records import FROM_MEMORY, BatchFired, BatchFiredInPart, BatchHanded, Part
from outbox_broker.schedule.schedule_state import ScheduleHandOut
from outbox_broker.schedule.sorted_run import Entry, TimedMessage, new_entries
from outbox_broker.schedule.sorted_run_reader import RunDamaged

_NO_BATCH: Final = 0
"""No batch has this number: to settle it changes nothing, and proves that this process can still write."""


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """A batch whose dispatch is in the log, and durable once commit() has returned: from then on it may leave. If
    commit() raises, a later claim returns the batch again.
    """

    batch: DueBatch
    commit: Callable[[], None]


class DueDispatch:
    """The unsettled batches, including those from before the schedule was last closed."""

    def __init__(self, context: ScheduleContext, horizon: DueSoon) -> None:
        self._context = context
        self._horizon = horizon
        self._again: deque[int] = deque()
        self._claimed: dict[int, Counter[str]] = {}
        """The topics of the batches that were claimed since the start, and are not settled."""

    def recover(self) -> None:
        """Queue the batches that were unsettled when the schedule was last closed, or killed, ahead of others."""
        self._again.extend(sorted(self._context.state.hand_outs))

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

    def count(self, topic: str, *, after: int) -> int:
        """Returns how many messages of a topic are scheduled, or in batches behind this number that were claimed."""
        with self._context.lock:
            claimed = (topics[topic] for number, topics in self._claimed.items() if number > after)
            return self._context.state.topics[topic] + sum(claimed)

    def claim(self, until_ms: int) -> BatchClaim | None:
        """Like due(), for messages that are due by a time, which may be ahead; does not wait for the disk. Batches that
        were unsettled come first, whatever the time: they may have been claimed ahead, too.
        """
        with self._context.lock:
            self._context.refuse_if_closed()
            batch = self._hand_again()
            if batch is None and len(self._context.state.hand_outs) < self._context.options.hand_outs_max:
                batch = self._hand_next(until_ms)
            place = self._context.log.end
        return None if batch is None else BatchClaim(batch, lambda: self._commit(batch, place))

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

        The caller may go on with those until the schedule is closed; opened anew, the batch comes again without these.
        """
        with self._context.lock:
            self._context.refuse_if_closed()
            if number in self._context.state.hand_outs:
                entries = new_entries(again, first_seq=self._context.state.next_seq)
                self._context.act(BatchFiredInPart(number, list(done), entries))
                self._horizon.add(entries)

    def _commit(self, batch: DueBatch, place: Place) -> None:
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
            self._context.act(BatchHanded(batch.number, parts, topics))
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


def _part(part: Piece | Entry) -> Part:
    if isinstance(part, Entry):
        return (FROM_MEMORY, part.seq, 0)
    return (part.run.id, part.start, part.stop)
