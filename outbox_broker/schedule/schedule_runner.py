"""Runs a schedule in two threads: one delivers due messages to a target function, one does housekeeping.

Never early: the wall clock is read right before each delivery. The threads wait on monotonic time in slices of at most
a second, so that a step of the wall clock, or a suspended process, is noticed within one.

Batches are claimed shortly ahead of their messages' due times, so that nothing waits for the disk when it is due. A
batch that was claimed stays in flight until the schedule has settled it: whatever error its delivery or its settlement
meets, that step is repeated, and no other batch is claimed before. After a kill the schedule dispatches it again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from outbox_broker.schedule.delay_store import BatchClaim, DelayStore, DueBatch, TimedMessage
from outbox_broker.schedule.dispatch_health import DispatchHealth
from outbox_broker.schedule.lateness import Lateness
from outbox_broker.schedule.service_thread import PAUSE_MS_MAX, ServiceThread
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerThrottled, OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryOutcome:
    """What became of messages: all were delivered but those that come `again`, each at its new due time, and, after an
    `outage`, those that are `left` (by topic and id), which have to be delivered as they are.
    """

    again: Sequence[TimedMessage] = ()
    left: AbstractSet[tuple[str, str]] = frozenset()
    outage: OutboxError | None = None


Deliver = Callable[[Sequence[TimedMessage]], DeliveryOutcome]
"""Delivers messages. Raises OutboxError if nothing is known of any of them: then all are delivered again."""
CLAIMS_MAX: Final = 3
"""Batches in flight: what is due within two halves of the time ahead, and what came meanwhile."""
_TOGETHER_MAX: Final = 256
_TOGETHER_BYTES_MAX: Final = 512 * 1024
"""Messages of several batches are delivered together up to these limits, which are below those of one batch."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """A batch that was claimed and is not settled: how many of its messages, the first ones, were `delivered`, as far
    as the target took them; `answered`, by topic and id, are those behind, of which an outage left others; `again` are
    those of all these that come again.
    """

    claim: BatchClaim
    delivered: int = 0
    answered: set[tuple[str, str]] = field(default_factory=set)
    again: list[TimedMessage] = field(default_factory=list)
    is_durable: bool = False

    @property
    def batch(self) -> DueBatch:
        return self.claim.batch

    @property
    def is_delivered(self) -> bool:
        return self.delivered == len(self.batch)

    def waits_since_ms(self) -> int | None:
        """Returns the due time of the next message; None if all are delivered. For any thread."""
        delivered = self.delivered  # once: the delivering thread goes on
        return self.batch.dues[delivered] if delivered < len(self.batch) else None

    def next_due_ms(self) -> int:
        return self.batch.dues[self.delivered]

    def count_due(self, now_ms: int) -> int:
        """Returns how many more messages are due."""
        return bisect_right(self.batch.dues, now_ms, self.delivered) - self.delivered

    def size_bytes(self, count: int) -> int:
        """Returns the size of the next messages."""
        return sum(map(len, self.batch.payloads[self.delivered : self.delivered + count]))

    def messages(self, count: int | None = None) -> list[TimedMessage]:
        """Returns those of the next messages that were not answered; without a count, of all that are left."""
        return [message for _, message in self.numbered(count)]

    def numbered(self, count: int | None = None) -> list[tuple[int, TimedMessage]]:
        """The same, with the number of their arrival."""
        batch, end = self.batch, None if count is None else self.delivered + count
        part = slice(self.delivered, end)
        messages = map(TimedMessage, batch.dues[part], batch.ids[part], batch.topics[part], batch.payloads[part])
        numbered = zip(batch.seqs[part], messages, strict=True)
        if not self.answered:
            return list(numbered)
        return [(seq, message) for seq, message in numbered if (message.topic, message.id) not in self.answered]

    def arrivals_done(self) -> list[int]:
        """Returns the numbers of arrival of the messages that were answered."""
        left = {arrival for arrival, _ in self.numbered()}
        return [number for number in self.batch.seqs if number not in left]

    def settle(
        self, count: int, *, again: Mapping[tuple[str, str], TimedMessage], left: AbstractSet[tuple[str, str]]
    ) -> list[int]:
        """Take what became of the next messages; returns the due times of those that the target took."""
        if not again and not left and not self.answered:
            dues = self.batch.dues[self.delivered : self.delivered + count]
            self.delivered += count
            return dues
        done = [message for message in self.messages(count) if (message.topic, message.id) not in left]
        keys = [(message.topic, message.id) for message in done]
        self.again += [again[key] for key in keys if key in again]
        self.answered.update(keys)
        if len(self.messages(count)) == 0:
            # Not all of the answered: where the clock has stepped back, some are behind these.
            part = slice(self.delivered, self.delivered + count)
            self.answered.difference_update(zip(self.batch.topics[part], self.batch.ids[part], strict=True))
            self.delivered += count
        return [message.due_ms for message, key in zip(done, keys, strict=True) if key not in again]


class ScheduleRunner:
    """Two threads on one schedule. start() and stop() are idempotent; wake() is thread-safe."""

    def __init__(
        self,
        schedule: DelayStore,
        *,
        deliver: Deliver,
        clock: Clock,
        backoff: Backoff | None = None,
        claim_ahead_ms: int = 0,
    ) -> None:
        """`claim_ahead_ms`: how long before its due time a message is claimed, at most; a cancel is too late then."""
        self._schedule = schedule
        self._deliver = deliver
        self._clock = clock
        self._backoff = backoff or Backoff(initial_ms=100, max_ms=30_000)
        self._claim_ahead_ms = claim_ahead_ms
        self._delivery = ServiceThread(self.turn, name="delay-service", clock=clock)
        self._housekeeping = ServiceThread(self.keep, name="delay-keeper", clock=clock)
        self._in_flight: list[_InFlight] = []
        self._failed_steps = 0  # since the last one that succeeded
        self._retry_at_ms = 0  # monotonic
        self._health = DispatchHealth()
        self.lateness = Lateness()
        self.delivered = 0
        self.refused = 0
        self.failures = 0

    def start(self) -> None:
        """Start the threads."""
        self._delivery.start()
        self._housekeeping.start()

    def stop(self, *, timeout_ms: int = 10_000) -> None:
        """Stop after the work in progress, waiting up to a deadline. Undelivered messages come again later; of a batch
        that was delivered in part, only those.
        """
        for thread in (self._delivery, self._housekeeping):
            thread.begin_stop()
        has_ended = [thread.join(timeout_ms=timeout_ms) for thread in (self._delivery, self._housekeeping)]
        if has_ended[0]:
            self._give_back()

    def wake(self) -> None:
        """Signal that something was scheduled, which may be due earlier than all else, or fill the memory."""
        self._delivery.wake(before_ms=self._schedule.soonest_ms() - self._claim_ahead_ms // 2)
        if self._schedule.housekeeping.is_full():
            self._housekeeping.wake()

    def turn(self) -> int:
        """Claim what is due soon, deliver what is due, and settle batches; returns how long to wait then, in
        milliseconds.
        """
        self._claim()
        if self._pause_ms() > 0:
            return self._pause_ms()
        due = self._due_now()
        step = "settlement_failed"
        try:
            has_settled = self._settle()
            step = "delivery_failed"
            self._deliver_once(due)
            step = "settlement_failed"
            has_settled |= self._settle()
        except OutboxError as error:
            self._put_off(step, error)
        except Exception as error:  # a defect of the target's client, which another attempt may not meet
            logger.exception("delay_service_failed")
            self._put_off(step, error)
        else:
            self._failed_steps = 0
            return 0 if due or has_settled else self._idle_ms()
        return self._pause_ms()

    def keep(self) -> int:
        """Do one step of housekeeping; returns how long to wait then, in milliseconds."""
        return 0 if self._schedule.housekeeping.step(self._clock.now_ms()) else PAUSE_MS_MAX

    def overdue_ms(self) -> int:
        """Returns for how long the longest due message that was claimed has not been delivered; 0 if none waits."""
        since_ms = [ms for in_flight in list(self._in_flight) if (ms := in_flight.waits_since_ms()) is not None]
        return max(0, self._clock.now_ms() - min(since_ms)) if since_ms else 0

    def check_ready(self) -> None:
        """Raise StorageFailed, naming the cure, while batches can be taken from the schedule or settled with it no
        more.
        """
        self._health.check()

    # -- claims ------------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Claim the messages that are due soon, unless enough are in flight, or a step failed."""
        now_ms, ahead_ms = self._clock.now_ms(), self._claim_ahead_ms
        if self._in_flight and (
            self._failed_steps or self._is_enough(now_ms) or not self._schedule.is_due(now_ms + ahead_ms // 2)
        ):
            return
        with self._health.attempt():
            claim = self._schedule.claim(now_ms + ahead_ms)
        if claim is not None:
            self._in_flight.append(_InFlight(claim))

    def _due_now(self) -> list[tuple[_InFlight, int]]:
        """Returns how many messages of which batches are due, once these batches are durably claimed. All of them, if
        they are few.
        """
        now_ms = self._clock.now_ms()
        due = [(in_flight, count) for in_flight in self._in_flight if (count := in_flight.count_due(now_ms))]
        if len(due) > 1 and not _are_few(due):
            due = [min(due, key=lambda pair: pair[0].next_due_ms())]
        for in_flight, _ in due:
            if not in_flight.is_durable:
                try:
                    with self._health.attempt():
                        in_flight.claim.commit()
                except BaseException:
                    self._in_flight.remove(in_flight)  # it is claimed again
                    raise
                in_flight.is_durable = True
        return due

    def _idle_ms(self) -> int:
        """Returns how long nothing is to be done."""
        now_ms = self._clock.now_ms()
        times = [in_flight.next_due_ms() for in_flight in self._in_flight]
        if not self._is_enough(now_ms):
            times.append(self._schedule.soonest_ms() - self._claim_ahead_ms // 2)
        return max(0, min(min(times) - now_ms, PAUSE_MS_MAX))

    def _is_enough(self, now_ms: int) -> bool:
        """Returns whether enough is in flight. Claims from before a step of the clock may be far ahead, and hold up
        nothing.
        """
        near_ms = now_ms + self._claim_ahead_ms
        near = [
            in_flight for in_flight in self._in_flight if in_flight.is_delivered or in_flight.next_due_ms() <= near_ms
        ]
        return len(near) >= CLAIMS_MAX

    # -- deliveries --------------------------------------------------------------------------------------------------

    def _deliver_once(self, due: Sequence[tuple[_InFlight, int]]) -> None:
        """Deliver messages. Before a repetition it is checked whether another process has taken the schedule over: it
        would deliver them as well.
        """
        if not due:
            return
        if self._failed_steps:
            with self._health.attempt():
                self._schedule.check_ready()
        outcome = self._deliver(_in_order(due))
        again = {(message.topic, message.id): message for message in outcome.again}
        now_ms = self._clock.now_ms()
        for in_flight, count in due:
            dues = in_flight.settle(count, again=again, left=outcome.left)
            self.delivered += len(dues)
            self.lateness.add_due(dues, now_ms=now_ms)
        self.refused += len(outcome.again)
        if outcome.outage is not None:
            raise outcome.outage

    def _settle(self) -> bool:
        """Settle the batches that are delivered; returns whether there were any."""
        done = [in_flight for in_flight in self._in_flight if in_flight.is_delivered]
        for in_flight in done:
            self._settle_one(in_flight)
        return bool(done)

    def _settle_one(self, one: _InFlight) -> None:
        """Settle a batch that is delivered; what was refused comes again later."""
        with self._health.attempt():
            self._schedule.fired(one.batch.number, again=one.again)
        self._in_flight.remove(one)

    def _give_back(self) -> None:
        """Settle what was delivered of batches, so that none of it comes twice. What another process has taken over
        comes again whole.
        """
        begun = [in_flight for in_flight in self._in_flight if in_flight.delivered or in_flight.answered]
        for in_flight in begun:
            with suppress(OutboxError):
                if in_flight.is_delivered:
                    self._settle_one(in_flight)
                else:
                    number = in_flight.batch.number
                    self._schedule.fired_in_part(number, done=in_flight.arrivals_done(), again=in_flight.again)
                    in_flight.again = []  # they are scheduled; the rest is delivered here if this is started again

    # -- failures ----------------------------------------------------------------------------------------------------

    def _pause_ms(self) -> int:
        """Returns how long the step that failed last is not to be repeated."""
        if not self._failed_steps:
            return 0
        return max(0, min(self._retry_at_ms - self._clock.monotonic_ms(), PAUSE_MS_MAX))

    def _put_off(self, step: str, error: Exception) -> None:
        """Repeat the step that failed after a pause; everything else that is due waits."""
        self._failed_steps += 1
        pause_ms = self._backoff.delay_ms(self._failed_steps)
        if isinstance(error, BrokerThrottled):
            pause_ms = max(pause_ms, error.retry_after_ms)
        self._retry_at_ms = self._clock.monotonic_ms() + pause_ms
        self.failures += 1
        messages = sum(len(in_flight.batch) for in_flight in self._in_flight)
        logger.warning(step, extra={"messages": messages, "failures": self._failed_steps, "error": str(error)})


def _are_few(due: Sequence[tuple[_InFlight, int]]) -> bool:
    count = sum(count for _, count in due)
    return (
        count <= _TOGETHER_MAX and sum(in_flight.size_bytes(count) for in_flight, count in due) <= _TOGETHER_BYTES_MAX
    )


def _in_order(due: Sequence[tuple[_InFlight, int]]) -> list[TimedMessage]:
    """Returns the next messages of batches, in the order of a batch."""
    if len(due) == 1:
        [(one, count)] = due
        return one.messages(count)
    found: list[tuple[tuple[int, int], TimedMessage]] = []
    for in_flight, count in due:
        found += (((message.due_ms, seq), message) for seq, message in in_flight.numbered(count))
    return [message for _, message in sorted(found, key=itemgetter(0))]
