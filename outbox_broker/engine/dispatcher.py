"""Firing: scheduled messages that are due get their places in their topics, once each. Not the timer, nor the schedule.

    taken     schedule: Handed, synced
    placed    message log: the messages, with their sequences
    ended     message log: synced -> action log: Fired, and who waits is told -> schedule: Fired

Where more is due than a batch, each is taken while the one before it is placed, and placed while the one before it is
ended. Each step goes in the order in which the schedule handed them out.

Killed anywhere in between, what is not settled comes again from the schedule when the broker opens, and what of it
stands in the message log already is known by its topic and id. A cancel is too late from Handed on, and wins before.
"""

from __future__ import annotations

import logging
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
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.lateness import Lateness
from outbox_broker.state.scheduled_copy import fired_copies
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal

logger = logging.getLogger(__name__)

_ROUND_MS_MAX: Final = 60_000
"""Who waits for a round of firing gives up then: the disk is stuck."""


@dataclass(slots=True)
class Placed:
    """A batch that stands in the message log from `begin` up to `end`: (sequence, id) by topic, of which some are to be
    told yet.
    """

    batch: DueBatch
    entries: dict[str, list[tuple[int, str]]]
    begin: int
    end: int
    untold: deque[str]
    is_told: bool = False
    """All was, and the schedule could not settle it yet."""


@dataclass(frozen=True, slots=True)
class Copies:
    """The frames of a batch's messages, whose topics' next sequences are `firsts`."""

    batch: DueBatch
    at_ms: int
    firsts: dict[str, int]
    data: bytes
    sizes: list[int]


class Dispatcher:
    """The way from the schedule into the topics, batch after batch."""

    def __init__(self, context: EngineContext, writer: LogWriter, wakeups: Wakeups) -> None:
        self._context = context
        self._clock = context.clock
        self._lock = context.lock
        self._state = context.state
        self._messages = context.messages
        self._reserve = context.reserve
        self._writer = writer
        self._wakeups = wakeups
        self._turn = threading.Condition()
        self.is_firing = False
        self._rounds = 0
        self._batches: deque[DueBatch] = deque()  # taken, and not placed
        self._ahead: Future[DueBatch | None] | None = None  # the next one, while it is being taken
        self._taking = ThreadPoolExecutor(1, "broker-taking")
        self.placed: deque[Placed] = deque()  # not settled
        self._ended: Future[None] | None = None  # the end of what was placed last, where that went beside
        self._ending = ThreadPoolExecutor(1, "broker-ending")
        self.lateness = Lateness()

    def resume(self, batches: Iterable[DueBatch]) -> None:
        """Batches that the schedule had handed out before a restart: they are placed before what is due."""
        self._batches.extend(batches)

    def shutdown(self) -> None:
        """End the threads beside the timer's, once what they do is done."""
        self._taking.shutdown()
        self._ending.shutdown()

    def fire_due(self, *, until_ended: bool = True) -> bool:
        """Fire a batch of what is due, or wait for one that another thread began to fire after this was called.

        True where more may be due. Not to be called under the lock. Raises StorageFailed. Who need not see what was
        fired does not wait for its end, where more is due.
        """
        for _ in range(2):
            with self._turn:
                if not self.is_firing:
                    if not self._may_be_due():
                        return False
                    self.is_firing = True
                    break
                awaited = self._rounds
                self._turn.wait_for(lambda awaited=awaited: self._rounds != awaited, _ROUND_MS_MAX / 1000)  # type: ignore[misc]
        else:
            ended = self._ended
            if ended is not None:
                wait((ended,), _ROUND_MS_MAX / 1000)
            return self._may_be_due()
        try:
            self._fire(until_ended=until_ended)
        finally:
            with self._turn:
                self.is_firing = False
                self._rounds += 1
                self._turn.notify_all()
        return self._may_be_due()

    def fire_what_can_be(self) -> None:
        """On a full disk nothing may fall due, but what is ready is handed out, and what is not can be canceled."""
        try:
            self.fire_due()
        except StorageFailed as error:
            logger.warning("firing_failed", extra={"error": str(error)})

    def may_be_firing(self) -> bool:
        """Whether anything is due, or on its way into its topic: asked in this order, so that nothing slips between."""
        return self._may_be_due() or self.is_firing

    def _may_be_due(self) -> bool:
        return self.has_taken() or self._context.schedule.is_due(self._clock.now_ms())

    def has_taken(self) -> bool:
        """Whether a batch is on its way, in whatever state an earlier round left it."""
        return bool(self._batches or self.placed) or self._ahead is not None

    def _fire(self, *, until_ended: bool) -> None:
        """A round: the next batch is placed, while the one before it is ended and the one behind it is taken.

        Each from where it was left, where that failed; what could not be ended comes before anything else is placed.
        Never early: the clock is asked where a batch is taken.
        """
        self._end_again()
        batch = self._next_batch()
        if batch is not None:
            self._take_ahead()
            copies = self._copies(batch)
            with self._lock:
                self._context.refuse_if_closed()
                self.placed.append(self._place_due(batch, copies))
            self._batches.popleft()
        if until_ended or self._ahead is None:
            self._await_end()
            self._end()
        else:
            self._end_beside()

    # -- taking ------------------------------------------------------------------------------------------------------

    def _next_batch(self) -> DueBatch | None:
        """The first that is taken and not placed: left by an earlier round, taken ahead, or due now."""
        if not self._batches:
            ahead, self._ahead = self._ahead, None
            batch = self._taken() if ahead is None else ahead.result()
            if batch is not None:
                self._batches.append(batch)
        return self._batches[0] if self._batches else None

    def _take_ahead(self) -> None:
        """Have the next batch taken beside this one, where more is due."""
        if self._ahead is None and len(self._batches) == 1 and self._context.schedule.is_due(self._clock.now_ms()):
            with suppress(RuntimeError):  # it was closed meanwhile
                self._ahead = self._taking.submit(self._taken)

    def _taken(self) -> DueBatch | None:
        return self._context.schedule.due(self._clock.now_ms())

    # -- placing -----------------------------------------------------------------------------------------------------

    def _is_outdated(self, copies: Copies) -> bool:
        """Whether a topic does not end any more where the copies begin."""
        return any(self._end_of(topic) != first for topic, first in copies.firsts.items())

    def _end_of(self, topic: str) -> int:
        return self._state.end_of(topic)

    def _copies(self, batch: DueBatch) -> Copies:
        """Due messages as they go into the message log, each topic's together, behind what its topic has now.

        Made without the lock, since making them takes most of the time that firing does; who has it looks whether the
        topics still end there.
        """
        now_ms = self._clock.now_ms()
        firsts: dict[str, int] = {}
        records: list[bytes] = []
        for topic, _, payloads in batch.by_topic():
            firsts[topic] = self._end_of(topic)
            records += fired_copies(payloads, first_sequence=firsts[topic], stored_at_ms=now_ms)
        data, sizes = journal.frames(records)
        return Copies(batch, now_ms, firsts, data, sizes)

    def _place_due(self, batch: DueBatch, copies: Copies) -> Placed:
        """Write due messages to the message log with their sequences, each topic's together."""
        entries: dict[str, list[tuple[int, str]]] = {}
        fresh = self._not_void(self._not_placed_yet(batch, entries))
        old = self._state.fired_from if entries else None
        begin = self._messages.end if old is None else old
        if self._context.firing_from is None:  # else an earlier batch begins there
            self._context.firing_from = begin
        if fresh is not copies.batch or self._is_outdated(copies):
            copies = self._copies(fresh)
        counts: dict[str, int] = {}
        for topic, ids, _ in fresh.by_topic():
            first = copies.firsts[topic]
            entries.setdefault(topic, []).extend(zip(range(first, first + len(ids)), ids, strict=True))
            counts[topic] = len(ids)
        if counts:
            data, sizes = copies.data, copies.sizes
            offsets = self._reserve.spend(lambda: self._writer.append_messages([(data, sizes)]), keep_half=True)
            self._writer.place(counts, offsets, ready_at_ms=copies.at_ms)
            self._state.written_special.extend(offsets)
            self._state.recent.add_all(fresh.topics, fresh.ids)
        if self._state.fired_before:
            for one in zip(batch.topics, batch.ids, strict=True):
                self._state.fired_before.pop(one, None)
        return Placed(batch, entries, begin, self._messages.end, deque(entries))

    def _not_placed_yet(self, batch: DueBatch, entries: dict[str, list[tuple[int, str]]]) -> DueBatch:
        """The batch without what stands in the message log since before a restart, or twice in it.

        The places of such are added to `entries`, since the action log may not tell them yet.
        """
        ids = batch.ids
        if len(set(ids)) == len(ids) and not self._state.recent.has_any(ids) and not self._state.fired_before:
            return batch
        gone: set[int] = set()
        seen: set[tuple[str, str]] = set()
        for at, (topic, message_id) in enumerate(zip(batch.topics, ids, strict=True)):
            place = self._state.fired_before.get((topic, message_id))
            if place is not None:
                entries.setdefault(topic, []).append((place, message_id))
            if place is not None or self._state.recent.has(topic, message_id) or (topic, message_id) in seen:
                gone.add(at)
            seen.add((topic, message_id))
        return batch.without(gone)

    def _not_void(self, batch: DueBatch) -> DueBatch:
        """The batch without what belonged to a topic that was deleted; that is told to be canceled."""
        if not self._state.deleted or self._state.deleted.keys().isdisjoint(batch.topics):
            return batch
        is_void = self._state.is_void
        gone = {at for at, (topic, seq) in enumerate(zip(batch.topics, batch.seqs, strict=True)) if is_void(topic, seq)}
        if not gone:
            return batch
        self.tell_void([(batch.topics[at], batch.ids[at]) for at in sorted(gone)])
        return batch.without(gone)

    def tell_void(self, places: Sequence[tuple[str, str]]) -> None:
        """Write down that scheduled messages, by (topic, id), are never delivered: their topic was deleted."""
        once = dict.fromkeys(places)
        self._writer.act(
            journal.Canceled(
                at_ms=self._clock.now_ms(), ids=[one for _, one in once], messages_end=self._messages.end,
                topics=[topic for topic, _ in once],
            )
        )  # fmt: skip

    # -- ending ------------------------------------------------------------------------------------------------------

    def _end_beside(self) -> None:
        """Have what is placed ended beside the next batch; at most two wait for it."""
        before = self._ended
        with suppress(RuntimeError):  # it was closed meanwhile
            self._ended = self._ending.submit(self._end)
        if before is not None:
            before.result()

    def _await_end(self) -> None:
        if self._ended is not None:
            self._ended.result()

    def _end_again(self) -> None:
        """Try once more to end what could not be ended. Raises StorageFailed."""
        if self.placed and (self._ended is None or self._ended.done()):
            self._end()
            self._ended = None

    def _end(self) -> None:
        """What is placed becomes durable, is told, and is settled with the schedule; from where that was left.

        Synced before anybody sees it: a sequence that a power cut forgets may be given to another message, and a
        receipt of the first would settle the second.
        """
        while self.placed:
            placed = self.placed[0]
            self._messages.commit(placed.end)
            if not placed.is_told:
                self._tell_fired(placed)
                placed.is_told = True
            self._context.schedule.fired(placed.batch.number)
            with self._lock:
                self.placed.popleft()
                self._context.firing_from = self._first_unsettled()

    def _first_unsettled(self) -> int | None:
        """Where the copies begin that the schedule does not know to be placed yet."""
        if self._state.fired_before:
            return self._state.fired_from
        return self.placed[0].begin if self.placed else None

    def _tell_fired(self, placed: Placed) -> None:
        """What has its place is told to the action log, each topic once, then to who waits, and to the figures."""
        now_ms = self._clock.now_ms()
        with self._lock:
            self._context.refuse_if_closed()
            while placed.untold:
                topic = placed.untold[0]
                entries = placed.entries[topic]
                self._writer.act(journal.Fired(topic=topic, at_ms=now_ms, entries=entries))
                if topic in self._state.topics:
                    self._state.counters["fired", topic, ""] += len(entries)
                placed.untold.popleft()  # where the next one fails, this one is not told again
        for topic in placed.entries:
            self._wakeups.wake_topic(topic)
        self.lateness.add_due(placed.batch.dues, now_ms=now_ms)
