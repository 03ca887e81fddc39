"""Converts messages to the schedule's form, publishes them to the target broker, and decides on what it does not take.

What a refused batch is parted into, and whether a message is tried again or parked, is decided in outbox_core, as for
rows of an outbox. No timing here: the schedule brings messages again at the due times that they are given.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, assert_never

import msgspec

from outbox_broker.schedule.delay_store import TimedMessage
from outbox_broker.schedule.schedule_runner import DeliveryOutcome
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock
from outbox_core.common.errors import DECODE_ERRORS, InvalidMessage
from outbox_core.messages.delivery_decision import Acceptance, Park, Retry, TopicStalls, decide
from outbox_core.messages.message import Message, PublishResult, PublishStatus, Record, due_message, encode_packed
from outbox_core.messages.publish_guard import PublishTarget
from outbox_core.messages.refused_batch_isolation import publish_isolated
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.log_interval import LogInterval

logger: EventLogger = EventLogger(__name__)

PARKED_AGAIN_MS: Final = 3_600_000
"""A message that the target refused for good is kept until it is retried or canceled. The schedule brings it each hour,
and it is put off again, unsent: so its reason is remembered after a restart, too."""
REFUSALS_MAX: Final = 1_000
"""Refused messages that are listed; the oldest are forgotten first. The messages stay, with their reasons."""


class _Scheduled(msgspec.Struct, array_like=True, frozen=True):
    """The schedule's payload: a message as it was published, and what became of it so far.

    What waits behind a refusal is due later than the message says.
    """

    message: Record
    attempts: int = 0
    """How often the target did not take it for now."""
    refused: str | None = None
    """Why the target refused it for good."""


_decode = msgspec.msgpack.Decoder(_Scheduled).decode


def timed(message: Record, now_ms: int) -> TimedMessage:
    """Returns a message in the schedule's form; without a due time it is due now."""
    if not message.created_at_ms:
        message = msgspec.structs.replace(message, created_at_ms=now_ms)
    due_ms = now_ms if message.deliver_at_ms is None else message.deliver_at_ms
    return TimedMessage(due_ms, message.id, message.topic, encode_packed(_Scheduled(message)))


def published(one: TimedMessage) -> Record:
    """Returns a scheduled message as it was published. Raises InvalidMessage if it cannot be decoded."""
    return _stored(one).message


class TargetPublisher:
    """Publishes due messages, and counts what became of them. Used by one thread; `refusals` may be read by any."""

    def __init__(
        self,
        target: PublishTarget,
        *,
        clock: Clock,
        count: Callable[[str, str, int], None],
        backoff: Backoff | None = None,
        random: Random | None = None,
    ) -> None:
        """`count(what, topic, messages)` gets fired, deferred_by_target and refused_by_target."""
        self.refusals: dict[tuple[str, str], str] = {}
        """By topic and id, why the target refused messages for good, the newest last."""
        self._refusals_lock = threading.Lock()
        self._taken_by_retry: set[tuple[str, str]] = set()
        """By topic and id, messages that the target took while a batch in flight had them: they come once more."""
        self._target = target
        self._clock = clock
        self._count = count
        self._backoff = backoff or Backoff()
        self._random = random or Random()
        self._stalls = TopicStalls()
        self._deferred_topics = LogInterval(clock)
        """A full queue defers each second: a line a topic and minute says enough."""

    def deliver(self, batch: Sequence[TimedMessage]) -> DeliveryOutcome:
        """Publish messages; those that the target does not take come again, each at its own time. An outage ends it:
        what it leaves has to be given again.
        """
        results: dict[int, PublishResult] = {}
        readable: dict[int, Message] = {}
        parked: dict[int, str] = {}
        taken: set[int] = set()
        for position, timed_message in enumerate(batch):
            try:
                if (refused := _stored(timed_message).refused) is not None:
                    if (timed_message.topic, timed_message.id) in self._taken_by_retry:
                        taken.add(position)
                    else:
                        parked[position] = refused
                else:
                    readable[position] = _message(timed_message)
            except InvalidMessage as error:
                results[position] = PublishResult(timed_message.id, PublishStatus.REJECTED, str(error))
        positions = list(readable)
        answer = publish_isolated(self._target.publish, list(readable.values()))
        results.update((positions[at], result) for at, result in answer.results.items())
        stalls = self._stalls.tried((readable[positions[at]], result) for at, result in answer.results.items())
        again = self._settle(batch, results, stalls=stalls)
        again += [self._parked(batch[position], error) for position, error in parked.items()]
        undecided = set(range(len(batch))) - results.keys() - parked.keys() - taken
        left = {(batch[position].topic, batch[position].id) for position in undecided}
        self._taken_by_retry.difference_update((batch[position].topic, batch[position].id) for position in taken)
        return DeliveryOutcome(again=again, left=left, outage=answer.outage)

    def retry(self, one: TimedMessage) -> PublishResult | None:
        """Publish a message that was refused for good, for any thread; None if it was not refused. Raises BrokerError
        in an outage. Whoever calls removes from the schedule what the target took.
        """
        if _stored(one).refused is None or (one.topic, one.id) in self._taken_by_retry:
            return None
        answer = publish_isolated(self._target.publish, [_message(one)])
        if answer.outage is not None:
            raise answer.outage
        result = answer.results[0]
        if result.status.is_success:
            self.forget(one.topic, one.id)
            self._count("fired", one.topic, 1)
        return result

    def drop(self, topic: str, message_id: str) -> None:
        """Called when the target took a message on a retry, and it cannot be canceled any more: a batch in flight has
        it, and puts it off once more. It is not sent again, nor listed.
        """
        self._taken_by_retry.add((topic, message_id))
        self.forget(topic, message_id)

    def forget(self, topic: str, message_id: str) -> None:
        """List a message no more: it was sent, or canceled."""
        with self._refusals_lock:
            self.refusals.pop((topic, message_id), None)

    def _parked(self, one: TimedMessage, error: str) -> TimedMessage:
        """Returns a message that was refused for good as it is kept, and lists it."""
        with self._refusals_lock:  # a retry or a cancel removes one meanwhile
            self.refusals.pop((one.topic, one.id), None)
            self.refusals[one.topic, one.id] = error
            while len(self.refusals) > REFUSALS_MAX:
                del self.refusals[next(iter(self.refusals))]
        due_ms = self._clock.now_ms() + PARKED_AGAIN_MS
        try:
            payload = encode_packed(msgspec.structs.replace(_stored(one), refused=error))
        except InvalidMessage:  # it cannot be decoded: it is refused each time
            payload = one.payload
        return msgspec.structs.replace(one, due_ms=due_ms, payload=payload)

    def _settle(
        self, batch: Sequence[TimedMessage], results: Mapping[int, PublishResult], *, stalls: Mapping[str, int]
    ) -> list[TimedMessage]:
        now_ms, jitter = self._clock.now_ms(), self._random.random()
        again: list[TimedMessage] = []
        fired: Counter[str] = Counter()
        deferred: defaultdict[str, list[tuple[TimedMessage, str]]] = defaultdict(list)
        parked: defaultdict[str, list[tuple[TimedMessage, str]]] = defaultdict(list)
        for position, result in results.items():
            timed_message = batch[position]
            attempts = 0 if result.status.is_success else _attempts(timed_message) + 1
            decision = decide(
                result,
                attempts=attempts,
                stalls=stalls.get(timed_message.topic, 1),
                backoff=self._backoff,
                jitter=jitter,
            )
            match decision:
                case Acceptance():
                    fired[timed_message.topic] += 1
                case Retry(delay_ms, error):
                    again.append(_tried(timed_message, due_ms=now_ms + delay_ms, attempts=attempts))
                    deferred[timed_message.topic].append((timed_message, error))
                case Park(error):
                    again.append(self._parked(timed_message, error))
                    parked[timed_message.topic].append((timed_message, error))
                case _:
                    assert_never(decision)
        for topic, messages in fired.items():
            self._count("fired", topic, messages)
        for topic, refusals in deferred.items():
            self._count("deferred_by_target", topic, len(refusals))
            if self._deferred_topics.is_time(topic):
                _log("delivery_deferred", refusals)
        for topic, refusals in parked.items():
            self._count("refused_by_target", topic, len(refusals))
            _log("delivery_refused", refusals)
        return again


def _log(event: str, refusals: Sequence[tuple[TimedMessage, str]]) -> None:
    first, error = refusals[0]
    fields = {"topic": first.topic, "first_message_id": first.id, "messages": len(refusals), "error": error}
    logger.warning(event, extra=fields)


def _attempts(one: TimedMessage) -> int:
    try:
        return _stored(one).attempts
    except InvalidMessage:
        return 0


def _tried(one: TimedMessage, *, due_ms: int, attempts: int) -> TimedMessage:
    payload = encode_packed(msgspec.structs.replace(_stored(one), attempts=attempts))
    return msgspec.structs.replace(one, due_ms=due_ms, payload=payload)


def _message(one: TimedMessage) -> Message:
    """Returns the message for the target, due now, under its original id."""
    return due_message(_stored(one).message)


def _stored(one: TimedMessage) -> _Scheduled:
    try:
        return _decode(one.payload)
    except DECODE_ERRORS as error:  # this one alone is refused, and kept
        raise InvalidMessage(f"a scheduled message cannot be decoded: {error}") from error
