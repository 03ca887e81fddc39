"""Batches the small publishes of one client into common requests, as databases share a sync among commits.

publish() waits for its results, and sends them in its caller's own thread. A call that finds fewer than two requests in
flight sends its own at once. Calls that come meanwhile wait; when a request ends, the first of them sends one request
for all, whatever their topics, and gives each its results. So nobody is delayed for the sake of a batch, and no thread
works for others for longer than one request. A thread's own order stays: it waits. Two, since the broker writes one
while it syncs the other.

A request that is refused is refused for one of its messages, mostly of one call: then each thread sends its own call by
itself, so that nobody's messages are refused for another's. Likewise where the thread that sent for all was
interrupted: what had arrived by then is known by its id, and dropped.

The guard of each call is called right before the request that carries it, however long the call has waited; what a
guard holds back is left out of the request, and the others go.

submit() waits for nothing. A thread, which the first submit() starts, publishes what has gathered by a call like the
others, and settles the futures. While it waits for its results the next batch gathers, so many small publishes of one
thread, or of an event loop, cost few requests. It has one call at a time: the order of submit() stays.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from outbox_core.common.errors import (
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    ConfigurationError,
    NotAuthorized,
    NotSupported,
    OutboxError,
)
from outbox_core.messages.limits import BATCH_MESSAGES_MAX
from outbox_core.messages.message import Message, PublishResult
from outbox_core.messages.publish_guard import Guard, allow
from outbox_core.messages.refused_batch_isolation import IsolatedPublish, publish_isolated
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

logger = EventLogger(__name__)

CALL_MESSAGES_MAX: Final = 100
CALL_BYTES_MAX: Final = 256 * 1024
"""Larger publishes gain nothing by company, and go by themselves."""
REQUESTS_IN_FLIGHT_MAX: Final = 2  # three were no better

Send = Callable[[Sequence[Message], Guard], Sequence[PublishResult]]
"""Publishes by one request, which is refused as a whole. Calls the guard right before it, and raises its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The bounds of what shares requests, and of what is submitted.

    Of calls small enough to share one, at most `requests_max` requests are in flight. A shared request carries up to
    `request_messages_max` messages and `request_bytes_max` bytes of bodies; a larger message goes alone.
    `submitted_max` messages wait or are in flight; who submits more waits. A thread that has had nothing to do for
    `idle_s_max` seconds ends; the next submit() starts another.
    """

    requests_max: int = REQUESTS_IN_FLIGHT_MAX
    request_messages_max: int = BATCH_MESSAGES_MAX
    request_bytes_max: int = 4 * 1024 * 1024
    submitted_max: int = 10_000
    idle_s_max: float = 5.0


class _HeldBack(Exception):
    """A request was not sent, since guards of its calls raised; these calls have the errors."""


class _Signal:
    """An event that is set once, for one waiting thread. A bare lock: threading.Event costs more than a message."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the event."""
        self._lock.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until the event is set; returns whether it was."""
        is_set = self._lock.acquire(timeout=timeout_s)
        if is_set:
            self._lock.release()
        return is_set

    def is_set(self) -> bool:
        """Whether the event was set."""
        return not self._lock.locked()


@dataclass(eq=False, slots=True)
class _Call:
    """One publish that waits. `leads` is what it is to send, itself first; else `results` or `error` is what it got, or
    it `goes_alone`: the request that it was part of was refused or interrupted, and its thread sends it by itself.
    """

    messages: Sequence[Message]
    guard: Guard = allow
    woken: _Signal = field(default_factory=_Signal)
    leads: list[_Call] | None = None
    goes_alone: bool = False
    results: Sequence[PublishResult] | None = None
    error: OutboxError | None = None


class _CallQueue:
    """The requests in flight, and the calls that wait for one of them to end. Thread-safe; it waits for nothing."""

    def __init__(self, limits: BatchLimits, *, in_flight: int = 0, waiting: Iterable[_Call] = ()) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._in_flight = in_flight
        self._waiting = list(waiting)

    @property
    def waiting(self) -> int:
        """The number of calls that wait."""
        with self._lock:
            return len(self._waiting)

    def enter(self, messages: Sequence[Message], guard: Guard) -> _Call | None:
        """Returns the call that has to wait; None if it may be sent at once. Behind that stands hand_over()."""
        with self._lock:
            if self._in_flight < self._limits.requests_max:
                self._in_flight += 1
                return None
            call = _Call(messages, guard)
            self._waiting.append(call)
            return call

    def hand_over(self) -> None:
        """A request has ended: the first that waits leads the next one, of as many as fit."""
        with self._lock:
            if not self._waiting:
                self._in_flight -= 1
                return
            count = _count_that_fits((call.messages for call in self._waiting), self._limits)
            leader = self._waiting[0]
            leader.leads, self._waiting = self._waiting[:count], self._waiting[count:]
        leader.woken.set()

    def leave(self, call: _Call) -> bool:
        """Stop waiting; False where a request has taken the call along. One that was to lead lets the next one lead."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
                return True
            if call.leads is None:
                return False
            self._waiting = call.leads[1:] + self._waiting
            call.leads = None
        self.hand_over()
        return True


@dataclass(frozen=True, slots=True)
class _Submitted:
    message: Message
    future: Future[PublishResult]


@dataclass(slots=True)
class _SubmitQueue:
    """The messages that were submitted, and the thread that publishes them."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[_Submitted] = field(default_factory=deque)
    in_flight: int = 0
    thread: threading.Thread | None = None
    closed: bool = False


class PublishBatcher:
    """Batches the publishes of one client. Thread-safe and fork-safe."""

    def __init__(self, send: Send, *, address: str, wait_s_max: float, limits: BatchLimits | None = None) -> None:
        """`wait_s_max` bounds how long a call waits for its turn, submit() for room, and close() for what is left;
        `address` is where they go, for messages.
        """
        self._send = send
        self._address = address
        self._wait_s_max = wait_s_max
        self._limits = limits or BatchLimits()
        self._calls = _CallQueue(self._limits)
        self._submits = _SubmitQueue()
        reset_in_children(self)

    def publish(self, messages: Sequence[Message], guard: Guard = allow) -> Sequence[PublishResult]:
        """As `send`, perhaps together with others'. Raises what `send` raises, and BrokerUnavailable out of turn."""
        if len(messages) > CALL_MESSAGES_MAX or _size_bytes(messages) > CALL_BYTES_MAX:
            return self._send(messages, guard)
        notice_fork()
        queue = self._calls
        call = queue.enter(messages, guard)
        if call is None:
            try:
                return self._send(messages, guard)
            finally:
                queue.hand_over()
        self._wait(queue, call)
        return _results_of(call)

    def submit(self, message: Message) -> Future[PublishResult]:
        """Have a message published; what comes of it is the future's. A callback of a future runs in the thread that
        sends: it may submit, and must not wait.

        Raises BrokerUnavailable where there was no room in time, ConfigurationError behind close().
        """
        notice_fork()
        queue, future = self._submits, Future[PublishResult]()
        with queue.changed:
            if queue.thread is not threading.current_thread():
                in_time = queue.changed.wait_for(lambda: queue.closed or self._has_room(queue), self._wait_s_max)
                if not in_time:
                    raise BrokerUnavailable(
                        f"{self._limits.submitted_max:,} messages wait for {self._address} to take them; "
                        "this one was not sent"
                    )
            if queue.closed:
                raise ConfigurationError("this broker was closed; connect again")
            if queue.thread is None:
                thread = threading.Thread(
                    target=self._publish_submitted, args=(queue,), name="broker-submit", daemon=True
                )
                thread.start()  # where none can be started nothing was taken in
                queue.thread = thread
            queue.waiting.append(_Submitted(message, future))
            if len(queue.waiting) == 1:
                queue.changed.notify_all()
        return future

    @property
    def waiting(self) -> int:
        """The number of calls that wait for their turn."""
        notice_fork()
        return self._calls.waiting

    def close(self) -> None:
        """Send what was submitted, within the time; idempotent."""
        notice_fork()
        queue = self._submits
        with queue.changed:
            queue.closed = True
            queue.changed.notify_all()
            thread = queue.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._wait_s_max)

    def reset_after_fork(self) -> None:
        """Begin without requests in a forked child: those in flight, the calls that wait, and what was submitted are
        its parent's.
        """
        self._calls = _CallQueue(self._limits)
        self._submits = _SubmitQueue()

    # --- calls that wait for one another

    def _wait(self, queue: _CallQueue, call: _Call) -> None:
        try:
            in_turn = call.woken.wait(self._wait_s_max)
        except BaseException:  # an interrupt: calls that wait behind this one must not wait for it
            queue.leave(call)
            raise
        if not in_turn and queue.leave(call):
            raise BrokerUnavailable(f"no answer at {self._address} for the publishes before this one; it was not sent")
        call.woken.wait()  # was taken along by a request at the last moment, which ends by its own time-out
        if call.leads is not None:
            self._lead(queue, call.leads)
        if call.goes_alone:
            call.results = self._send(call.messages, call.guard)

    def _lead(self, queue: _CallQueue, calls: list[_Call]) -> None:
        """One request for all; each call gets its part of the results, or the error."""
        try:
            while going := [call for call in calls if call.error is None]:
                with suppress(_HeldBack):
                    self._send_together(going)
                    break
        except Exception as error:
            # A refusal, or a defect that one's message meets as it is encoded, is of one call: each goes alone then, in
            # the thread of its own, and meets its own.
            if not isinstance(error, OutboxError) and going == calls[:1]:
                raise
            shared = error if isinstance(error, OutboxError) and not _is_of_one(error, going) else None
            for call in going:
                call.goes_alone, call.error = shared is None, shared
        except BaseException:
            # An interrupt is this thread's alone. Whether the request arrived is unknown, and no outage of the broker:
            # those of the others that have no results yet go again, as one whose connection broke does.
            for call in calls[1:]:
                call.goes_alone = call.error is None and call.results is None
            raise
        finally:
            queue.hand_over()
            for call in calls[1:]:
                call.woken.set()

    def _send_together(self, calls: Sequence[_Call]) -> None:
        messages = [message for call in calls for message in call.messages]
        results = iter(self._send(messages, lambda: _check_guards(calls)))
        for call in calls:
            call.results = [next(results) for _ in call.messages]

    # --- the thread of what was submitted

    def _publish_submitted(self, queue: _SubmitQueue) -> None:
        batch: list[_Submitted] = []
        try:
            while batch := _next(queue, self._limits):
                self._publish_batch(batch)
        finally:  # where this thread ends before its time; the next submit() starts another
            in_doubt, unsent = _left(queue, batch)
            reason = f"what sends to {self._address} was interrupted"
            for submitted in in_doubt:
                _settle(submitted, BrokerUnavailable(f"{reason}: this may have arrived"))
            for submitted in unsent:
                _settle(submitted, BrokerUnavailable(f"{reason}; this was not sent"))

    def _publish_batch(self, batch: Sequence[_Submitted]) -> None:
        to_send = [submitted for submitted in batch if submitted.future.set_running_or_notify_cancel()]
        try:
            published = publish_isolated(self.publish, [submitted.message for submitted in to_send])
        except Exception as error:  # the thread boundary: who waits for a future must hear of it
            if not isinstance(error, OutboxError):
                logger.exception("submit_failed", extra={"messages": len(to_send)})
            for submitted in to_send:
                _settle(submitted, error)
            return
        for index, submitted in enumerate(to_send):
            _settle(submitted, _outcome_at(published, index))

    def _has_room(self, queue: _SubmitQueue) -> bool:
        return len(queue.waiting) + queue.in_flight < self._limits.submitted_max


def _check_guards(calls: Sequence[_Call]) -> None:
    """Raise _HeldBack unless all of these calls may be sent."""
    for call in calls:
        try:
            call.guard()
        except OutboxError as error:
            call.error = error
    if any(call.error is not None for call in calls):
        raise _HeldBack


def _is_of_one(error: OutboxError, calls: Sequence[_Call]) -> bool:
    """Whether one of several calls is to blame, and nobody knows which."""
    return isinstance(error, BrokerRefused) and len(calls) > 1


def _results_of(call: _Call) -> Sequence[PublishResult]:
    if call.error is not None:
        raise _own(call.error) from call.error
    if call.results is None:  # a second interrupt, while the first was dealt with
        raise BrokerUnavailable("the thread that sent this publish was interrupted: it may have arrived")
    return call.results


def _next(queue: _SubmitQueue, limits: BatchLimits) -> list[_Submitted]:
    """Returns the messages of the next request, waiting for the first; nothing if the thread has to end."""
    with queue.changed:
        queue.in_flight = 0
        queue.changed.notify_all()
        if not queue.waiting and not queue.closed:
            queue.changed.wait(limits.idle_s_max)
        if not queue.waiting:
            queue.thread = None
            return []
        count = _count_that_fits(((submitted.message,) for submitted in queue.waiting), limits)
        batch = [queue.waiting.popleft() for _ in range(count)]
        queue.in_flight = count
        return batch


def _left(queue: _SubmitQueue, batch: Sequence[_Submitted]) -> tuple[list[_Submitted], list[_Submitted]]:
    """Returns the messages that are left if the thread ended early: those of its batch, which may have arrived, and
    those that waited, which will not be sent.
    """
    with queue.changed:
        if queue.thread is not threading.current_thread():
            return [], []
        in_doubt = [submitted for submitted in batch if not submitted.future.done()]
        unsent = [submitted for submitted in queue.waiting if not submitted.future.done()]
        queue.waiting.clear()
        queue.thread, queue.in_flight = None, 0
        queue.changed.notify_all()
        return in_doubt, unsent


def _outcome_at(published: IsolatedPublish, index: int) -> PublishResult | Exception:
    """What a future gets: what an operator can help is raised, as publish() raises it."""
    refusal = published.refusals.get(index)
    if isinstance(refusal, NotAuthorized | NotSupported):
        return refusal
    result = published.results.get(index)
    if result is not None:
        return result
    return published.outage or BrokerUnavailable("it was not sent")


def _settle(submitted: _Submitted, outcome: PublishResult | Exception) -> None:
    try:
        if isinstance(outcome, OutboxError):
            submitted.future.set_exception(_own(outcome))
        elif isinstance(outcome, Exception):
            submitted.future.set_exception(outcome)
        else:
            submitted.future.set_result(outcome)
    except BaseException:  # a callback's SystemExit, which a future lets through: it is no business of the others
        logger.exception("submit_callback_failed", extra={"message_id": submitted.message.id})


def _count_that_fits(batches: Iterable[Sequence[Message]], limits: BatchLimits) -> int:
    """How many of these, from the first on, one request carries; the first in any case."""
    count = messages = size_bytes = 0
    for batch in batches:
        messages += len(batch)
        size_bytes += _size_bytes(batch)
        if count and (messages > limits.request_messages_max or size_bytes > limits.request_bytes_max):
            break
        count += 1
    return count


def _size_bytes(messages: Sequence[Message]) -> int:
    return sum([len(message.body) for message in messages])


def _own(error: OutboxError) -> OutboxError:
    """An exception of one's own that says the same: those who shared a request raise it in several threads. It has no
    results: theirs have other places.
    """
    if isinstance(error, BrokerThrottled):
        return type(error)(str(error), retry_after_ms=error.retry_after_ms)
    return type(error)(str(error))
