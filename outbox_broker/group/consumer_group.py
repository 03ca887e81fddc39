"""One consumer group on one topic, as a state machine without I/O: time is an argument, decisions are values.

A sequence below `position` is in one of three places: `unsettled` (in flight, or waiting to become visible again),
`dead`, or nowhere: then it was acknowledged. This is the group's pull log (QMQ, 2018), kept as runs of messages.

A delivery number is the count of the broker's openings, times 2**32, plus the count of hand-outs: so a hand-out that
a power cut made forgotten shares its number with no later one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from outbox_broker.filter import Predicate
from outbox_broker.group.dead_letters import DeadLetters, DeadRun, Weight
from outbox_broker.group.failure_reasons import ReasonBudget, Reasons
from outbox_broker.group.in_flight import InFlightCount, InFlightRun, Unsettled
from outbox_broker.group.key_order import KeyOrder
from outbox_core.common.backoff import Backoff
from outbox_core.common.pace import Pace
from outbox_core.messages.failure_history import EXPIRED, REFUSED, failed, with_count, without_count
from outbox_core.messages.message import AckStatus, GroupConfig

OPENING_SHIFT: Final = 32


@dataclass(frozen=True, slots=True)
class HandOut:
    """Messages to hand to a consumer now, alike: `count` of them from the sequence `first` on."""

    first: int
    count: int
    delivery: int
    attempt: int
    life: int
    again: bool = False

    @property
    def end(self) -> int:
        """The sequence behind the last one."""
        return self.first + self.count


class DeathCause(StrEnum):
    """What made a dead letter: its consumer's word, an invisible time, fewer attempts than it has had, a bad record."""

    REJECTED = "rejected"
    EXPIRED = "expired"
    DELIVERY_LIMIT = "delivery_limit"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Death:
    """Messages that have just used up their attempts: `count` of them from the sequence `first` on."""

    first: int
    count: int
    attempts: int
    reason: str
    cause: DeathCause = DeathCause.DELIVERY_LIMIT


@dataclass(frozen=True, slots=True)
class Requeue:
    """Messages that come back at a time, with so many attempts used: `count` of them from the sequence `first` on."""

    first: int
    count: int
    visible_at_ms: int
    attempts_used: int


class Group:
    """The state of one group; every method that changes it is also what replays it from the action log."""

    def __init__(
        self, *, name: str, config: GroupConfig, position: int, tally: InFlightCount | None = None,
        dead_weight: Weight | None = None, reason_budget: ReasonBudget | None = None, life: int = 0,
    ) -> None:  # fmt: skip
        """`life`: above that of any receipt which may be about from a deleted group of the same name."""
        self.name = name
        self.config = config
        self.position = position
        self.accepts: Predicate | None = None
        """What the group's filter takes, by the headers; None: everything. Asked of fresh messages only."""
        self.paused = False
        self.is_deleted = False
        """Whoever holds it without the lock looks at this under the lock."""
        self.life = life
        self.sought_in_life = life
        self.reasons = Reasons(reason_budget)  # of what is unsettled: dead letters have their own
        self.unsettled = Unsettled(tally, self.reasons)
        self.dead = DeadLetters(dead_weight)
        self.redrive_pace = Pace()
        self.order: KeyOrder | None = None
        """Of a group that is ordered, or was and has filed messages left."""
        self.pulling = threading.Lock()
        """Held while a pull chooses and reads; taken before the engine's lock, never under it."""

    # -- handing out -------------------------------------------------------------------------------------------------

    def visible_again(self, *, now_ms: int, count_max: int) -> tuple[list[tuple[int, int]], list[Death]]:
        """Runs (first, end) that may be handed out again, of `count_max` messages together, and deaths by invisible
        times that ran out once too often. Changes nothing.
        """
        ready: list[tuple[int, int]] = []
        deaths: list[Death] = []
        left = count_max
        with closing(self.unsettled.visible(now_ms)) as found:
            for run in found:
                used = run.attempts_used + (1 if run.in_flight else 0)
                count = min(run.count, left)
                left -= count
                if used < self.config.max_attempts:
                    ready.append((run.first, run.first + count))
                else:
                    reason = self.reason_of(run) or with_count(EXPIRED, used)
                    cause = DeathCause.EXPIRED if run.in_flight else DeathCause.DELIVERY_LIMIT
                    deaths.append(Death(run.first, count, used, reason, cause))
                if left <= 0:
                    break
        return ready, deaths

    def returning(self, runs: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """How many of what visible_again() named no consumer holds, and how many of these were redriven."""
        found = [(one, end - first) for first, end in runs if (one := self.unsettled.find(first)) is not None]
        back = sum(count for one, count in found if not one.in_flight)
        return back, sum(count for one, count in found if one.is_redriven)

    def is_visible(self, first: int, end: int, *, now_ms: int) -> bool:
        """Whether all of these are unsettled and visible: what visible_again() named, if it still holds."""
        while first < end:
            held = self.unsettled.find(first)
            if held is None or held.visible_at_ms > now_ms:
                return False
            first = held.end
        return True

    def is_filed(self, first: int, end: int) -> bool:
        """Whether all of these were filed in the group's order, and not handed out."""
        return self.order is not None and self.order.is_open(first, end)

    def is_open(self, first: int, end: int) -> bool:
        """Whether all of these are in hand, or have yet to be: fresh, or filed in the group's order."""
        while first < min(end, self.position):
            held = self.unsettled.find(first)
            if held is None and not self.is_filed(first, first + 1):
                return False
            first = first + 1 if held is None else held.end
        return True

    def decide_hand_out(self, runs: Iterable[tuple[int, int]], *, opening: int = 0) -> list[HandOut]:
        """What handing these out comes to, (first, end): fresh ones, or ones that visible_again() named.

        Changes nothing. `opening` is the count of the broker's openings.
        """
        handed: list[HandOut] = []
        least = opening << OPENING_SHIFT
        for first, end in runs:
            place = first
            for held in self.unsettled.between(first, end):
                if held.first > place:
                    handed.append(HandOut(place, held.first - place, least + 1, 1, self.life))
                    place = held.first
                stop = min(held.end, end)
                used = held.attempts_used + (1 if held.in_flight else 0)  # in flight: the invisible time ran out
                delivery = max(held.delivery, least) + 1
                again = held.delivery > 0
                handed.append(HandOut(place, stop - place, delivery, used + 1, held.life, again=again))
                place = stop
            if place < end:
                handed.append(HandOut(place, end - place, least + 1, 1, self.life))
        return handed

    def hand_out(self, first: int, count: int, *, delivery: int, attempt: int, visible_at_ms: int) -> None:
        """Carry out a HandOut."""
        if self.order is not None:
            self.order.hand_out(first, first + count)
        for held in self._begun(first, first + count):
            self.unsettled.add(
                replace(
                    held, delivery=delivery, attempts_used=attempt - 1, in_flight=True, visible_at_ms=visible_at_ms,
                    history=failed(held.history, self.reasons.number_of(EXPIRED)) if held.in_flight else held.history,
                )
            )  # fmt: skip

    def file(self, runs: Iterable[tuple[int, Iterable[int]]], *, position: int) -> None:
        """Come past messages up to a position, those that may be handed out later in order: (first, hashes of keys)."""
        for first, keys in runs:
            self.order = KeyOrder() if self.order is None else self.order
            self.order.file(first, keys)
        self.position = max(self.position, position)

    def skip(self, sequence: int) -> None:
        """Pass over a fresh sequence that has nothing to deliver, or nothing that the filter takes."""
        self.position = max(self.position, sequence + 1)

    def reason_of(self, held: InFlightRun) -> str | None:
        """What the consumer said of the last attempt at these messages."""
        return None if held.reason is None else self.reasons.text(held.reason)

    def next_visible_ms(self) -> int | None:
        """When the next waiting or in-flight message becomes visible; None when there is none."""
        return self.unsettled.next_visible_ms()

    def oldest(self) -> int:
        """The first sequence that the group may still deliver, dead letters among them."""
        return min(self.oldest_unsettled(), self.position if self.dead.oldest is None else self.dead.oldest)

    def oldest_unsettled(self) -> int:
        """The first sequence that is not settled, or has not been come past."""
        filed = None if self.order is None else self.order.oldest
        return min(place for place in (self.unsettled.oldest, filed, self.position) if place is not None)

    def waiting(self) -> int:
        """How many messages that the group came past wait to be handed out, again or for the first time."""
        filed = 0 if self.order is None else len(self.order)
        return filed + len(self.unsettled) - self.unsettled.in_flight

    # -- settling ----------------------------------------------------------------------------------------------------

    def ack_status(self, sequence: int, *, delivery: int, life: int) -> AckStatus:
        """What an acknowledgement would come to. Changes nothing."""
        held = self.unsettled.find(sequence)
        if held is not None:
            newest = held.delivery == delivery and held.life == life and held.delivery > 0
            return AckStatus.ACKED if newest else AckStatus.STALE
        if sequence in self.dead:
            return AckStatus.STALE
        if sequence >= self.position or (self.order is not None and self.order.is_open(sequence, sequence + 1)):
            return AckStatus.UNKNOWN if life == self.life else AckStatus.STALE
        # A seek forgets who was acknowledged: what was handed out before it is no longer known by its receipt.
        return AckStatus.STALE if life < self.sought_in_life else AckStatus.ALREADY_ACKED

    def ack(self, first: int, count: int = 1) -> None:
        """Settle: these messages are done for this group, also those that it never got (filtered out)."""
        self.unsettled.settle(first, first + count)
        self.position = max(self.position, first + count)
        if self.order is not None:
            self.order.end(first, first + count)

    def held_of(self, first: int, end: int, *, delivery: int, life: int) -> list[tuple[int, int]]:
        """Those of these sequences that this delivery of this life holds, not given back, as runs that fare alike."""
        return [
            (max(first, held.first), min(end, held.end))
            for held in self.unsettled.between(first, end)
            if held.in_flight and held.delivery == delivery and held.life == life
        ]

    def decide_nack(
        self, first: int, count: int = 1, *, now_ms: int, delay_ms: int | None, reason: str | None, counts: bool
    ) -> Requeue | Death:
        """What giving back held deliveries that fare alike comes to. Changes nothing."""
        held = self.unsettled.find(first)
        if held is None:
            raise KeyError(f"sequence {first} is not in hand")
        used = held.attempts_used + (1 if counts else 0)
        if counts and used >= self.config.max_attempts:
            reason = reason or with_count(REFUSED, used)
            return Death(first, count, used, reason, DeathCause.REJECTED)
        if delay_ms is None:
            delay_ms = self._backoff_ms(used) if counts else 0
        return Requeue(first, count, now_ms + delay_ms, used)

    def decide_hold(self, sequence: int, *, until_ms: int) -> Requeue:
        """What holding back a message comes to that was about to be handed out. Changes nothing."""
        held = self.unsettled.find(sequence)
        used = 0 if held is None else held.attempts_used + (1 if held.in_flight else 0)
        return Requeue(sequence, 1, until_ms, used)

    def requeue(self, decision: Requeue, *, reason: str | None) -> None:
        """Carry out a Requeue; one of fresh messages holds them back before their first hand-out."""
        if self.order is not None:
            self.order.hand_out(decision.first, decision.first + decision.count)
        number = self.reasons.number_of(reason) if reason else None
        last = self.reasons.number_of(without_count(reason or REFUSED, decision.attempts_used))
        for held in self._begun(decision.first, decision.first + decision.count):
            counts = decision.attempts_used > held.attempts_used
            self.unsettled.add(
                replace(
                    held, in_flight=False, attempts_used=decision.attempts_used, reason=number,
                    visible_at_ms=decision.visible_at_ms,
                    history=failed(held.history, last) if counts else held.history,
                )
            )  # fmt: skip
        self.reasons.forget_unused()

    def die(self, death: Death, *, at_ms: int) -> None:
        """Carry out a Death."""
        first, end = death.first, death.first + death.count
        last = EXPIRED if death.cause is DeathCause.EXPIRED else without_count(death.reason, death.attempts)
        for held in self._begun(first, end):
            # The last attempt may have been told as the death was put off.
            counts = death.attempts > 0 and (held.in_flight or not held.history)
            history = self.reasons.history_of(held.history)
            history = failed(history, last) if counts else history
            self.dead.add(DeadRun(held.first, held.end, death.attempts, death.reason, at_ms, history))
        self.reasons.forget_unused()
        if self.order is not None:
            self.order.end(first, end)

    def extend(self, first: int, count: int = 1, *, visible_at_ms: int) -> None:
        """Keep held deliveries invisible until a time."""
        for held in self.unsettled.take(first, first + count):
            self.unsettled.add(replace(held, visible_at_ms=visible_at_ms))

    # -- operators ---------------------------------------------------------------------------------------------------

    def redrive(self, ranges: Sequence[tuple[int, int]], *, now_ms: int, per_second: int | None = None) -> int:
        """Give dead letters a new life, attempts counted afresh: those of ranges (first, end) in order that are dead.

        Returns how many. No order holds them.
        """
        found = self.dead.take(ranges)
        if found:
            self.life += 1
        for first, end in found:
            place = first
            while place < end:
                ready_ms, count = self.redrive_pace.next_ms(now_ms, per_second=per_second, count_max=end - place)
                self.unsettled.add(InFlightRun(place, place + count, ready_ms, 0, 0, self.life, in_flight=False))
                place += count
        return sum(end - first for first, end in found)

    def redriving(self, *, now_ms: int) -> int:
        """How many redriven messages are not ready yet."""
        if self.redrive_pace.second_ms <= now_ms:
            return 0
        return sum(run.count for run in self.unsettled if run.is_redriven and run.visible_at_ms > now_ms)

    def seek(self, position: int, *, life: int) -> None:
        """Go on from `position`: what was handed out is dropped, what lies ahead is fresh, old receipts are stale."""
        self.life = self.sought_in_life = life
        self.position = position
        self.unsettled.clear()
        if self.order is not None:
            self.order.clear()
        self.dead.take_from(position)

    def unread_before(self, position: int) -> int:
        """How many messages below a sequence the group has not settled, dead letters among them."""
        filed = 0 if self.order is None else self.order.count_before(position)
        held = sum(min(one.end, position) - one.first for one in self.unsettled.between(0, position))
        return max(0, position - self.position) + filed + held + self.dead.count_before(position)

    def drop_before(self, position: int) -> int:
        """Let go of everything below a sequence, which retention dropped; returns how many were not settled."""
        lost = self.unread_before(position)
        self.unsettled.settle(0, position)
        if self.order is not None:
            self.order.drop_before(position)
        self.dead.take_before(position)
        self.position = max(self.position, position)
        return lost

    def in_flight(self) -> int:
        """How many messages consumers hold."""
        return self.unsettled.in_flight

    def held_at(self, now_ms: int) -> int:
        """How many messages consumers hold whose invisible time has not run out."""
        return sum(run.count for run in self.unsettled if run.in_flight and run.visible_at_ms > now_ms)

    def delete(self) -> None:
        """Let go of everything, for good."""
        self.is_deleted = True
        self.unsettled.clear()
        self.dead.take_from(0)
        if self.order is not None:
            self.order.clear()

    def _begun(self, first: int, end: int) -> list[InFlightRun]:
        """What is held of these, taken out, with whatever is not held yet as runs of its own, between them."""
        known = self.unsettled.take(first, end)
        self.position = max(self.position, end)
        if len(known) == 1 and known[0].count == end - first:
            return known
        found: list[InFlightRun] = []
        place = first
        for held in [*known, None]:
            until = end if held is None else held.first
            if until > place:
                found.append(InFlightRun(place, until, 0, 0, 0, self.life, in_flight=False))
            if held is not None:
                found.append(held)
                place = held.end
        return found

    def _backoff_ms(self, failures: int) -> int:
        config = self.config
        backoff = Backoff(
            initial_ms=config.backoff_initial_ms, multiplier=config.backoff_multiplier, max_ms=config.backoff_max_ms
        )
        return backoff.delay_ms(failures)
