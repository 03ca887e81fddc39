"""Firing: scheduled messages that are due get their places in their topics, once each. Not the timer, nor the schedule.

    schedule: Handed, synced -> message log: the messages, with their sequences, synced -> action log: Fired
    -> schedule: Fired

Killed anywhere in between, the batch comes again from the schedule when the broker opens, and what of it stands in the
message log already is known by its id. A cancel is too late from Handed on, and wins before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from broker.core import Core
from broker.delay.lateness import Lateness
from broker.delay.store import Batch, Timed
from broker.log.storage import Storage
from broker.options import EngineOptions
from broker.scheduled_copy import fired_copy
from messaging import journal
from messaging.clock import Clock

logger = logging.getLogger(__name__)

_ROUND_MS_MAX: Final = 60_000
"""Who waits for a round of firing gives up then: the disk is stuck."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A batch that stands in the message log up to `end`: (sequence, id) by topic."""

    entries: dict[str, list[tuple[int, str]]]
    end: int


class Firing(Core):
    """The way from the schedule into the topics, one batch at a time."""

    def __init__(self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage) -> None:
        """For Engine.open()."""
        super().__init__(folder, clock=clock, options=options, storage=storage)
        self._turn = threading.Condition()
        self._is_firing = False
        self._rounds = 0
        self._batches: deque[Batch] = deque()  # handed out by the schedule, not settled
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

    def _may_be_due(self) -> bool:
        return bool(self._batches) or self._schedule.is_due(self._clock.now_ms())

    def _fire(self) -> None:
        """One batch, all the way; from where it was left, where that failed. Never early: the clock is asked here."""
        if not self._batches:
            batch = self._schedule.due(self._clock.now_ms())
            if batch is None:
                return
            self._batches.append(batch)
        batch = self._batches[0]
        if self._placed is None:
            with self._lock:
                self._refuse_if_closed()
                self._placed = self._place_due(batch.messages, now_ms=self._clock.now_ms())
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

    def _place_due(self, messages: Sequence[Timed], *, now_ms: int) -> Placed:
        """Write due messages to the message log with their sequences, each topic's together."""
        entries: dict[str, list[tuple[int, str]]] = {}
        by_topic: dict[str, list[Timed]] = {}
        for one in self._not_placed_yet(messages, entries):
            by_topic.setdefault(one.topic, []).append(one)
        payloads: list[bytes] = []
        for topic, group in by_topic.items():
            numbered = list(zip(count(self._state.topic(topic).index.end), (one.id for one in group), strict=False))
            payloads += [
                fired_copy(one.payload, sequence=sequence, stored_at_ms=now_ms)
                for one, (sequence, _) in zip(group, numbered, strict=True)
            ]
            entries.setdefault(topic, []).extend(numbered)
        if payloads:
            offsets = self._append_messages(payloads)
            if self._firing_from is None:  # else some of the batch were placed before a restart
                self._firing_from = offsets[0]
            self._place({topic: len(group) for topic, group in by_topic.items()}, offsets, ready_at_ms=now_ms)
            self._state.written_special.extend(offsets)
            self._state.recent.add_new([one.id for group in by_topic.values() for one in group])
        return Placed(entries, self._messages.end)

    def _not_placed_yet(
        self, messages: Sequence[Timed], entries: dict[str, list[tuple[int, str]]]
    ) -> list[Timed]:  # fmt: skip
        """The messages without those that stand in the message log since before a restart, or twice among these.

        The places of such are added to `entries`, since the action log may not tell them yet.
        """
        ids = [one.id for one in messages]
        if len(set(ids)) == len(ids) and not self._state.recent.has_any(ids) and not self._state.fired_before:
            return list(messages)
        fresh: dict[str, Timed] = {}
        for one in messages:
            place = self._state.fired_before.pop(one.id, None)
            if place is not None:
                entries.setdefault(one.topic, []).append((place, one.id))
            elif one.id not in self._state.recent:
                fresh.setdefault(one.id, one)
        return list(fresh.values())

    def _tell_fired(self, batch: Batch, placed: Placed) -> None:
        """What has its place is told to the action log, to who waits, and to the figures."""
        now_ms = self._clock.now_ms()
        with self._lock:
            self._refuse_if_closed()
            for topic, entries in placed.entries.items():
                self._act(journal.Fired(topic=topic, at_ms=now_ms, entries=entries))
                self._state.counters["fired", topic, ""] += len(entries)
        for topic in placed.entries:
            self._wake_topic(topic)
        self.lateness.add_all(max(0, now_ms - one.due_ms) for one in batch.messages)
