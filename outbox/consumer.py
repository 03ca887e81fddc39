"""Consumers: @consumer makes a handler of a function, run_consumers feeds it from a broker.

Not how a broker delivers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from messaging.broker import Broker
from messaging.connecting import connect
from messaging.errors import BrokerError, BrokerRefused, ConfigurationError, OutboxError
from messaging.limits import INVISIBLE_MS_DEFAULT, REASON_CHARS_MAX
from messaging.message import Delivery, check_group, check_topic
from outbox.database import open_engine
from outbox.engine_hooks import listen_to_engines, refuse_if_doomed
from outbox.inbox import InboxStore

logger = logging.getLogger(__name__)

PULL_WAIT_MS: Final = 5_000
BROKER_PAUSE_SECONDS: Final = 1.0
STOP_TIMEOUT_SECONDS: Final = 25.0


class RetryLater(Exception):
    """Raised by a handler: give this message back and deliver it again after `delay_ms` (it uses up an attempt)."""

    def __init__(self, *, delay_ms: int, reason: str = "handler asked for a retry") -> None:
        super().__init__(reason)
        self.delay_ms = delay_ms


class Outcome(StrEnum):
    """What handling one delivery came to."""

    HANDLED = "handled"
    DEDUPLICATED = "deduplicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A handler and what it consumes.

    With an inbox it is called as handler(session, delivery), else as handler(delivery).
    """

    topic: str
    group: str
    handler: Callable[..., object]
    engine: Engine | None
    store: InboxStore | None
    workers: int
    prefetch: int
    invisible_ms: int

    def handle(self, delivery: Delivery) -> Outcome:
        """Handle one delivery; what the handler raises is raised on.

        With an inbox the handler's effect and the mark commit together: whatever was handled before is not handled
        again, whoever delivers it how often.
        """
        if self.engine is None or self.store is None:
            self.handler(delivery)
            return Outcome.HANDLED
        with Session(self.engine) as session, session.begin():
            connection = session.connection()
            if not self.store.mark(connection, group=self.group, message_id=delivery.id, topic=delivery.topic):
                return Outcome.DEDUPLICATED
            self.handler(session, delivery)
            # A deadlock that the handler swallowed has undone the mark and half of the effect: never acknowledge that.
            refuse_if_doomed(connection)
            return Outcome.HANDLED

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """The undecorated handler, as tests call it."""
        return self.handler(*args, **kwargs)


def consumer(
    topic: str,
    *,
    group: str,
    inbox: Engine | str | None = None,
    schema: str | None = None,
    workers: int = 1,
    prefetch: int = 50,
    invisible_ms: int = INVISIBLE_MS_DEFAULT,
) -> Callable[[Callable[..., object]], Consumer]:
    """Make a consumer of a function.

    `inbox`: the database (engine or URL) whose tables the handler changes; its effects then happen once. Without one
    the handler gets a message at least once and should be idempotent. `workers` threads pull up to `prefetch` each.
    """
    check_topic(topic)
    check_group(group)
    if workers < 1 or prefetch < 1 or invisible_ms < 1:
        raise ConfigurationError("workers, prefetch and invisible_ms must be at least 1")
    engine = None if inbox is None else open_engine(inbox)
    store = None if engine is None else InboxStore(dialect=engine.dialect, schema=schema)
    if engine is not None:
        listen_to_engines()

    def decorate(function: Callable[..., object]) -> Consumer:
        return Consumer(
            topic=topic, group=group, handler=function, engine=engine, store=store,
            workers=workers, prefetch=prefetch, invisible_ms=invisible_ms,
        )  # fmt: skip

    return decorate


@dataclass(slots=True)
class ConsumerFigures:
    """What a runner has done so far."""

    handled: int = 0
    deduplicated: int = 0
    failed: int = 0
    handed_back: int = 0


class ConsumerRunner:
    """Runs consumers in threads until told to stop. start() and stop() are idempotent."""

    def __init__(self, consumers: Sequence[Consumer], *, broker: Broker) -> None:
        self._consumers = consumers
        self._broker = broker
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._extender: threading.Thread | None = None
        self._drained = threading.Event()
        self._held: dict[str, tuple[Consumer, float]] = {}
        self._lock = threading.Lock()
        self.figures = ConsumerFigures()

    def start(self) -> None:
        """Start `workers` threads a consumer, and one that extends what is held."""
        if self._threads:
            return
        for one in self._consumers:
            for number in range(one.workers):
                name = f"consumer-{one.group}-{number}"
                self._threads.append(threading.Thread(target=self._work, args=(one,), name=name, daemon=True))
        self._extender = threading.Thread(target=self._extend, name="consumer-extender", daemon=True)
        for thread in (*self._threads, self._extender):
            thread.start()

    def stop(self, *, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> bool:
        """Finish the message in hand, give the others back untried, and stop; True when all did in time."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False  # what is still handled is still kept invisible
        self._drained.set()
        if self._extender is not None:
            self._extender.join(STOP_TIMEOUT_SECONDS)
        return True

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until somebody calls stop(); False when the time ran out."""
        return self._stopping.wait(timeout_seconds)

    def _work(self, consumer: Consumer) -> None:
        while not self._stopping.is_set():
            try:
                deliveries = self._broker.pull(
                    consumer.topic, consumer.group,
                    max_messages=consumer.prefetch, wait_ms=PULL_WAIT_MS, invisible_ms=consumer.invisible_ms,
                )  # fmt: skip
                self._handle_all(consumer, deliveries)
            except BrokerRefused:
                logger.exception("pull_refused", extra={"topic": consumer.topic, "group": consumer.group})
                self._stopping.wait(BROKER_PAUSE_SECONDS)
            except BrokerError as error:
                logger.warning("broker_unavailable", extra={"topic": consumer.topic, "error": str(error)})
                self._stopping.wait(BROKER_PAUSE_SECONDS)
            except Exception:  # the thread boundary: what is held comes back when its invisible time ends
                logger.exception("consumer_failed", extra={"topic": consumer.topic, "group": consumer.group})
                self._stopping.wait(BROKER_PAUSE_SECONDS)

    def _handle_all(self, consumer: Consumer, deliveries: Sequence[Delivery]) -> None:
        self._hold(consumer, deliveries)
        try:
            done = [delivery.receipt for delivery in deliveries if self._handle_one(consumer, delivery)]
            if done:
                self._broker.ack(done)
        finally:
            self._release(deliveries)

    def _nack(self, delivery: Delivery, *, delay_ms: int | None, reason: str, counts: bool) -> None:
        """Where this fails, the message comes back when its invisible time ends; the others must be settled all the
        same.
        """
        try:
            self._broker.nack([delivery.receipt], delay_ms=delay_ms, reason=reason, counts=counts)
        except BrokerError as error:
            logger.warning("nack_failed", extra={"message_id": delivery.id, "error": str(error)})

    def _count(self, name: str) -> None:
        with self._lock:  # workers count side by side
            setattr(self.figures, name, getattr(self.figures, name) + 1)

    def _handle_one(self, consumer: Consumer, delivery: Delivery) -> bool:
        """True when the delivery is to be acknowledged; otherwise it has been given back."""
        if self._stopping.is_set():
            self._count("handed_back")
            self._nack(delivery, delay_ms=0, reason="consumer stops", counts=False)
            return False
        try:
            outcome = consumer.handle(delivery)
        except RetryLater as retry:
            self._give_back(delivery, reason=str(retry), delay_ms=retry.delay_ms)
            return False
        except Exception as error:  # noqa: BLE001 - the boundary to the user's code: any failure means "not handled"
            reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
            logger.warning(
                "handler_failed", extra={"message_id": delivery.id, "group": consumer.group, "error": reason}
            )
            self._give_back(delivery, reason=reason, delay_ms=None)
            return False
        self._count(outcome)
        return True

    def _give_back(self, delivery: Delivery, *, reason: str, delay_ms: int | None) -> None:
        self._count("failed")
        self._nack(delivery, delay_ms=delay_ms, reason=reason, counts=True)

    def _extend(self) -> None:
        """Keep what is being handled invisible: whatever is held for half of its invisible time is extended."""
        shortest_ms = min((one.invisible_ms for one in self._consumers), default=INVISIBLE_MS_DEFAULT)
        while not self._drained.wait(shortest_ms / 4000):
            now = time.monotonic()
            with self._lock:
                old = [
                    (receipt, one)
                    for receipt, (one, since) in self._held.items()
                    if (now - since) * 1000 >= one.invisible_ms / 2
                ]
            for invisible_ms in {one.invisible_ms for _, one in old}:
                receipts = [receipt for receipt, one in old if one.invisible_ms == invisible_ms]
                self._extend_alike(receipts, invisible_ms=invisible_ms, now=now)

    def _extend_alike(self, receipts: list[str], *, invisible_ms: int, now: float) -> None:
        try:
            self._broker.extend(receipts, invisible_ms=invisible_ms)
        except OutboxError as error:
            logger.warning("extend_failed", extra={"receipts": len(receipts), "error": str(error)})
            return
        with self._lock:
            for receipt in receipts:
                if receipt in self._held:
                    self._held[receipt] = (self._held[receipt][0], now)

    def _hold(self, consumer: Consumer, deliveries: Sequence[Delivery]) -> None:
        now = time.monotonic()
        with self._lock:
            self._held.update({delivery.receipt: (consumer, now) for delivery in deliveries})

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        with self._lock:
            for delivery in deliveries:
                self._held.pop(delivery.receipt, None)


def run_consumers(consumers: Sequence[Consumer], *, broker: Broker | str) -> ConsumerRunner:
    """Start consumers on a broker (URL or object) and return their runner; call stop() on it to end."""
    runner = ConsumerRunner(consumers, broker=connect(broker) if isinstance(broker, str) else broker)
    runner.start()
    return runner
