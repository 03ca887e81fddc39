"""One consumer group on one topic, as a state machine without I/O: time is an argument, decisions are values.

A sequence below `position` is in one of three states: `unsettled` (in flight, or waiting to become visible again),
`dead`, or acknowledged, which needs no entry. This is the group's pull log (QMQ, 2018), kept as runs of messages.
A delivery number is the broker's epoch (its count of starts) times 2**32, plus the count of deliveries: so a delivery
that a power failure erased shares its number with no later one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import merge
from typing import Final

from outbox_broker.filter import Predicate
from outbox_broker.group.dead_letters import DeadLetters, DeadRun, MemoryUse
from outbox_broker.group.failure_reasons import ReasonBudget, Reasons
from outbox_broker.group.in_flight import InFlightCount, InFlightRun, UnsettledRuns
from outbox_broker.group.key_order import KeyOrder
from outbox_broker.group.messages_aside import MessagesAside, OwnPlace
from outbox_broker.log.topic_index import PlaceRun, TopicIndex
from outbox_core.common.backoff import Backoff
from outbox_core.common.rate_limit import RateLimit
from outbox_core.messages.failure_history import EXPIRED, REFUSED, failed, with_count, without_count
from outbox_core.messages.message import AckStatus, GroupConfig

EPOCH_SHIFT: Final = 32
EDITS_REMEMBERED_MAX: Final = 10_000
"""Ids of the newest edited messages that a group remembers, so that a repeat of an edit is known."""
MovedEntry = tuple[int, int, int, int]
"""A message that retention moved: its sequence, then the fields of its OwnPlace."""


@dataclass(frozen=True, slots=True)
class DeliveryRun:
    """Messages to deliver to a consumer now, with equal attributes: `count` of them from the sequence `first` on."""

    first: int
    count: int
    delivery: int
    attempt: int
    generation: int
    again: bool = False
    expired: bool = False
    """Whether the invisible time of a delivery ran out, and no consumer has tried these messages since."""

    @property
    def end(self) -> int:
        """Returns the sequence after the last one."""
        return self.first + self.count


class DeathCause(StrEnum):
    """Why a message became a dead letter: a consumer's rejection, expiry, a lowered attempt limit, or damage."""

    REJECTED = "rejected"
    EXPIRED = "expired"
    DELIVERY_LIMIT = "delivery_limit"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Death:
    """Messages that have just become dead letters: `count` of them from the sequence `first` on."""

    first: int
    count: int
    attempts: int
    reason: str
    cause: DeathCause = DeathCause.DELIVERY_LIMIT


@dataclass(frozen=True, slots=True)
class Requeue:
    """Messages that become visible again at a time, with attempts used: `count` from the sequence `first` on."""

    first: int
    count: int
    visible_at_ms: int
    attempts_used: int


class Group:
    """The state of one group; the methods that change it also replay the action log."""

    def __init__(
        self, *, name: str, config: GroupConfig, position: int, total: InFlightCount | None = None,
        dead_letter_memory: MemoryUse | None = None, reason_budget: ReasonBudget | None = None, generation: int = 0,
    ) -> None:  # fmt: skip
        """`generation`: above that of any receipt that may exist from a deleted group of the same name."""
        self.name = name
        self.config = config
        self.position = position
        self.accepts: Predicate | None = None
        """The group's filter on the headers; None: all messages match. Applied to fresh messages only."""
        self.paused = False
        self.is_deleted = False
        """Callers that keep a reference without the lock check this under the lock."""
        self.generation = generation
        self.seek_generation = generation
        self.reasons = Reasons(reason_budget)  # of unsettled messages: dead letters have their own
        self.unsettled = UnsettledRuns(total, self.reasons)
        self.dead = DeadLetters(dead_letter_memory)
        self.redriven = DeadLetters(dead_letter_memory)
        """How those died that were redriven and not delivered since: by it a stopped redrive leaves them as before."""
        self.aside = MessagesAside(dead_letter_memory)
        """Messages that have a place of their own, until they are settled."""
        self.moved_to = 0
        """Whatever the group may still deliver from below this sequence has a place of its own."""
        self.moves = 0
        """A count of such moves: whoever read without the lock sees whether there were any between."""
        self.edited_ids: dict[str, None] = {}
        """Ids of the newest edited messages, oldest first."""
        self.redrive_pace = RateLimit()
        self.redrive_stops = 0
        """A count of stopped redrives since the start: one that is under way sees that it is to end."""
        self.deliveries = 0
        """A count of deliveries: whoever looks twice sees whether there were any between."""
        self.pulled_at_ms = 0
        """When a pull last asked for messages, since the broker's start; 0: none has."""
        self.order: KeyOrder | None = None
        """Set if the group is ordered, or was and still has filed messages."""
        self.fresh_first = False
        """Whether fresh messages get the odd place of the next pull that they share with retries; not replayed."""
        self.pulling = threading.Lock()
        """Held while a pull selects and reads messages; acquired before the engine's lock, never under it."""

    # -- handing out -------------------------------------------------------------------------------------------------

    def visible_again(
        self, *, now_ms: int, count_max: int, isolates: bool = False
    ) -> tuple[list[tuple[int, int]], list[Death]]:
        """Returns the runs (first, end) that may be redelivered, `count_max` messages in total, and the dead letters
        among messages whose invisible time expired on the last attempt. Changes nothing.

        `isolates`: messages that are suspected (is_suspected) come by themselves, half as many together as before. So
        the one that ends its consumer is alone after a few deliveries, and only its attempts are used up.
        """
        ready: list[tuple[int, int]] = []
        deaths: list[Death] = []
        count_left, taken = count_max, 0
        are_suspected: bool | None = None
        with closing(self.unsettled.visible(now_ms)) as visible_runs:
            for run in visible_runs:
                if isolates:
                    are_suspected = run.is_suspected if are_suspected is None else are_suspected
                    if run.is_suspected is not are_suspected:
                        break
                    if are_suspected:
                        count_left = min(count_left, run.suspects_by_now // 2 - taken)
                        if count_left <= 0:
                            break
                used = run.attempts_by_now
                count = min(run.count, count_left)
                count_left, taken = count_left - count, taken + count
                if used < self.config.max_attempts:
                    ready.append((run.first, run.first + count))
                else:
                    reason = self.reason_of(run) or with_count(EXPIRED, used)
                    cause = DeathCause.EXPIRED if run.in_flight else DeathCause.DELIVERY_LIMIT
                    deaths.append(Death(run.first, count, used, reason, cause))
                if count_left <= 0:
                    break
        return ready, deaths

    def returning(self, runs: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Returns how many messages in runs of visible_again() are not in flight, and how many were redriven."""
        run_counts = [(run, end - first) for first, end in runs if (run := self.unsettled.find(first)) is not None]
        back = sum(count for run, count in run_counts if not run.in_flight)
        return back, sum(count for run, count in run_counts if run.redriven)

    def is_suspected(self, sequence: int) -> bool:
        """Returns whether a message was delivered with others to a consumer that let their invisible time run out."""
        run = self.unsettled.find(sequence)
        return run is not None and run.is_suspected

    def is_visible(self, first: int, end: int, *, now_ms: int) -> bool:
        """Returns whether all of these are still unsettled and visible, as visible_again() reported."""
        while first < end:
            run = self.unsettled.find(first)
            if run is None or run.visible_at_ms > now_ms:
                return False
            first = run.end
        return True

    def is_filed(self, first: int, end: int) -> bool:
        """Returns whether all of these are filed in the group's key order and not delivered."""
        return self.order is not None and self.order.is_open(first, end)

    def is_open(self, first: int, end: int) -> bool:
        """Returns whether all of these are unsettled: in flight, waiting, fresh, or filed in the group's key order."""
        while first < min(end, self.position):
            run = self.unsettled.find(first)
            if run is None and not self.is_filed(first, first + 1):
                return False
            first = first + 1 if run is None else run.end
        return True

    def decide_delivery(self, runs: Iterable[tuple[int, int]], *, epoch: int = 0) -> list[DeliveryRun]:
        """Decide the deliveries for runs (first, end) of fresh messages or of messages that visible_again() returned.

        Changes nothing. `epoch` is the broker's epoch: its count of starts.
        """
        deliveries: list[DeliveryRun] = []
        least = epoch << EPOCH_SHIFT
        for first, end in runs:
            sequence = first
            for run in self.unsettled.between(first, end):
                if run.first > sequence:
                    deliveries.append(DeliveryRun(sequence, run.first - sequence, least + 1, 1, self.generation))
                    sequence = run.first
                stop = min(run.end, end)
                deliveries.append(
                    DeliveryRun(
                        sequence, stop - sequence, max(run.delivery, least) + 1, run.attempts_by_now + 1,
                        run.generation, again=run.delivery > 0, expired=run.suspects_by_now > 0,
                    )
                )  # fmt: skip
                sequence = stop
            if sequence < end:
                deliveries.append(DeliveryRun(sequence, end - sequence, least + 1, 1, self.generation))
        return deliveries

    def deliver(
        self, first: int, count: int, *, delivery: int, attempt: int, visible_at_ms: int, together: int = 1,
        expiry_counts: bool = True,
    ) -> None:  # fmt: skip
        """Apply a delivery decision."""
        self.deliveries += 1
        if self.order is not None:
            self.order.deliver(first, first + count)
        for run in self._take_with_fresh(first, first + count):
            self.unsettled.add(
                replace(
                    run, delivery=delivery, attempts_used=attempt - 1, in_flight=True, redriven=False,
                    visible_at_ms=visible_at_ms,
                    history=(
                        failed(run.history, self.reasons.number_of(EXPIRED))
                        if run.in_flight and run.expiry_counts
                        else run.history
                    ),
                    together=together, expiry_counts=expiry_counts, suspects=run.suspects_by_now,
                )
            )  # fmt: skip

    def file(self, runs: Iterable[tuple[int, Iterable[int]]], *, position: int) -> None:
        """Advance to a position, filing the messages for delivery in key order: (first, hashes of keys)."""
        for first, keys in runs:
            self.order = KeyOrder() if self.order is None else self.order
            self.order.file(first, keys)
        self.position = max(self.position, position)

    def skip(self, sequence: int) -> None:
        """Skip a fresh sequence that has no record, or that the filter rejects."""
        self.position = max(self.position, sequence + 1)

    def reason_of(self, run: InFlightRun) -> str | None:
        """Returns the consumer's failure reason for the last attempt at these messages."""
        return None if run.reason is None else self.reasons.text(run.reason)

    def next_visible_ms(self) -> int | None:
        """Returns when the next waiting or in-flight message becomes visible; None if there is none."""
        return self.unsettled.next_visible_ms()

    def oldest(self) -> int:
        """Returns the first sequence that the group may still deliver from where its topic has it, including dead
        letters.
        """
        oldest = min(self.oldest_unsettled(), self.position if self.dead.oldest is None else self.dead.oldest)
        if oldest >= self.moved_to:
            return oldest
        first = next(self.open_ranges(self.moved_to, self.position), None)
        return self.position if first is None else first[0]

    def may_deliver(self, sequence: int) -> bool:
        """Returns whether the group may still deliver a message below its position, including dead letters."""
        return sequence in self.dead or (sequence < self.position and self.is_open(sequence, sequence + 1))

    def open_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields what the group may still deliver of these sequences below its position, including dead letters: ranges
        (first, end) in order, some of which may touch.
        """
        dead = ((run.first, run.end) for run in self.dead.among(start, end))
        filed = () if self.order is None else self.order.open_ranges(start, end)
        return merge(self.unsettled.ranges(start, end), dead, filed)

    def open_in_topic(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields those of open_ranges() that are not aside from their topic."""
        for open_range in self.open_ranges(max(start, self.moved_to), end):
            yield from ((first, stop) for first, stop, own_place in self.aside.parts(*open_range) if own_place is None)

    def oldest_unsettled(self) -> int:
        """Returns the first sequence that is not settled or not consumed yet."""
        filed = None if self.order is None else self.order.oldest
        return min(sequence for sequence in (self.unsettled.oldest, filed, self.position) if sequence is not None)

    def waiting(self) -> int:
        """Returns how many messages below the position wait for delivery, the first or a later one."""
        filed = 0 if self.order is None else len(self.order)
        return filed + len(self.unsettled) - self.unsettled.in_flight

    def located(
        self, index: TopicIndex, ranges: Iterable[tuple[int, int]]
    ) -> list[tuple[tuple[int, int], list[PlaceRun]]]:
        """Returns ranges (first, end), and where the group's messages of each are in the message log; each message
        aside from its topic is a range of its own.
        """
        return [
            ((first, end), list(index.runs(first, end)) if own_place is None else [PlaceRun(first, end, *own_place)])
            for wanted in ranges
            for first, end, own_place in self.aside.parts(*wanted)
        ]

    # -- settling ----------------------------------------------------------------------------------------------------

    def ack_status(self, sequence: int, *, delivery: int, generation: int) -> AckStatus:
        """Returns the status that an acknowledgement would get. Changes nothing."""
        run = self.unsettled.find(sequence)
        if run is not None:
            newest = run.delivery == delivery and run.generation == generation and run.delivery > 0
            return AckStatus.ACKED if newest else AckStatus.STALE
        if sequence in self.dead:
            return AckStatus.STALE
        if sequence >= self.position or (self.order is not None and self.order.is_open(sequence, sequence + 1)):
            return AckStatus.UNKNOWN if generation == self.generation else AckStatus.STALE
        # A seek forgets acknowledgements: a receipt from before it cannot be matched to one any more.
        return AckStatus.STALE if generation < self.seek_generation else AckStatus.ALREADY_ACKED

    def ack(self, first: int, count: int = 1) -> None:
        """Settle these messages for this group, including messages that were never delivered (filtered out)."""
        if self.redriven:
            self.redriven.take([(first, first + count)])
        if self.aside:
            self.aside.forget(self.aside.within(first, first + count))
        self.unsettled.settle(first, first + count)
        self.position = max(self.position, first + count)
        if self.order is not None:
            self.order.end(first, first + count)

    def in_flight_of(self, first: int, end: int, *, delivery: int, generation: int) -> list[tuple[int, int]]:
        """Returns the runs of these sequences that are in flight under this delivery and generation."""
        return [
            (max(first, run.first), min(end, run.end))
            for run in self.unsettled.between(first, end)
            if run.in_flight and run.delivery == delivery and run.generation == generation
        ]

    def decide_nack(
        self, first: int, count: int = 1, *, now_ms: int, delay_ms: int | None, reason: str | None, counts: bool
    ) -> Requeue | Death:
        """Decide the result of a nack for in-flight messages with equal attributes. Changes nothing."""
        run = self.unsettled.find(first)
        if run is None:
            raise KeyError(f"sequence {first} is not in flight")
        used = run.attempts_used + (1 if counts else 0)
        if counts and used >= self.config.max_attempts:
            reason = reason or with_count(REFUSED, used)
            return Death(first, count, used, reason, DeathCause.REJECTED)
        if delay_ms is None:
            delay_ms = self._backoff_ms(used) if counts else 0
        return Requeue(first, count, now_ms + delay_ms, used)

    def decide_deferral(self, sequence: int, *, until_ms: int) -> Requeue:
        """Decide how to defer a message that was about to be delivered. Changes nothing."""
        run = self.unsettled.find(sequence)
        used = 0 if run is None else run.attempts_by_now
        return Requeue(sequence, 1, until_ms, used)

    def requeue(self, decision: Requeue, *, reason: str | None, expired: bool = False) -> None:
        """Apply a Requeue; for fresh messages it defers their first delivery. `expired`: no consumer gave them back;
        `reason` is that of an attempt before.
        """
        if self.order is not None:
            self.order.deliver(decision.first, decision.first + decision.count)
        reason_number = self.reasons.number_of(reason) if reason else None
        failure = EXPIRED if expired else without_count(reason or REFUSED, decision.attempts_used)
        last = self.reasons.number_of(failure)
        for run in self._take_with_fresh(decision.first, decision.first + decision.count):
            counts = decision.attempts_used > run.attempts_used
            # Given back untried, they are suspected as before: else their next consumer's death would not count either.
            suspects = 0 if counts else run.suspects
            self.unsettled.add(
                replace(
                    run, in_flight=False, redriven=False, attempts_used=decision.attempts_used, reason=reason_number,
                    visible_at_ms=decision.visible_at_ms, suspects=run.suspects_by_now if expired else suspects,
                    history=failed(run.history, last) if counts else run.history,
                )
            )  # fmt: skip
        self.reasons.forget_unused()

    def die(self, death: Death, *, at_ms: int) -> None:
        """Apply a Death."""
        first, end = death.first, death.first + death.count
        last = EXPIRED if death.cause is DeathCause.EXPIRED else without_count(death.reason, death.attempts)
        for run in self._take_with_fresh(first, end):
            # The last attempt may already be in the history, recorded when the death was deferred.
            counts = death.attempts > 0 and (run.in_flight or not run.history)
            history = self.reasons.history_of(run.history)
            history = failed(history, last) if counts else history
            self.dead.add(DeadRun(run.first, run.end, death.attempts, death.reason, at_ms, history))
        self.reasons.forget_unused()
        if self.order is not None:
            self.order.end(first, end)

    def extend(self, first: int, count: int = 1, *, visible_at_ms: int, begun: bool = False) -> None:
        """Extend the invisible time of in-flight messages; `begun`: their consumer begins to handle them."""
        for run in self.unsettled.take(first, first + count):
            counts = begun or run.expiry_counts
            self.unsettled.add(replace(run, visible_at_ms=visible_at_ms, expiry_counts=counts))

    # -- operators ---------------------------------------------------------------------------------------------------

    def redrive(self, ranges: Sequence[tuple[int, int]], *, now_ms: int, per_second: int | None = None) -> int:
        """Redrive dead letters in ordered ranges (first, end): a new generation, with attempts reset.

        Returns how many messages were redriven. Key order does not apply to them: their successors went long ago. All
        get their visible times at once: no task is left to resume, and a restart replays the same times.
        """
        self.redriven.add_all([run for first, end in ranges for run in self.dead.among(first, end)])
        redriven = self.dead.take(ranges)
        if redriven:
            self.generation += 1
        for first, end in redriven:
            sequence = first
            while sequence < end:
                ready_ms, count = self.redrive_pace.next_ms(now_ms, per_second=per_second, count_max=end - sequence)
                self.unsettled.add(
                    InFlightRun(
                        sequence, sequence + count, ready_ms, 0, 0, self.generation, in_flight=False, redriven=True
                    )
                )
                sequence += count
        return sum(end - first for first, end in redriven)

    def edit(self, entries: Sequence[tuple[int, int, int, str]], *, now_ms: int) -> None:
        """Replace dead letters by edited messages, ready at once; entries are (sequence, offset, bytes, id), in
        order."""
        dead = [entry for entry in entries if entry[0] in self.dead]
        self.redrive([(sequence, sequence + 1) for sequence, _, _, _ in dead], now_ms=now_ms)
        self.aside.put({sequence: OwnPlace(offset, size_bytes, now_ms) for sequence, offset, size_bytes, _ in dead})
        self.remember_edited(message_id for _, _, _, message_id in dead)

    def remember_edited(self, message_ids: Iterable[str]) -> None:
        """Add ids of edited messages, oldest first."""
        self.edited_ids.update(dict.fromkeys(message_ids))
        while len(self.edited_ids) > EDITS_REMEMBERED_MAX:
            del self.edited_ids[next(iter(self.edited_ids))]

    def move_aside(self, entries: Iterable[MovedEntry], *, moved_to: int) -> None:
        """Note where retention moved messages that the group may still deliver; below `moved_to` all should have such
        places now. Where one has not, since an action was lost, or a position that no action has, it stays as it was.
        """
        self.aside.put({sequence: OwnPlace(*fields) for sequence, *fields in entries if self.may_deliver(sequence)})
        moved_to = min(moved_to, self.position)
        if next(self.open_in_topic(self.moved_to, moved_to), None) is None:
            self.moved_to = max(self.moved_to, moved_to)
        self.moves += 1

    def discard(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Let dead letters in ordered ranges (first, end) go."""
        self.dead.take(ranges)
        for first, end in ranges:
            self.aside.forget(self.aside.within(first, end))

    def move_redriven(self, by_ms: int) -> None:
        """Move redriven messages with a clock that stepped by `by_ms`: their times say how long to wait, by any clock.

        Retries and invisible times stay as they were told to consumers.
        """
        self.redrive_pace.second_ms += by_ms
        self.unsettled.move_redriven(by_ms)

    def redriving(self, *, now_ms: int) -> list[tuple[int, int]]:
        """Returns the redriven messages that are not visible yet, as ranges (first, end)."""
        ranges: list[tuple[int, int]] = []
        if self.redrive_pace.second_ms <= now_ms:
            return ranges
        for run in self.unsettled:
            if run.redriven and run.visible_at_ms > now_ms:
                if ranges and ranges[-1][1] == run.first:
                    ranges[-1] = (ranges[-1][0], run.end)
                else:
                    ranges.append((run.first, run.end))
        return ranges

    def stop_redrive(self, ranges: Sequence[tuple[int, int]], *, now_ms: int) -> None:
        """Make redriven messages in ordered ranges (first, end) the dead letters again that they were."""
        runs = [run for first, end in ranges for run in self.redriven.among(first, end)]
        stopped = [(run.first, run.end) for run in runs]
        self.redriven.take(stopped)
        self.unsettled.drop(stopped)
        self.dead.add_all(runs)
        self.redrive_pace.withdraw(now_ms)

    def forget_aside_behind(self, offset: int) -> None:
        """Forget copies that a power failure took, where nothing was synced: what they are copies of is there still."""
        gone = self.aside.behind(offset)
        self.aside.forget(gone)
        self.moved_to = min([self.moved_to, *gone])

    def seek(self, position: int, *, generation: int, moved_from: int | None = None) -> None:
        """Continue from `position`: deliveries are dropped, later messages are fresh, and old receipts stale.

        `moved_from`: what retention moved, from this sequence on, is delivered again as well. Key order does not apply
        to that, since the order of before is dropped.
        """
        least = position if moved_from is None else moved_from
        moved = [sequence for sequence in self.aside.within(least, position) if sequence not in self.dead]
        self.generation = self.seek_generation = generation
        self.position = position
        self.moved_to = min(self.moved_to, position)
        self.unsettled.clear()
        for sequence in moved:
            self.unsettled.add(InFlightRun(sequence, sequence + 1, 0, 0, 0, generation, in_flight=False))
        self.redriven.take_from(0)
        if self.order is not None:
            self.order.clear()
        self.dead.take_from(position)
        # What is delivered once more from there on is what was published.
        kept = frozenset(moved)
        self.aside.forget(
            [sequence for sequence in self.aside.sequences if sequence not in self.dead and sequence not in kept]
        )

    def drop_before(self, position: int, *, offset: int) -> int:
        """Drop what the topic has below a sequence, and what is aside from it before an offset of the log, which
        retention removed; returns how many messages were not settled.
        """
        dropped, gone = self._unsettled_before(position, offset=offset)
        lost = max(0, position - self.position) + sum(end - first for first, end in dropped)
        self.unsettled.drop(dropped)
        self.reasons.forget_unused()
        self.dead.take(dropped)
        self.redriven.take(dropped)
        if self.order is not None and dropped:
            for first, end in gone:
                self.order.end(first, end)
            self.order.drop_before(position, kept=self.aside.sequences)
        self.aside.forget([first for first, _ in gone])
        self.position = max(self.position, position)
        return lost

    def unsettled_before(self, position: int, *, offset: int) -> int:
        """Returns how many messages drop_before() would drop that are not settled."""
        dropped, _ = self._unsettled_before(position, offset=offset)
        return max(0, position - self.position) + sum(end - first for first, end in dropped)

    def _unsettled_before(self, position: int, *, offset: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns what is not settled below a sequence, or is aside before an offset, and of it the latter, as ordered
        ranges (first, end).
        """
        gone = sorted((sequence, sequence + 1) for sequence, _ in self.aside.before(offset))
        return sorted([*self.open_in_topic(0, position), *gone]), gone

    def in_flight(self) -> int:
        """Returns how many messages are in flight."""
        return self.unsettled.in_flight

    def in_flight_at(self, now_ms: int) -> int:
        """Returns how many in-flight messages have an invisible time that has not expired."""
        return sum(run.count for run in self.unsettled if run.in_flight and run.visible_at_ms > now_ms)

    def delete(self) -> None:
        """Drop all state, permanently."""
        self.is_deleted = True
        self.unsettled.clear()
        self.dead.take_from(0)
        self.redriven.take_from(0)
        self.aside.forget(list(self.aside.sequences))
        if self.order is not None:
            self.order.clear()

    def _take_with_fresh(self, first: int, end: int) -> list[InFlightRun]:
        """Take out the runs of these sequences; gaps are filled with new runs of fresh messages."""
        taken = self.unsettled.take(first, end)
        if self.redriven:
            self.redriven.take([(first, end)])
        self.position = max(self.position, end)
        if len(taken) == 1 and taken[0].count == end - first:
            return taken
        runs: list[InFlightRun] = []
        sequence = first
        for run in [*taken, None]:
            until = end if run is None else run.first
            if until > sequence:
                runs.append(InFlightRun(sequence, until, 0, 0, 0, self.generation, in_flight=False))
            if run is not None:
                runs.append(run)
                sequence = run.end
        return runs

    def _backoff_ms(self, failures: int) -> int:
        config = self.config
        backoff = Backoff(
            initial_ms=config.backoff_initial_ms, multiplier=config.backoff_multiplier, max_ms=config.backoff_max_ms
        )
        return backoff.delay_ms(failures)
