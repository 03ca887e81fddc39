"""ConsumerRunner: runs consumers in threads, which pull deliveries, pass them to handlers, and settle them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final, Self

from outbox.consumers.broadcast_reader import RETRIES, BroadcastReader
from outbox.consumers.delivery_settler import ACK_LINGER_MS, AckSender, DeliverySettler
from outbox.consumers.group_declaration import GroupDeclarer
from outbox.consumers.handler import CommittedByHandler, Consumer, NotTried, Outcome, RetryLater, reason_for
from outbox.consumers.in_flight import InFlightDeliveries, InFlightDelivery
from outbox.store.event_loop_thread import EventLoopThread
from outbox.telemetry import Telemetry, default_telemetry
from outbox.telemetry.failure_log import FailureLog, root_cause
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import (
    BrokerThrottled,
    BrokerUnavailable,
    ConfigurationError,
    GroupDeleted,
    NotSupported,
    OutboxError,
)
from outbox_core.messages.broadcast_port import Broadcaster
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import Delivery
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.logs import mask_secrets
from outbox_core.runtime.stop_signals import StopSignals

PULL_WAIT_MS: Final = 5_000
ACK_DELAY_MS: Final = 100
PAUSES: Final = Backoff(initial_ms=200, multiplier=2, max_ms=30_000, jitter=0.5)
"""The backoff between pulls while the broker or the inbox's database is unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTimes:
    """The waiting times of normal operation, and between the attempts at a broadcast message.

    A pull waits `pull_wait_ms` at the broker for messages. A handled message waits `ack_delay_ms`, at most, for
    others to be acknowledged with it, while its batch is being handled; if messages come faster than the broker
    responds to acks, an ack lingers until nothing was added for `ack_linger_ms`.
    """

    pull_wait_ms: int = PULL_WAIT_MS
    ack_delay_ms: int = ACK_DELAY_MS
    ack_linger_ms: int = ACK_LINGER_MS
    broadcast_retries: Backoff = RETRIES


logger: EventLogger = EventLogger(__name__)

STOP_TIMEOUT_SECONDS: Final = 25.0
THREADS_MAX: Final = 256


@dataclass(slots=True)
class ConsumerFigures:
    """Counts of a runner's deliveries. `lost`: not begun, since their receipts were stale; `given_up`: broadcast
    messages that failed at every attempt.
    """

    handled: int = 0
    deduplicated: int = 0
    failed: int = 0
    handed_back: int = 0
    lost: int = 0
    given_up: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHealth:
    """The health of a runner: `reasons` describe its problems, and are empty if it is healthy."""

    workers: int
    workers_alive: int
    stopping: bool
    reasons: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Returns whether all its threads work, or it was stopped on request."""
        return not self.reasons


class ConsumerRunner:
    """Runs consumers in threads until stop(). start() and stop() are idempotent; a runner starts only once."""

    def __init__(
        self,
        consumers: Sequence[Consumer],
        *,
        broker: Broker,
        telemetry: Telemetry | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
        pauses: Backoff = PAUSES,
        times: RunnerTimes | None = None,
        closes_broker: Broker | None = None,
        broker_url: str | None = None,
    ) -> None:
        """`closes_broker` is closed at the end: the broker, if the runner is its only user. `broker_url` names the
        broker in logs. `pauses` and `times`: see PAUSES and RunnerTimes.
        """
        threads = sum(consumer.workers * len(consumer.topics) for consumer in consumers)
        if threads > THREADS_MAX:
            raise ConfigurationError(f"{threads} worker threads are more than {THREADS_MAX}; run several processes")
        if any(consumer.broadcast for consumer in consumers) and not isinstance(broker, Broadcaster):
            raise NotSupported(f"{type(broker).__name__} cannot be read without a group, as a broadcast consumer does")
        self._consumers = consumers
        self._broker = broker
        self._closes_broker = closes_broker
        self._telemetry = telemetry or default_telemetry()
        self._clock = clock or SystemClock()
        self._random = random or Random()
        self._pauses = pauses
        self._times = times or RunnerTimes()
        self._in_flight = InFlightDeliveries(broker=broker, clock=self._clock, telemetry=self._telemetry)
        self._settling = DeliverySettler(broker=broker, telemetry=self._telemetry, random=self._random)
        self._groups = GroupDeclarer(broker)
        self._failures = FailureLog(logger, clock=self._clock)
        self._broker_name = mask_secrets(broker_url) if broker_url is not None else type(broker).__name__
        self._exit: BaseException | None = None
        self._loop: EventLoopThread | None = None
        self._stopping = threading.Event()
        self._signals = StopSignals()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._ended = False
        self._endings: list[threading.Thread] = []
        self._not_ended: list[str] = []
        self.figures: ConsumerFigures = ConsumerFigures()

    def start(self) -> None:
        """Start `workers` threads for each consumer and topic, and one that extends deliveries in flight."""
        try:
            self._start()
        except BaseException:  # as "can't start new thread": what was started would consume for ever
            logger.exception("consumers_not_started")
            self.stop()
            raise

    def stop(self, *, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> bool:
        """Finish the current messages, nack the others untried, and close what the runner opened; returns whether all
        ended in time. `timeout_seconds` bounds all of it; what did not end is named in the log, and left.

        A pull that waits for messages ends within its `pull_wait_ms`. Unfinished messages stay invisible while this
        process lives, and are redelivered afterwards. In a handler it returns False: call it again from outside.
        """
        deadline = time.monotonic() + timeout_seconds
        self._stopping.set()
        self._signals.wake()
        if self._loop is not None and self._loop.is_current():  # an async handler: to wait would block all of them
            return False
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_seconds_to(deadline))
        busy = [thread.name for thread in threads if thread.is_alive()]
        if busy:
            logger.warning("consumers_still_busy", extra={"threads": busy, "message_ids": self._in_flight.begun_ids()})
            return False
        not_closed = self._end(deadline)
        if not_closed:
            logger.warning("consumers_not_closed", extra={"left": not_closed})
        return not not_closed

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until stop() is called; returns False after a time-out."""
        return self._stopping.wait(timeout_seconds)

    def run_until_signal(self, *, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> bool:
        """Run until SIGTERM, SIGINT or stop(), then stop(), whose result it returns. Main thread only.

        A second signal has its original effect: it ends the process, and messages in flight are redelivered. Raises
        SystemExit(1), after all is stopped, if a handler raised SystemExit or KeyboardInterrupt.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("signals reach the main thread alone: call run_until_signal() there")

        with self._signals:
            self.start()
            signal_number = self._signals.wait()
        self._stopping.set()
        logger.info("consumers_stop", extra={"signal": signal_number})
        stopped = self.stop(timeout_seconds=timeout_seconds)
        if self._exit is not None:
            raise SystemExit(1) from self._exit
        return stopped

    def health(self) -> ConsumerHealth:
        """Returns the runner's health. Does no I/O."""
        alive = sum(thread.is_alive() for thread in self._threads)
        stopping = self._stopping.is_set()
        reasons = [f"a handler raised {type(self._exit).__name__}: all consumers stop"] if self._exit else []
        if self._threads and not stopping:
            reasons += self._groups.refusals()  # one that is found after an outage: at the start it is raised
            if alive < len(self._threads):
                reasons.append(f"{len(self._threads) - alive} of {len(self._threads)} workers are gone")
            if not self._in_flight.is_alive():
                reasons.append("the thread that keeps messages invisible is gone")
            if self._loop is not None and not self._loop.is_alive():
                reasons.append("the event loop of the async handlers is gone")
        return ConsumerHealth(
            workers=len(self._threads), workers_alive=alive, stopping=stopping, reasons=tuple(reasons)
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- a worker's thread -------------------------------------------------------------------------------------------

    def _work(self, consumer: Consumer, topic: str) -> None:
        try:
            self._work_until_stopped(consumer, topic)
        except BaseException:  # the thread boundary: health() reports that the worker has ended
            logger.critical("consumer_worker_died", extra={"topic": topic, "group": consumer.group}, exc_info=True)

    def _work_until_stopped(self, consumer: Consumer, topic: str) -> None:
        failures = 0
        name = f"{threading.current_thread().name}-ack"
        acks = AckSender(self._ack, name=name, ahead_max=consumer.prefetch, ack_linger_ms=self._times.ack_linger_ms)
        reading = self._reading(consumer, topic)

        def act() -> BaseException | None:
            if reading is None:
                return self._round(consumer, topic, acks)
            reading.round(wait_ms=self._times.pull_wait_ms)
            return None

        while not self._stopping.is_set():
            failed = self._tried(act, consumer, topic)
            failures = 0 if failed is None else failures + 1
            if failed is not None:
                self._pause(failed, consumer, topic, failures=failures)
        self._tried(acks.end, consumer, topic)

    def _reading(self, consumer: Consumer, topic: str) -> BroadcastReader | None:
        """Returns the reader of a broadcast consumer; None for a consumer of a group."""
        if consumer.broadcast is None or not isinstance(self._broker, Broadcaster):
            return None
        return BroadcastReader(
            consumer, topic, start=consumer.broadcast, broker=self._broker, call=self._call, failed=self._log_failed,
            count=self._count, pause=self._stopping.wait, telemetry=self._telemetry, random=self._random,
            retries=self._times.broadcast_retries,
        )  # fmt: skip

    def _tried(self, act: Callable[[], BaseException | None], consumer: Consumer, topic: str) -> BaseException | None:
        """Returns the error of a worker's round, if any: after it the worker continues, or stops in an orderly way."""
        try:
            return act()
        except OutboxError as error:
            return error
        except (SystemExit, KeyboardInterrupt) as error:
            self._stop_after(error)
            return error
        except BaseException as error:  # noqa: BLE001 - the worker must continue
            fields = {"topic": topic, "group": consumer.group, "error": reason_for(error)}
            self._failures.write("consumer_failed", error, fields=fields, kind=(topic, consumer.group))
            return error

    def _stop_after(self, error: BaseException) -> None:
        """Stop all consumers: a handler has requested the end of the process. The first error is kept."""
        with self._lock:
            if self._exit is not None:
                return
            self._exit = error
        logger.critical("consumers_exit", extra={"error": reason_for(error)}, exc_info=error)
        self._stopping.set()
        self._signals.wake()
        # In another thread, since stop() waits for this one. If there can be none, run_until_signal() stops them.
        with suppress(RuntimeError):
            threading.Thread(target=self.stop, name="consumer-stop", daemon=True).start()

    def _pause(self, error: BaseException, consumer: Consumer, topic: str, *, failures: int) -> None:
        """Wait with backoff, so that consumers neither overload an unavailable server nor all return at once."""
        pause_ms = self._pauses.delay_ms(failures, self._random)
        if isinstance(error, BrokerThrottled):
            pause_ms = max(pause_ms, error.retry_after_ms)
        event = "inbox_unavailable" if isinstance(error, NotTried) else "pull_failed"
        self._telemetry.counted(event, topic, consumer.group)
        fields = {
            "topic": topic, "group": consumer.group, "url": self._broker_name, "error": reason_for(error),
            "cause": reason_for(root_cause(error)), "pause_ms": pause_ms,
        }  # fmt: skip
        self._failures.write_outage(event, error, fields=fields, kind=(topic, consumer.group))
        self._stopping.wait(pause_ms / 1000)

    def _round(self, consumer: Consumer, topic: str, acks: AckSender) -> NotTried | None:
        """Pull and handle once; returns an error if the inbox's database is unavailable. Raises the broker's errors."""
        self._groups.declare(topic, consumer.group, consumer.options)
        started_at_ns = time.time_ns()
        try:
            deliveries = self._broker.pull(
                topic, consumer.group,
                max_messages=consumer.prefetch, wait_ms=self._times.pull_wait_ms, invisible_ms=consumer.invisible_ms,
                begins=True,
            )  # fmt: skip
        except GroupDeleted:
            self._groups.forget(topic, consumer.group)
            raise
        if not deliveries:
            return None
        self._groups.warn_of_lost_order(deliveries, consumer.group, consumer.options)
        batch = self._in_flight.hold(consumer, deliveries)
        try:
            self._telemetry.received(topic, consumer.group, deliveries=deliveries, started_at_ns=started_at_ns)
            return self._handle_all(batch, acks)
        finally:
            self._in_flight.release([in_flight for in_flight in batch if not in_flight.acking])

    def _handle_all(self, batch: Sequence[InFlightDelivery], acks: AckSender) -> NotTried | None:
        """Handle deliveries one after the other, and acknowledge concurrently with handling and the next pull: after a
        crash few are repeated, a batch needs few acks, and no message waits for an ack.
        """
        try:
            for position, in_flight in enumerate(batch):
                if self._stopping.is_set():
                    self._nack_untried(batch[position:], delay_ms=0, reason="consumer stops")
                    return None
                if not self._in_flight.may_begin(in_flight):
                    self._count("lost")
                    continue
                try:
                    is_handled = self._handle_one(in_flight)
                except NotTried as error:
                    untried = [in_flight] if error.conflict else batch[position:]
                    self._nack_untried(untried, delay_ms=self._pauses.initial_ms, reason=reason_for(error))
                    if not error.conflict:
                        return error
                    continue
                if is_handled and in_flight.delivery.expired:
                    # It was reported as begun: if the next message ends this process, an ack that is still under way
                    # would make that an attempt of this one.
                    self._ack([in_flight])
                elif is_handled:
                    acks.put([in_flight], wait_ms=self._times.ack_delay_ms if in_flight is not batch[-1] else 0)
        finally:
            acks.put([])  # what waits for the rest of its batch
        return None

    def _ack(self, done: Sequence[InFlightDelivery]) -> None:
        try:
            self._settling.ack(done)
        finally:
            self._in_flight.release(done)

    def _handle_one(self, in_flight: InFlightDelivery) -> bool:
        """Returns whether to acknowledge the delivery; otherwise it has been nacked. Raises NotTried."""
        consumer, delivery = in_flight.consumer, in_flight.delivery
        with self._telemetry.handling(delivery, group=consumer.group) as handling, self._in_flight.handling(in_flight):
            try:
                outcome = self._call(consumer, delivery)
            except NotTried as error:
                handling.outcome, handling.error = "not_tried", error
                raise
            except RetryLater as retry:
                handling.outcome = "retry_later"
                failed: tuple[str, int | None] = (reason_for(retry), retry.delay_ms)
                self._log_failed(consumer, delivery, retry)
            except BaseException as error:  # noqa: BLE001 - the boundary to the user's code: "not handled"
                handling.outcome, handling.error = "failed", error
                failed = (reason_for(error), None)
                self._log_failed(consumer, delivery, error)
            else:
                handling.outcome = str(outcome)
                self._count(outcome)
                return True
        self._count("failed")
        reason, delay_ms = failed
        self._nack([in_flight], delay_ms=delay_ms, reason=reason, counts=True)
        return False

    def _nack(self, batch: Sequence[InFlightDelivery], *, delay_ms: int | None, reason: str, counts: bool) -> None:
        """Nack deliveries and let them go at once, not with the rest of their batch: extending them would fail, or keep
        them from others if the nack has not arrived.
        """
        try:
            self._settling.nack(batch, delay_ms=delay_ms, reason=reason, counts=counts)
        finally:
            self._in_flight.release(batch)

    def _call(self, consumer: Consumer, delivery: Delivery) -> Outcome:
        try:
            if self._loop is not None and consumer.is_async:
                return self._loop.run(consumer.handle_async(delivery))
            return consumer.handle(delivery)
        except (SystemExit, KeyboardInterrupt) as error:
            self._stop_after(error)
            raise
        except CommittedByHandler as error:
            if isinstance(error.__cause__, SystemExit | KeyboardInterrupt):
                self._stop_after(error.__cause__)
            raise

    def _log_failed(self, consumer: Consumer, delivery: Delivery, error: BaseException) -> None:
        """Called inside the handler's span, so that log records contain the trace's id."""
        fields = {
            "topic": delivery.topic, "group": consumer.group, "message_id": delivery.id, "attempt": delivery.attempt,
            "error": reason_for(error),
        }  # fmt: skip
        if isinstance(error, RetryLater):  # as the handler requested: not a failure
            logger.info("handler_retries_later", extra=fields)
        else:
            self._failures.write("handler_failed", error, fields=fields, kind=(delivery.topic, consumer.group))

    def _nack_untried(self, batch: Sequence[InFlightDelivery], *, delay_ms: int, reason: str) -> None:
        """Nack the deliveries that are still held, in one call and without using up an attempt."""
        not_lost = [in_flight for in_flight in batch if not in_flight.lost]
        for _ in not_lost:
            self._count("handed_back")
        self._nack(not_lost, delay_ms=delay_ms, reason=reason, counts=False)

    def _count(self, name: str) -> None:
        with self._lock:  # workers count concurrently
            setattr(self.figures, name, getattr(self.figures, name) + 1)

    def _start(self) -> None:
        with self._lock:  # a handler may stop all workers before the last one is started
            if self._threads:
                return
            self._declare_groups()
            if any(consumer.is_async for consumer in self._consumers):
                loop = EventLoopThread(exits=self._stop_after)
                loop.start()
                self._loop = loop
            self._in_flight.start()
            for consumer in self._consumers:
                for topic, worker_number in itertools.product(consumer.topics, range(consumer.workers)):
                    name = f"consumer-{consumer.group}-{worker_number}"
                    thread = threading.Thread(target=self._work, args=(consumer, topic), name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)
        consumes = [
            f"{topic}/{consumer.group} x {consumer.workers}"
            for consumer in self._consumers
            for topic in consumer.topics
        ]
        logger.info("consumers_started", extra={"broker": self._broker_name, "consumes": consumes})

    def _declare_groups(self) -> None:
        """Declare the groups, so that a setting that is refused is raised where the consumers are started. While the
        broker is away the workers do it, before their first pulls.
        """
        with suppress(BrokerUnavailable):
            for consumer in self._consumers:
                for topic in consumer.topics:
                    self._groups.declare(topic, consumer.group, consumer.options)

    def _end(self, deadline: float) -> list[str]:
        """End what the workers used, after all of them have ended; returns the names of what did not end in time."""
        not_ended = [] if self._in_flight.stop(timeout_seconds=_seconds_to(deadline)) else ["extender"]
        with self._lock:  # not held while they end: a task that a handler left may raise SystemExit, see _stop_after
            if not self._ended:
                self._ended = True
                self._start_endings(deadline)
            endings = list(self._endings)
        for thread in endings:
            thread.join(_seconds_to(deadline))
        with self._lock:
            return not_ended + self._not_ended

    def _start_endings(self, deadline: float) -> None:
        """Start to end each of what the workers used, side by side: one that hangs leaves no other open. The caller
        holds the lock.
        """
        acts: list[tuple[str, Callable[[], object]]] = []
        if self._loop is not None:
            acts.append(("event loop", partial(self._end_loop, self._loop, deadline)))
        engines = {
            consumer.engine for consumer in self._consumers if consumer.engine is not None and consumer.closes_engine
        }
        acts += [
            (f"engine {engine.url.render_as_string()}", engine.dispose)
            for engine in engines
            if not engine.dialect.is_async
        ]
        if self._closes_broker is not None:
            acts.append((f"broker {self._broker_name}", self._closes_broker.close))
        self._not_ended = [name for name, _ in acts]
        for name, act in acts:
            thread = threading.Thread(target=self._end_one, args=(name, act), name="consumer-end", daemon=True)
            thread.start()
            self._endings.append(thread)

    def _end_one(self, name: str, act: Callable[[], object]) -> None:
        try:
            if act() is False:
                return
        except BaseException:  # the thread boundary: stop() names what did not end
            logger.exception("consumer_end_failed", extra={"of": name})
            return
        with self._lock:
            self._not_ended.remove(name)

    def _end_loop(self, loop: EventLoopThread, deadline: float) -> bool:
        """Cancel the tasks that handlers left, so that they return their connections, close the async engines, whose
        connections belong to this loop, and end it. A task that does not end costs half of the time. This goes on
        behind the deadline, at which stop() ceases to wait, so that a later stop() finds it ended.
        """
        loop.cancel_left_tasks(timeout_seconds=_seconds_to(deadline) / 2)
        for engine in {consumer.async_engine for consumer in self._consumers if consumer.async_engine is not None}:
            loop.run(engine.dispose())
        return loop.stop(timeout_seconds=None)


def _seconds_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
