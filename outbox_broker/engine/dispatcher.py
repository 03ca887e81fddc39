"""Dispatches due messages from the schedule into their topics, once each. Timing and scheduling are elsewhere.

    claimed    schedule: BatchHanded, synced
    appended   message log: the messages, with their sequences
    committed  message log: synced -> action log: Fired, and waiting pulls are woken -> schedule: BatchFired

If more than one batch is due, each is claimed while the one before it is appended, and appended while the one before it
is committed (decision 67). Each step processes batches in the order in which the schedule dispatched them.
After a kill in between, unsettled batches come again from the schedule at the next start, and those of their messages
that are already in the message log are recognised by topic and id. A cancel is too late after the claim, and wins
before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.log.disk_reserve import is_disk_full
from outbox_broker.schedule.dispatch_health import DispatchHealth
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.lateness import Lateness
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import Framed, FrameKind, framed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_ROUND_MS_MAX: Final = 60_000
"""Waiters for a dispatch round give up after this time: the disk is stuck."""


@dataclass(slots=True)
class PlacedBatch:
    """A batch in the message log from `begin` up to `end`: (sequence, id) by topic; `unrecorded` are the topics not yet
    recorded in the action log.
    """

    batch: DueBatch
    entries: dict[str, list[tuple[int, str]]]
    begin: int
    end: int
    unrecorded: deque[str]
    is_recorded: bool = False
    """Everything was recorded, and the schedule could not settle the batch yet."""


@dataclass(frozen=True, slots=True)
class Copies:
    """The frames of a batch's messages; `firsts` are the next sequences of their topics."""

    batch: DueBatch
    at_ms: int
    firsts: dict[str, int]
    frames: Framed


class Dispatcher:
    """Moves messages from the schedule into the topics, batch by batch."""

    def __init__(self, context: EngineContext, writer: LogWriter, wakeups: Wakeups) -> None:
        self._context = context
        self._clock = context.clock
        self._lock = context.lock
        self._state = context.state
        self._reserve = context.reserve
        self._writer = writer
        self._wakeups = wakeups
        self._turn = threading.Condition()
        self.is_dispatching = False
        self._rounds = 0
        self._batches: deque[DueBatch] = deque()  # claimed, and not appended
        self._ahead: Future[DueBatch | None] | None = None  # the next batch, while it is being claimed
        self._taking = ThreadPoolExecutor(1, "broker-taking")
        self.placed: deque[PlacedBatch] = deque()  # not settled
        self._ended: Future[None] | None = None  # the commit of the last appended batch, if that runs concurrently
        self._ending = ThreadPoolExecutor(1, "broker-ending")
        self._health = DispatchHealth()
        self.lateness = Lateness()

    def resume(self, batches: Iterable[DueBatch]) -> None:
        """Queue batches that the schedule had dispatched before a restart: they are appended before what is due now."""
        self._batches.extend(batches)

    def shutdown(self) -> None:
        """Stop the executor threads after their current work."""
        self._taking.shutdown()
        self._ending.shutdown()

    def dispatch_due(self, *, until_ended: bool = True) -> bool:
        """Dispatch a batch of due messages, or wait for one that another thread started after this call.

        True if more may be due. Not to be called under the lock. Raises StorageFailed. With `until_ended` False, it
        does not wait for the commit if more is due.
        """
        for _ in range(2):
            with self._turn:
                if not self.is_dispatching:
                    if not self._may_be_due():
                        return False
                    self.is_dispatching = True
                    break
                awaited = self._rounds
                self._turn.wait_for(lambda awaited=awaited: self._rounds != awaited, _ROUND_MS_MAX / 1000)  # type: ignore[misc]
        else:
            ended = self._ended
            if ended is not None:
                wait((ended,), _ROUND_MS_MAX / 1000)
            return self._may_be_due()
        try:
            with self._health.attempt():
                self._dispatch(until_ended=until_ended)
        finally:
            with self._turn:
                self.is_dispatching = False
                self._rounds += 1
                self._turn.notify_all()
        return self._may_be_due()

    def dispatch_unless_disk_is_full(self) -> None:
        """Dispatch unless the disk is full; then ready messages can still be pulled, and others canceled."""
        try:
            self.dispatch_due()
        except StorageFailed as error:
            logger.warning("dispatch_failed", extra={"error": str(error)})

    def check_ready(self) -> None:
        """Raise StorageFailed, naming the cure, if the last batch that was due could not be dispatched; not for lack of
        disk space, since consumers, who free it, must reach the broker all the same.
        """
        failure = self._health.failure()
        if failure is not None and not is_disk_full(failure):
            raise failure

    def may_be_dispatching(self) -> bool:
        """Returns whether anything is due, or being dispatched: checked in this order, so that nothing is missed."""
        return self._may_be_due() or self.is_dispatching

    def _may_be_due(self) -> bool:
        return self.has_taken() or self._context.schedule.is_due(self._clock.now_ms())

    def has_taken(self) -> bool:
        """Returns whether a batch is on its way, in whatever state an earlier round left it."""
        return bool(self._batches or self.placed) or self._ahead is not None

    def _dispatch(self, *, until_ended: bool) -> None:
        """Run a round: the next batch is appended, while the one before it is committed and the one after it is
        claimed.

        Each step resumes from where it failed; a batch that could not be committed goes first. Never early: the clock
        is read when a batch is claimed.
        """
        self._end_again()
        batch = self._next_batch()
        if batch is not None:
            self._take_ahead()
            copies = self._copies(batch)
            with self._lock:
                self._context.refuse_if_closed()
                self.placed.append(self._place_due(batch, copies))
                self._context.placed_to = batch.number
            self._batches.popleft()
        if until_ended or self._ahead is None:
            self._await_end()
            self._end()
        else:
            self._end_beside()

    # -- taking ------------------------------------------------------------------------------------------------------

    def _next_batch(self) -> DueBatch | None:
        """Returns the first batch claimed and not appended: left by an earlier round, claimed ahead, or due now."""
        if not self._batches:
            if self._ahead is not None:
                wait((self._ahead,))  # an interrupt of this thread leaves the claim, and its batch, where it is
            ahead, self._ahead = self._ahead, None
            batch = None if ahead is None else ahead.result()
            if batch is None:  # a claim ahead may have found nothing, some time ago
                batch = self._taken()
            if batch is not None:
                self._batches.append(batch)
        return self._batches[0] if self._batches else None

    def _take_ahead(self) -> None:
        """Claim the next batch concurrently with this one, if more is due."""
        if self._ahead is None and len(self._batches) == 1 and self._context.schedule.is_due(self._clock.now_ms()):
            with suppress(RuntimeError):  # it was closed meanwhile
                self._ahead = self._taking.submit(self._taken)

    def _taken(self) -> DueBatch | None:
        return self._context.schedule.due(self._clock.now_ms())

    # -- placing -----------------------------------------------------------------------------------------------------

    def _is_outdated(self, copies: Copies) -> bool:
        """Returns whether a topic's end has moved since the records were made."""
        return any(self._end_of(topic) != first for topic, first in copies.firsts.items())

    def _end_of(self, topic: str) -> int:
        return self._state.end_of(topic)

    def _copies(self, batch: DueBatch) -> Copies:
        """Encode due messages for the message log, grouped by topic, with the sequences that follow their topics' ends.

        Done without the lock, since it takes most of the time of a dispatch; the holder of the lock then checks whether
        the ends still match.
        """
        now_ms = self._clock.now_ms()
        firsts: dict[str, int] = {}
        frames = Framed(FrameKind.DISPATCHED)
        for topic, _, payloads in batch.by_topic():
            first = firsts[topic] = self._end_of(topic)
            frames.extend(framed(FrameKind.DISPATCHED, range(first, first + len(payloads)), payloads))
        return Copies(batch, now_ms, firsts, frames)

    def _place_due(self, batch: DueBatch, copies: Copies) -> PlacedBatch:
        """Append due messages to the message log with their sequences, grouped by topic."""
        entries: dict[str, list[tuple[int, str]]] = {}
        fresh = self._not_void(self._not_placed_yet(batch, entries))
        old = self._state.dispatched_from if entries else None
        begin = self._context.messages.end if old is None else old
        if self._context.dispatching_from is None:  # else an earlier batch begins there
            self._context.dispatching_from = begin
        if fresh is not copies.batch or self._is_outdated(copies):
            copies = self._copies(fresh)
        counts: dict[str, int] = {}
        for topic, ids, _ in fresh.by_topic():
            first = copies.firsts[topic]
            entries.setdefault(topic, []).extend(zip(range(first, first + len(ids)), ids, strict=True))
            counts[topic] = len(ids)
        if counts:
            frames, at_ms = copies.frames, copies.at_ms
            offsets = self._reserve.spend(lambda: self._writer.append_messages(frames, at_ms=at_ms), keep_half=True)
            self._writer.place(counts, offsets, ready_at_ms=copies.at_ms)
            self._state.active_segment_special.extend(offsets)
            self._state.recent.add_all(fresh.topics, fresh.ids)
        if self._state.dispatched_before:
            for topic_and_id in zip(batch.topics, batch.ids, strict=True):
                self._state.dispatched_before.pop(topic_and_id, None)
        return PlacedBatch(batch, entries, begin, self._context.messages.end, deque(entries))

    def _not_placed_yet(self, batch: DueBatch, entries: dict[str, list[tuple[int, str]]]) -> DueBatch:
        """Returns the batch without messages that are in the message log since before a restart, or twice in the batch.

        The sequences of the former are added to `entries`, since the action log may not have them yet.
        """
        ids = batch.ids
        if len(set(ids)) == len(ids) and not self._state.recent.has_any(ids) and not self._state.dispatched_before:
            return batch
        gone: set[int] = set()
        seen: set[tuple[str, str]] = set()
        for at, (topic, message_id) in enumerate(zip(batch.topics, ids, strict=True)):
            place = self._state.dispatched_before.get((topic, message_id))
            if place is not None:
                entries.setdefault(topic, []).append((place, message_id))
            if place is not None or self._state.recent.has(topic, message_id) or (topic, message_id) in seen:
                gone.add(at)
            seen.add((topic, message_id))
        return batch.without(gone)

    def _not_void(self, batch: DueBatch) -> DueBatch:
        """Returns the batch without messages of deleted topics; those are recorded as canceled."""
        if not self._state.deleted or self._state.deleted.keys().isdisjoint(batch.topics):
            return batch
        is_void = self._state.is_void
        gone = {at for at, (topic, seq) in enumerate(zip(batch.topics, batch.seqs, strict=True)) if is_void(topic, seq)}
        if not gone:
            return batch
        self.tell_void([(batch.topics[at], batch.ids[at]) for at in sorted(gone)])
        return batch.without(gone)

    def tell_void(self, messages: Sequence[tuple[str, str]]) -> None:
        """Record that scheduled messages, by (topic, id), are never delivered: their topic was deleted."""
        once = dict.fromkeys(messages)
        self._writer.act(
            journal.Canceled(
                at_ms=self._clock.now_ms(), ids=[message_id for _, message_id in once],
                messages_end=self._context.messages.end, topics=[topic for topic, _ in once],
            )
        )  # fmt: skip

    # -- ending ------------------------------------------------------------------------------------------------------

    def _end_beside(self) -> None:
        """Commit appended batches concurrently with the next batch; at most two are pending."""
        before = self._ended
        with suppress(RuntimeError):  # it was closed meanwhile
            self._ended = self._ending.submit(self._end)
        if before is not None:
            before.result()

    def _await_end(self) -> None:
        if self._ended is not None:
            self._ended.result()

    def _end_again(self) -> None:
        """Retry the commit of batches that failed. Raises StorageFailed."""
        if self.placed and (self._ended is None or self._ended.done()):
            self._end()
            self._ended = None

    def _end(self) -> None:
        """Make appended batches durable, record them, and settle them with the schedule; resumes where it failed.

        Synced before any consumer sees it: a sequence that a power failure erases may be assigned to another message,
        and a receipt of the first would settle the second.
        """
        while self.placed:
            placed = self.placed[0]
            self._context.messages.commit(placed.end)
            if not placed.is_recorded:
                self._record_dispatched(placed)
                placed.is_recorded = True
            self._context.schedule.fired(placed.batch.number)
            with self._lock:
                self.placed.popleft()
                self._context.dispatching_from = self._first_unsettled()

    def _first_unsettled(self) -> int | None:
        """Returns the start offset of the oldest dispatched records that the schedule does not know to be appended."""
        if self._state.dispatched_before:
            return self._state.dispatched_from
        return self.placed[0].begin if self.placed else None

    def _record_dispatched(self, placed: PlacedBatch) -> None:
        """Record dispatched messages in the action log, once per topic, then wake pulls, and update statistics."""
        now_ms = self._clock.now_ms()
        with self._lock:
            self._context.refuse_if_closed()
            while placed.unrecorded:
                topic = placed.unrecorded[0]
                entries = placed.entries[topic]
                self._writer.act(journal.Fired(topic=topic, at_ms=now_ms, entries=entries))
                if topic in self._state.topics:
                    self._state.counters["fired", topic, ""] += len(entries)
                placed.unrecorded.popleft()  # if the next one fails, this one is not recorded again
        for topic in placed.entries:
            self._wakeups.wake_topic(topic)
        self.lateness.add_due(placed.batch.dues, now_ms=now_ms)
