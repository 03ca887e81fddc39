"""Firing: scheduled messages that are due get their places in their topics, once each. Not the timer, nor the schedule.

    schedule: Handed, synced -> message log: the messages, with their sequences, synced -> action log: Fired
    -> schedule: Fired

The next batch is taken from the schedule while the one before it is synced.

Killed anywhere in between, the batch comes again from the schedule when the broker opens, and what of it stands in the
message log already is known by its id. A cancel is too late from Handed on, and wins before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker.delay.batch import Batch
from broker.delay.lateness import Lateness
from broker.log.storage import Storage
from broker.mending import Mending
from broker.options import EngineOptions
from broker.scheduled_copy import fired_copies
from messaging import journal
from messaging.clock import Clock

logger = logging.getLogger(__name__)

_ROUND_MS_MAX: Final = 60_000
"""Who waits for a round of firing gives up then: the disk is stuck."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A batch that stands in the message log up to `end`: (sequence, id) by topic, of which some are to be told yet."""

    entries: dict[str, list[tuple[int, str]]]
    end: int
    untold: deque[str]


@dataclass(frozen=True, slots=True)
class Copies:
    """The frames of a batch's messages, whose topics' next sequences are `firsts`."""

    batch: Batch
    at_ms: int
    firsts: dict[str, int]
    data: bytes
    sizes: list[int]


class Firing(Mending):
    """The way from the schedule into the topics, one batch at a time."""

    def __init__(self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage) -> None:
        """For Engine.open()."""
        super().__init__(folder, clock=clock, options=options, storage=storage)
        self._turn = threading.Condition()
        self._is_firing = False
        self._rounds = 0
        self._batches: deque[Batch] = deque()  # handed out by the schedule, not settled
        self._ahead: Future[tuple[Batch, Copies] | None] | None = None  # the next batch, while one is being synced
        self._taking = ThreadPoolExecutor(1, "broker-ahead")
        self._placed: Placed | None = None
        self._is_told = False  # what is placed was, and the schedule could not settle it yet
        self.lateness = Lateness()

    def _fire_due(self) -> bool:
        """Fire a batch of what is due, or wait for one that another thread began to fire after this was called.

        True where more may be due. Not to be called under the lock. Raises StorageFailed.
        """
        for _ in range(2):
            with self._turn:
                if not self._is_firing:
                    if not self._may_be_due():
                        return False
                    self._is_firing = True
                    break
                awaited = self._rounds
                self._turn.wait_for(lambda awaited=awaited: self._rounds != awaited, _ROUND_MS_MAX / 1000)  # type: ignore[misc]
        else:
            return self._may_be_due()
        try:
            self._fire()
        finally:
            with self._turn:
                self._is_firing = False
                self._rounds += 1
                self._turn.notify_all()
        return self._may_be_due()

    def _may_be_firing(self) -> bool:
        """Whether anything is due, or on its way into its topic: asked in this order, so that nothing slips between."""
        return self._may_be_due() or self._is_firing

    def _may_be_due(self) -> bool:
        return self._has_taken() or self._schedule.is_due(self._clock.now_ms())

    def _has_taken(self) -> bool:
        """Whether a batch is on its way, in whatever state an earlier round left it."""
        return bool(self._batches) or self._ahead is not None

    def _fire(self) -> None:
        """One batch, all the way; from where it was left, where that failed. Never early: the clock is asked here.

        While it is synced and told, the next one is taken, where more is due: so their waits for the disk are one.
        """
        copies = None
        if not self._batches:
            taken = self._take()
            if taken is None:
                return
            self._batches.append(taken[0])
            copies = taken[1]
        batch = self._batches[0]
        if self._placed is None:
            if copies is None or self._is_outdated(copies):
                copies = self._copies(batch)
            with self._lock:
                self._refuse_if_closed()
                self._placed = self._place_due(batch, copies)
        self._take_ahead()
        # Synced before anybody sees them: a sequence that a power cut forgets may be given to another message, and a
        # receipt of the first would settle the second.
        self._messages.commit(self._placed.end)
        if not self._is_told:
            self._tell_fired(batch, self._placed)
            self._is_told = True
        self._schedule.fired(batch.number)
        with self._lock:
            self._firing_from = None
        self._batches.popleft()
        self._placed, self._is_told = None, False

    def _take(self) -> tuple[Batch, Copies] | None:
        """The batch that was taken ahead, or else one that is due now, with its copies."""
        ahead, self._ahead = self._ahead, None
        return self._taken() if ahead is None else ahead.result()

    def _take_ahead(self) -> None:
        """Have the next batch taken beside this one, where more is due."""
        if self._ahead is None and len(self._batches) == 1 and self._schedule.is_due(self._clock.now_ms()):
            with suppress(RuntimeError):  # it was closed meanwhile
                self._ahead = self._taking.submit(self._taken)

    def _taken(self) -> tuple[Batch, Copies] | None:
        batch = self._schedule.due(self._clock.now_ms())
        return None if batch is None else (batch, self._copies(batch))

    def _is_outdated(self, copies: Copies) -> bool:
        """Whether a topic does not end any more where the copies begin."""
        return any(self._end_of(topic) != first for topic, first in copies.firsts.items())

    def _end_of(self, topic: str) -> int:
        known = self._state.topics.get(topic)
        return 0 if known is None else known.index.end

    def _copies(self, batch: Batch) -> Copies:
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

    def _place_due(self, batch: Batch, copies: Copies) -> Placed:
        """Write due messages to the message log with their sequences, each topic's together."""
        entries: dict[str, list[tuple[int, str]]] = {}
        fresh = self._not_placed_yet(batch, entries)
        if fresh is not copies.batch or self._is_outdated(copies):
            copies = self._copies(fresh)
        counts: dict[str, int] = {}
        for topic, ids, _ in fresh.by_topic():
            first = copies.firsts[topic]
            entries.setdefault(topic, []).extend(zip(range(first, first + len(ids)), ids, strict=True))
            counts[topic] = len(ids)
        if counts:
            offsets = self._append_frames(copies.data, copies.sizes)
            if self._firing_from is None:  # else some of the batch were placed before a restart
                self._firing_from = offsets[0]
            self._place(counts, offsets, ready_at_ms=copies.at_ms)
            self._state.written_special.extend(offsets)
            self._state.recent.add_new(fresh.ids)
        if self._state.fired_before:
            for one in batch.ids:
                self._state.fired_before.pop(one, None)
        return Placed(entries, self._messages.end, deque(entries))

    def _not_placed_yet(self, batch: Batch, entries: dict[str, list[tuple[int, str]]]) -> Batch:
        """The batch without what stands in the message log since before a restart, or twice in it.

        The places of such are added to `entries`, since the action log may not tell them yet.
        """
        ids = batch.ids
        if len(set(ids)) == len(ids) and not self._state.recent.has_any(ids) and not self._state.fired_before:
            return batch
        gone: set[int] = set()
        seen: set[str] = set()
        for at, (message_id, topic) in enumerate(zip(ids, batch.topics, strict=True)):
            place = self._state.fired_before.get(message_id)
            if place is not None:
                entries.setdefault(topic, []).append((place, message_id))
            if place is not None or message_id in self._state.recent or message_id in seen:
                gone.add(at)
            seen.add(message_id)
        return batch.without(gone)

    def _tell_fired(self, batch: Batch, placed: Placed) -> None:
        """What has its place is told to the action log, each topic once, then to who waits, and to the figures."""
        now_ms = self._clock.now_ms()
        with self._lock:
            self._refuse_if_closed()
            while placed.untold:
                topic = placed.untold[0]
                entries = placed.entries[topic]
                self._act(journal.Fired(topic=topic, at_ms=now_ms, entries=entries))
                self._state.counters["fired", topic, ""] += len(entries)
                placed.untold.popleft()  # where the next one fails, this one is not told again
        for topic in placed.entries:
            self._wake_topic(topic)
        self.lateness.add_due(batch.dues, now_ms=now_ms)
