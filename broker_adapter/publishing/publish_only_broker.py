"""Implements the Broker port over a publisher, for brokers whose consumers keep their own client."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

from broker_adapter.publishing.broker_url import TIMEOUT_MS_DEFAULT
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotSupported, StorageFailed
from outbox_core.messages.broker_port import BrokerAdmin, Capability, Inspection, Weakness
from outbox_core.messages.limits import INVISIBLE_MS_DEFAULT
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    Delivery,
    ExtendStatus,
    Message,
    NackStatus,
    PublishResult,
    PublishStatus,
    refusal_of_delay,
)
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

logger: EventLogger = EventLogger(__name__)

_NO_DELAY = "this broker cannot delay messages: run a delay service and add ?delay=http://HOST:7799 to the broker's URL"


class MessagePublisher(Protocol):
    """One engine's translation of publish. Thread-safe; connects at its first use, and again after it lost the server.

    Each call ends within its `timeout_ms`, whatever it waits for. Errors: BrokerUnavailable (no answer in time, any
    part may be stored), StorageFailed (the server cannot store now), BrokerRefused (for a message that the engine did
    not name), each with the results that are known as `answered`. What concerns one message is its result: `rejected`
    where it can never be stored, `deferred` where an operator can help. A batch that was refused is not sent in parts.
    """

    @property
    def product(self) -> str:
        """The engine's name, as people write it."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities beyond a durable publish; known without I/O."""

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """Store a batch of messages that are due; one result a message, in order, once they are durable."""

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """Ask the server how durable it is; changes nothing."""

    def close(self) -> None:
        """Let go of connections; idempotent."""


class PublishOnlyBroker:
    """A Broker that publishes, and refuses everything else with NotSupported.

    Before its first publish the server is inspected, and again after each `inspect_every_ms`: weaknesses are logged
    once each. With `strict` a weakness of the server is StorageFailed: rows wait in their table until an operator
    has cured it, and messages of a topic that is weak by itself are deferred. `timeout_ms` bounds a publish with its
    inspection, since the sender's lease ends soon after.
    """

    def __init__(
        self,
        publisher: MessagePublisher,
        *,
        strict: bool = False,
        timeout_ms: int = TIMEOUT_MS_DEFAULT,
        inspect_every_ms: int = 60_000,
        clock: Clock | None = None,
    ) -> None:
        self._publisher = publisher
        self._strict = strict
        self._timeout_ms = timeout_ms
        self._inspect_every_ms = inspect_every_ms
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._inspected_at_ms: dict[str, int] = {}
        self._reported: set[str] = set()
        reset_in_children(self)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The engine's capabilities beyond a durable publish."""
        return self._publisher.capabilities

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch; a message that is not due yet is rejected where the engine cannot delay it."""
        if not batch:
            return []
        notice_fork()
        end_ms = self._clock.monotonic_ms() + self._timeout_ms
        now_ms = self._clock.now_ms()
        can_delay = Capability.DELAY in self.capabilities
        refused = {
            weakness.topic: str(weakness)
            for weakness in self._inspect_new({message.topic for message in batch})
            if weakness.topic
        }
        answers = [_answer_at_once(message, now_ms, refused, can_delay=can_delay) for message in batch]
        going = [index for index, answer in enumerate(answers) if answer is None]
        results = {index: answer for index, answer in enumerate(answers) if answer is not None}
        try:
            left_ms = self._left_ms(end_ms)
            stored = self._publisher.publish([batch[index] for index in going], timeout_ms=left_ms) if going else []
        except BrokerError as error:
            error.with_answered({**results, **{going[at]: result for at, result in error.answered.items()}})
            raise
        results.update(zip(going, stored, strict=True))
        return [results[index] for index in range(len(batch))]

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = INVISIBLE_MS_DEFAULT,
        begins: bool = False,
    ) -> list[Delivery]:
        """NotSupported: consumers of this broker keep their own client, and use the inbox in it."""
        self._refuse("pull")

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Raises NotSupported."""
        self._refuse("ack")

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Raises NotSupported."""
        self._refuse("nack")

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Raises NotSupported."""
        self._refuse("extend")

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """NotSupported: nothing is scheduled here."""
        self._refuse("cancel")

    @property
    def admin(self) -> BrokerAdmin:
        """NotSupported: use the engine's own tools."""
        self._refuse("admin")

    def inspect(self, topics: Sequence[str] = ()) -> Inspection:
        """Ask the server about its settings and these topics."""
        notice_fork()
        return self._publisher.inspect(topics, timeout_ms=self._timeout_ms)

    def report_weaknesses(self) -> None:
        """Inspect the server, and log each weakness that was not logged yet."""
        self._report(self.inspect().weaknesses)

    def close(self) -> None:
        """Let go of connections. Idempotent."""
        self._publisher.close()

    def reset_after_fork(self) -> None:
        """Have a lock of its own in a forked child: another thread may have held the parent's."""
        self._lock = threading.Lock()

    def _refuse(self, operation: str) -> NoReturn:
        raise NotSupported(f"{operation} is not supported on {self._publisher.product} by this adapter")

    def _left_ms(self, end_ms: int) -> int:
        left_ms = end_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise BrokerUnavailable(f"the inspection of the server took all of the {self._timeout_ms} ms of timeout_ms")
        return left_ms

    def _inspect_new(self, topics: set[str]) -> Sequence[Weakness]:
        """Inspect the server for topics that were not inspected lately; returns what a strict broker refuses."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            since_ms = now_ms - self._inspect_every_ms
            uninspected = sorted(topic for topic in topics if self._inspected_at_ms.get(topic, since_ms) <= since_ms)
        if not uninspected:
            return ()
        weaknesses = self._publisher.inspect(uninspected, timeout_ms=self._timeout_ms).weaknesses
        self._report(weaknesses)
        with self._lock:
            if not (weaknesses and self._strict):
                self._inspected_at_ms.update(dict.fromkeys(uninspected, now_ms))
        if not self._strict:
            return ()
        for weakness in weaknesses:
            if weakness.topic is None:
                raise StorageFailed(f"refused because of strict=true: {weakness}")
        return weaknesses

    def _report(self, weaknesses: Sequence[Weakness]) -> None:
        with self._lock:
            new = [weakness for weakness in weaknesses if str(weakness) not in self._reported]
            self._reported.update(map(str, new))
        for weakness in new:
            logger.warning(
                "broker_durability_weak",
                extra={"subject": weakness.subject, "problem": weakness.problem, "cure": weakness.cure},
            )


def _answer_at_once(
    message: Message, now_ms: int, refused: Mapping[str, str], *, can_delay: bool
) -> PublishResult | None:
    """The answer for a message that does not go to the server; None for one that does."""
    if message.deliver_at_ms is not None and message.deliver_at_ms > now_ms:
        if not can_delay:
            return PublishResult(message.id, PublishStatus.REJECTED, _NO_DELAY)
        if refusal := refusal_of_delay(message, now_ms=now_ms):
            return refusal
    if message.topic in refused:
        return PublishResult(
            message.id, PublishStatus.DEFERRED, f"refused because of strict=true: {refused[message.topic]}"
        )
    return None
