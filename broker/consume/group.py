"""One consumer group on one topic, as a state machine without I/O: time is an argument, decisions are values.

A sequence below `position` is in one of three places: `unsettled` (in flight, or waiting to become visible again),
`dead`, or nowhere: then it was acknowledged. In-flight and waiting messages stand under one order, the
time at which they are visible (again), so that expiry, retry and extension are one move.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from broker.filter import Predicate
from messaging.backoff import Backoff
from messaging.message import AckStatus, GroupConfig


@dataclass(slots=True)
class Unsettled:
    """A message that was handed out at least once and is not settled."""

    message_id: str
    visible_at_ms: int
    deliveries: int
    attempts_used: int
    life: int
    in_flight: bool
    reason: str | None = None


@dataclass(slots=True)
class Dead:
    """A message that the group gave up on."""

    message_id: str
    attempts: int
    reason: str
    dead_at_ms: int


@dataclass(frozen=True, slots=True)
class HandOut:
    """A message to hand to a consumer now."""

    sequence: int
    delivery: int
    attempt: int
    life: int


@dataclass(frozen=True, slots=True)
class Death:
    """A message that has just used up its attempts."""

    sequence: int
    message_id: str
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """A message that comes back at a time, with so many attempts used."""

    sequence: int
    message_id: str
    visible_at_ms: int
    attempts_used: int


class Group:
    """The state of one group; every method that changes it is also what replays it from the action log."""

    def __init__(self, *, name: str, config: GroupConfig, position: int) -> None:
        self.name = name
        self.config = config
        self.accepts: Predicate | None = None
        """What the group's filter takes, by the headers; None: everything. Asked of fresh messages only."""
        self.position = position
        self.paused = False
        self.life = 0
        self._sought_in_life = 0
        self.unsettled: dict[int, Unsettled] = {}
        self.dead: dict[int, Dead] = {}
        self._order: list[tuple[int, int]] = []

    # -- handing out -------------------------------------------------------------------------------------------------

    def visible_again(self, *, now_ms: int, count_max: int) -> tuple[list[int], list[Death]]:
        """Sequences that may be handed out again, and deaths by invisible times that ran out once too often.

        Changes nothing.
        """
        ready: list[int] = []
        deaths: list[Death] = []
        kept: list[tuple[int, int]] = []
        while self._order and self._order[0][0] <= now_ms and len(ready) + len(deaths) < count_max:
            visible_at_ms, sequence = heapq.heappop(self._order)
            entry = self.unsettled.get(sequence)
            if entry is None or entry.visible_at_ms != visible_at_ms:
                continue  # settled, or moved: this place in the order is old
            if kept and kept[-1] == (visible_at_ms, sequence):
                continue  # moved away and back to the same millisecond: it has two places, but comes once
            kept.append((visible_at_ms, sequence))
            used = entry.attempts_used + (1 if entry.in_flight else 0)
            if used >= self.config.max_attempts:
                deaths.append(
                    Death(sequence, entry.message_id, used, entry.reason or f"invisible time ran out, {used} attempts")
                )
            else:
                ready.append(sequence)
        for place in kept:
            heapq.heappush(self._order, place)
        return ready, deaths

    def hand_out(self, messages: Iterable[tuple[int, str]], *, visible_at_ms: int) -> list[HandOut]:
        """Hand these out, (sequence, id): fresh ones from `position` on, or ones that visible_again() named."""
        handed = []
        for sequence, message_id in messages:
            entry = self.unsettled.get(sequence)
            if entry is None:
                entry = self._begin(sequence, message_id)
            elif entry.in_flight:
                entry.attempts_used += 1  # the invisible time ran out
            entry.deliveries += 1
            entry.in_flight = True
            self._move(sequence, entry, visible_at_ms)
            handed.append(HandOut(sequence, entry.deliveries, entry.attempts_used + 1, entry.life))
        return handed

    def replay_hand_out(
        self, sequence: int, message_id: str, *, delivery: int, attempt: int, visible_at_ms: int
    ) -> None:
        """A hand-out as the action log tells it."""
        entry = self.unsettled.get(sequence)
        if entry is None:
            entry = self._begin(sequence, message_id)
        entry.deliveries, entry.attempts_used, entry.in_flight = delivery, attempt - 1, True
        self._move(sequence, entry, visible_at_ms)

    def skip(self, sequence: int) -> None:
        """Pass over a fresh sequence that has nothing to deliver, or nothing that the filter takes."""
        self.position = max(self.position, sequence + 1)

    def next_visible_ms(self) -> int | None:
        """When the next waiting or in-flight message becomes visible; None when there is none."""
        while self._order:
            visible_at_ms, sequence = self._order[0]
            entry = self.unsettled.get(sequence)
            if entry is not None and entry.visible_at_ms == visible_at_ms:
                return visible_at_ms
            heapq.heappop(self._order)
        return None

    # -- settling ----------------------------------------------------------------------------------------------------

    def ack_status(self, sequence: int, *, delivery: int, life: int) -> AckStatus:
        """What an acknowledgement would come to. Changes nothing."""
        entry = self.unsettled.get(sequence)
        if entry is not None:
            newest = entry.deliveries == delivery and entry.life == life and entry.deliveries > 0
            return AckStatus.ACKED if newest else AckStatus.STALE
        if sequence in self.dead:
            return AckStatus.STALE
        if sequence >= self.position:
            return AckStatus.UNKNOWN if life == self.life else AckStatus.STALE
        # A seek forgets who was acknowledged: what was handed out before it is no longer known by its receipt.
        return AckStatus.STALE if life < self._sought_in_life else AckStatus.ALREADY_ACKED

    def ack(self, sequence: int) -> None:
        """Settle: the message is done for this group."""
        self.unsettled.pop(sequence, None)

    def holds(self, sequence: int, *, delivery: int, life: int) -> bool:
        """Whether this delivery is the newest one of an unsettled message and has not been given back."""
        entry = self.unsettled.get(sequence)
        return entry is not None and entry.in_flight and entry.deliveries == delivery and entry.life == life

    def decide_nack(
        self, sequence: int, *, now_ms: int, delay_ms: int | None, reason: str | None, counts: bool
    ) -> Requeue | Death:
        """What giving back a held delivery comes to. Changes nothing."""
        entry = self.unsettled[sequence]
        used = entry.attempts_used + (1 if counts else 0)
        if counts and used >= self.config.max_attempts:
            return Death(sequence, entry.message_id, used, reason or f"refused by its consumer, {used} attempts")
        if delay_ms is None:
            delay_ms = self._backoff_ms(used) if counts else 0
        return Requeue(sequence, entry.message_id, now_ms + delay_ms, used)

    def decide_hold(self, sequence: int, message_id: str, *, until_ms: int) -> Requeue:
        """What holding back a message comes to that was about to be handed out. Changes nothing."""
        entry = self.unsettled.get(sequence)
        used = 0 if entry is None else entry.attempts_used + (1 if entry.in_flight else 0)
        return Requeue(sequence, message_id, until_ms, used)

    def requeue(self, decision: Requeue, *, reason: str | None) -> None:
        """Carry out a Requeue; one of a fresh message holds it back before its first hand-out."""
        entry = self.unsettled.get(decision.sequence)
        if entry is None:
            entry = self._begin(decision.sequence, decision.message_id)
        entry.in_flight, entry.attempts_used, entry.reason = False, decision.attempts_used, reason
        self._move(decision.sequence, entry, decision.visible_at_ms)

    def die(self, death: Death, *, at_ms: int) -> None:
        """Carry out a Death."""
        self.unsettled.pop(death.sequence, None)
        self.position = max(self.position, death.sequence + 1)
        self.dead[death.sequence] = Dead(death.message_id, death.attempts, death.reason, at_ms)

    def extend(self, sequence: int, *, visible_at_ms: int) -> None:
        """Keep a held delivery invisible until a time."""
        self._move(sequence, self.unsettled[sequence], visible_at_ms)

    # -- operators ---------------------------------------------------------------------------------------------------

    def redrive(self, sequences: Iterable[int], *, now_ms: int) -> list[int]:
        """Give dead letters a new life, attempts counted afresh; returns those that were dead."""
        found = [sequence for sequence in sequences if sequence in self.dead]
        if found:
            self.life += 1
        for sequence in found:
            message_id = self.dead.pop(sequence).message_id
            entry = self.unsettled[sequence] = Unsettled(message_id, now_ms, 0, 0, self.life, in_flight=False)
            self._move(sequence, entry, now_ms)
        return found

    def seek(self, position: int, *, life: int) -> None:
        """Go on from `position`: what was handed out is dropped, what lies ahead is fresh, old receipts are stale."""
        self.life = self._sought_in_life = life
        self.position = position
        self.unsettled.clear()
        self._order.clear()
        self.dead = {sequence: dead for sequence, dead in self.dead.items() if sequence < position}

    def in_flight(self) -> int:
        """How many messages consumers hold."""
        return sum(1 for entry in self.unsettled.values() if entry.in_flight)

    def _begin(self, sequence: int, message_id: str) -> Unsettled:
        entry = self.unsettled[sequence] = Unsettled(message_id, 0, 0, 0, self.life, in_flight=False)
        self.position = max(self.position, sequence + 1)
        return entry

    def _move(self, sequence: int, entry: Unsettled, visible_at_ms: int) -> None:
        entry.visible_at_ms = visible_at_ms
        heapq.heappush(self._order, (visible_at_ms, sequence))

    def _backoff_ms(self, failures: int) -> int:
        config = self.config
        backoff = Backoff(
            initial_ms=config.backoff_initial_ms, multiplier=config.backoff_multiplier, max_ms=config.backoff_max_ms
        )
        return backoff.delay_ms(failures)
