"""One consumer group of the in-memory broker: which message is where. Time is an argument; no locks, no topics."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outbox_core.common.backoff import Backoff
from outbox_core.messages.failure_history import EXPIRED, REFUSED, History, failed, with_count
from outbox_core.messages.message import AckStatus, GroupConfig, NackStatus

_NOWHERE: Final = -1


class SlotState(StrEnum):
    """Where a message stands in a group that has seen it."""

    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    ACKED = "acked"
    DEAD = "dead"


@dataclass(slots=True)
class Slot:
    """One message in one group, from its first hand-out on. `number` is that of its newest hand-out."""

    sequence: int
    state: SlotState = SlotState.WAITING
    number: int = 0
    attempts: int = 0
    visible_at_ms: int = 0
    reason: str = ""
    history: History = ()
    dead_at_ms: int = 0
    in_order: bool = False
    """Whether others of its key wait for it."""


_OPEN: Final = frozenset({SlotState.WAITING, SlotState.IN_FLIGHT})


class MemoryGroup:
    """The state of a group. A sequence at `position` or above is fresh; each one below has a slot, unless it waits for
    an earlier one of its key.
    """

    def __init__(self, *, name: str, config: GroupConfig, position: int) -> None:
        self.name = name
        self.config = config
        self.position: int = position
        self.paused = False
        self._slots: dict[int, Slot] = {}
        self._passed: list[int] = []
        self._numbers = 0
        self._sought_at_number = 0
        self._visible: list[tuple[int, int]] = []

    # -- handing out -------------------------------------------------------------------------------------------------

    def take(
        self, *, end: int, count_max: int, now_ms: int, invisible_ms: int, key_of: Callable[[int], str | None]
    ) -> list[Slot]:
        """Hand out what came back, then fresh sequences below `end`; nothing while the group is paused."""
        if self.paused:
            return []
        slots = list(self._come_back(count_max=count_max, now_ms=now_ms))
        if self.config.ordered or self._passed:
            slots += self._next_of_keys(end=end, count_max=count_max - len(slots), key_of=key_of)
        else:
            for sequence in range(self.position, min(end, self.position + count_max - len(slots))):
                slots.append(self._slots.setdefault(sequence, Slot(sequence)))
                self.position = sequence + 1
        for slot in slots:
            if slot.state is SlotState.IN_FLIGHT:
                slot.history = failed(slot.history, EXPIRED)
            self._numbers += 1
            slot.state, slot.number = SlotState.IN_FLIGHT, self._numbers
            slot.attempts += 1
            self._hide(slot, until_ms=now_ms + invisible_ms)
        return slots

    def next_visible_ms(self) -> int | None:
        """When something comes back next; None where nothing will, or while the group is paused."""
        while self._visible and self._moved(*self._visible[0]):
            heapq.heappop(self._visible)
        return self._visible[0][0] if self._visible and not self.paused else None

    def bury_expired(self, now_ms: int) -> None:
        """Make dead letters of those whose last attempt's invisible time has run out."""
        for slot in list(self._slots.values()):
            if slot.state in _OPEN and slot.visible_at_ms <= now_ms:
                self._bury_if_used_up(slot, now_ms=now_ms)

    # -- settling ----------------------------------------------------------------------------------------------------

    def ack(self, sequence: int, number: int) -> AckStatus:
        """Settle. A hand-out counts until the message is handed out again, even after its time has run out."""
        slot = self._slots.get(sequence)
        if slot is None:  # never handed out, or forgotten by a seek
            return AckStatus.STALE if 0 < number <= self._numbers else AckStatus.UNKNOWN
        if slot.state is SlotState.ACKED and number > self._sought_at_number:
            return AckStatus.ALREADY_ACKED
        if slot.state in {SlotState.ACKED, SlotState.DEAD} or slot.number != number:
            return AckStatus.STALE
        slot.state = SlotState.ACKED
        return AckStatus.ACKED

    def nack(
        self, sequence: int, number: int, *, now_ms: int, delay_ms: int | None, reason: str, counts: bool
    ) -> NackStatus:
        """Give back; after the last attempt that counts it is a dead letter."""
        slot = self._held(sequence, number)
        if slot is None:
            return NackStatus.STALE
        slot.reason = reason
        if counts:
            slot.history = failed(slot.history, reason or REFUSED)
        if not counts:
            slot.attempts -= 1
        elif slot.attempts >= self.config.max_attempts:
            self._bury(slot, now_ms=now_ms, reason=reason or with_count(REFUSED, slot.attempts))
            return NackStatus.DEAD
        if delay_ms is None:
            delay_ms = self._backoff_ms(slot.attempts) if counts else 0
        slot.state = SlotState.WAITING
        self._hide(slot, until_ms=now_ms + delay_ms)
        return NackStatus.REQUEUED

    def extend(self, sequence: int, number: int, *, until_ms: int) -> bool:
        """Keep a held message invisible until then; False when this hand-out does not hold it any more."""
        slot = self._held(sequence, number)
        if slot is not None:
            self._hide(slot, until_ms=until_ms)
        return slot is not None

    # -- operators ---------------------------------------------------------------------------------------------------

    def dead(self) -> list[Slot]:
        """The dead letters by sequence."""
        return sorted((slot for slot in self._slots.values() if slot.state is SlotState.DEAD), key=_by_sequence)

    def redrive(self, slot: Slot, *, now_ms: int) -> None:
        """Give a dead letter a new life; receipts of the old one are stale."""
        slot.state, slot.number, slot.attempts, slot.reason = SlotState.WAITING, 0, 0, ""
        slot.history = ()
        slot.in_order = False
        self._hide(slot, until_ms=now_ms)

    def redriving(self, *, now_ms: int) -> int:
        """How many redriven messages are not ready yet."""
        waiting = (slot for slot in self._slots.values() if slot.state is SlotState.WAITING and not slot.number)
        return sum(slot.visible_at_ms > now_ms for slot in waiting)

    def seek(self, position: int) -> None:
        """Go on from there: what lies ahead is fresh, what was handed out is forgotten, old receipts are stale."""
        self._sought_at_number = self._numbers
        self._slots = {slot.sequence: slot for slot in self.dead() if slot.sequence < position}
        self._passed = []
        self.position = position

    def count(self, state: SlotState) -> int:
        """How many messages are in a state."""
        passed = len(self._passed) if state is SlotState.WAITING else 0
        return passed + sum(slot.state is state for slot in self._slots.values())

    def oldest_unsettled(self) -> int:
        """The lowest sequence that is not settled; `position` where all are that were handed out."""
        found = [slot.sequence for slot in self._slots.values() if slot.state in _OPEN]
        return min([*found, *self._passed[:1], self.position])

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _next_of_keys(self, *, end: int, count_max: int, key_of: Callable[[int], str | None]) -> list[Slot]:
        """The first of each key that has none in hand. The others are passed; looks through all, as a test may."""
        busy = {key_of(slot.sequence) for slot in self._slots.values() if slot.in_order and slot.state in _OPEN}
        waiting = [*self._passed, *range(self.position, end)]
        found: list[Slot] = []
        self._passed = []
        for place, sequence in enumerate(waiting):
            if len(found) >= count_max:
                self._passed += [one for one in waiting[place:] if one < self.position]
                break
            key = key_of(sequence)
            self.position = max(self.position, sequence + 1)
            if key is not None and key in busy:
                self._passed.append(sequence)
                continue
            busy.add(key)
            found.append(self._slots.setdefault(sequence, Slot(sequence, in_order=key is not None)))
        return found

    def _come_back(self, *, count_max: int, now_ms: int) -> Iterator[Slot]:
        found = 0
        while self._visible and self._visible[0][0] <= now_ms and found < count_max:
            visible_at_ms, sequence = heapq.heappop(self._visible)
            if self._moved(visible_at_ms, sequence):
                continue
            slot = self._slots[sequence]
            slot.visible_at_ms = _NOWHERE  # it may have this place in the order twice, and comes once
            if not self._bury_if_used_up(slot, now_ms=now_ms):
                found += 1
                yield slot

    def _moved(self, visible_at_ms: int, sequence: int) -> bool:
        """Whether this place in the order is an old one: the message was settled, or given another time since."""
        slot = self._slots.get(sequence)
        settled = slot is None or slot.state in {SlotState.ACKED, SlotState.DEAD}
        return settled or (slot is not None and slot.visible_at_ms != visible_at_ms)

    def _held(self, sequence: int, number: int) -> Slot | None:
        slot = self._slots.get(sequence)
        return slot if slot is not None and slot.state is SlotState.IN_FLIGHT and slot.number == number else None

    def _hide(self, slot: Slot, *, until_ms: int) -> None:
        slot.visible_at_ms = until_ms
        heapq.heappush(self._visible, (until_ms, slot.sequence))

    def _bury_if_used_up(self, slot: Slot, *, now_ms: int) -> bool:
        if slot.attempts < self.config.max_attempts:
            return False
        if slot.state is SlotState.IN_FLIGHT:
            slot.history = failed(slot.history, EXPIRED)
        self._bury(slot, now_ms=now_ms, reason=slot.reason or with_count(EXPIRED, slot.attempts))
        return True

    @staticmethod
    def _bury(slot: Slot, *, now_ms: int, reason: str) -> None:
        slot.state, slot.reason, slot.dead_at_ms = SlotState.DEAD, reason, now_ms

    def _backoff_ms(self, attempts: int) -> int:
        config = self.config
        return Backoff(
            initial_ms=config.backoff_initial_ms, multiplier=config.backoff_multiplier, max_ms=config.backoff_max_ms
        ).delay_ms(attempts)


def _by_sequence(slot: Slot) -> int:
    return slot.sequence
