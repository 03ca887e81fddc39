"""Batches small publishes of many threads into common requests, as databases share a sync among commits.

A call that finds fewer than two requests on the way sends its own at once. Calls that come meanwhile wait; when a
request ends, the first of them sends one request for all, whatever their topics, and gives each its results. So nobody
is delayed for the sake of a batch, and no thread works for others for longer than one request. A thread's own order
stays: it waits. Two, since the broker writes one while it syncs the other.

A request that is refused is refused for one of its messages, mostly of one call: then each thread sends its own call by
itself, so that nobody's messages are refused for another's.

The guard of each call is called right before the request that carries it, however long the call has waited; what a
guard holds back is left out of the request, and the others go.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
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
from outbox_core.messages import limits
from outbox_core.messages.limits import BATCH_MESSAGES_MAX
from outbox_core.messages.message import Message, PublishResult
from outbox_core.messages.publish_guard import Guard, allow
from outbox_core.messages.refused_batch_isolation import IsolatedPublish, publish_isolated
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

CALL_MESSAGES_MAX: Final = 100
CALL_BYTES_MAX: Final = 256 * 1024
"""Larger publishes gain nothing by company, and go by themselves."""
REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
ON_THEIR_WAY_MAX: Final = 2  # three were no better

Send = Callable[[Sequence[Message], Guard], Sequence[PublishResult]]
"""Publishes by one request, which is refused as a whole. Calls the guard right before it, and raises its error."""


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
    it `goes_alone`: the request that it was part of was refused, and its thread sends it again by itself.
    """

    messages: Sequence[Message]
    guard: Guard = allow
    woken: _Signal = field(default_factory=_Signal)
    leads: list[_Call] | None = None
    goes_alone: bool = False
    results: Sequence[PublishResult] | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Lane:
    """The number of requests in flight, and the calls that wait for one of them to end. A forked child begins with
    none.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    on_their_way: int = 0
    waiting: list[_Call] = field(default_factory=list)


class PublishCoalescer:
    """Batches the concurrent publishes of one client."""

    def __init__(
        self, send: Send, *, address: str, wait_s_max: float, on_their_way_max: int = ON_THEIR_WAY_MAX
    ) -> None:
        """`wait_s_max` bounds how long a call waits for its turn; `address` is where they go, for messages."""
        self._send = send
        self._on_their_way_max = on_their_way_max
        self._address = address
        self._wait_s_max = wait_s_max
        self._lane = _Lane()
        reset_in_children(self)

    def publish(self, messages: Sequence[Message], guard: Guard = allow) -> Sequence[PublishResult]:
        """As `send`, perhaps together with others'. Raises what `send` raises, and BrokerUnavailable out of turn."""
        if len(messages) > CALL_MESSAGES_MAX or _size_bytes(messages) > CALL_BYTES_MAX:
            return self._send(messages, guard)
        lane = self._own_lane()
        with lane.lock:
            call = None if lane.on_their_way < self._on_their_way_max else _Call(messages, guard)
            if call is None:
                lane.on_their_way += 1
            else:
                lane.waiting.append(call)
        if call is None:
            try:
                return self._send(messages, guard)
            finally:
                _hand_over(lane)
        self._wait(lane, call)
        return _outcome(call)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for their turn."""
        lane = self._own_lane()
        with lane.lock:
            return len(lane.waiting)

    def reset_after_fork(self) -> None:
        """Begin without requests in a forked child: those on their way, and the calls that wait, are its parent's."""
        self._lane = _Lane()

    def _wait(self, lane: _Lane, call: _Call) -> None:
        try:
            in_turn = call.woken.wait(self._wait_s_max)
        except BaseException:  # an interrupt: calls that wait behind this one must not wait for it
            _leave(lane, call)
            raise
        if not in_turn and _leave(lane, call):
            raise BrokerUnavailable(f"no answer at {self._address} for the publishes before this one; it was not sent")
        call.woken.wait()  # was taken along by a request at the last moment, which ends by its own time-out
        if call.leads is not None:
            self._lead(lane, call.leads)
        if call.goes_alone:
            call.results = self._send(call.messages, call.guard)

    def _lead(self, lane: _Lane, calls: list[_Call]) -> None:
        """One request for all; each call gets its part of the results, or the error."""
        try:
            while going := [call for call in calls if call.error is None]:
                with suppress(_HeldBack):
                    self._send_together(going)
                    break
        except BrokerRefused as error:
            for call in going:
                call.goes_alone = len(going) > 1
                call.error = None if call.goes_alone else error
        except BaseException as error:
            for call in calls:
                call.error = call.error or error
            if not isinstance(error, OutboxError):
                raise
        finally:
            _hand_over(lane)
            for call in calls[1:]:
                call.woken.set()

    def _send_together(self, calls: Sequence[_Call]) -> None:
        messages = [message for call in calls for message in call.messages]
        results = iter(self._send(messages, lambda: _check_guards(calls)))
        for call in calls:
            call.results = [next(results) for _ in call.messages]

    def _own_lane(self) -> _Lane:
        notice_fork()
        return self._lane


def _check_guards(calls: Sequence[_Call]) -> None:
    """Raise _HeldBack unless all of these calls may be sent."""
    for call in calls:
        try:
            call.guard()
        except OutboxError as error:
            call.error = error
    if any(call.error is not None for call in calls):
        raise _HeldBack


def _hand_over(lane: _Lane) -> None:
    """A request has ended: the first that waits leads the next one, of as many as fit."""
    with lane.lock:
        if not lane.waiting:
            lane.on_their_way -= 1
            return
        count = _count_that_fits(lane.waiting)
        leader = lane.waiting[0]
        leader.leads, lane.waiting = lane.waiting[:count], lane.waiting[count:]
    leader.woken.set()


def _leave(lane: _Lane, call: _Call) -> bool:
    """Stop waiting; False where a request has taken the call along. One that was to lead lets the next one lead."""
    with lane.lock:
        if call in lane.waiting:
            lane.waiting.remove(call)
            return True
        if call.leads is None:
            return False
        lane.waiting = call.leads[1:] + lane.waiting
        call.leads = None
    _hand_over(lane)
    return True


def _count_that_fits(calls: Sequence[_Call]) -> int:
    messages = size_bytes = 0
    for count, call in enumerate(calls):
        messages += len(call.messages)
        size_bytes += _size_bytes(call.messages)
        if count and (messages > limits.BATCH_MESSAGES_MAX or size_bytes > REQUEST_BYTES_MAX):
            return count
    return len(calls)


def _outcome(call: _Call) -> Sequence[PublishResult]:
    match call.error:
        case None if call.results is not None:
            return call.results
        case OutboxError() as error:
            raise _own(error) from error
        case error:
            raise BrokerUnavailable("the thread that sent this publish was interrupted: it may have arrived") from error


def _size_bytes(messages: Sequence[Message]) -> int:
    return sum([len(message.body) for message in messages])


logger = EventLogger(__name__)

Told = Future[PublishResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitLimits:
    """The bounds of what is submitted and of the requests that carry it.

    `submitted_max` messages wait or are on their way; who submits more waits. A thread that has had nothing to do for
    `idle_s_max` seconds ends; the next submit() starts another. A request carries up to `request_messages_max`
    messages and `request_bytes_max` bytes of bodies; a larger message goes alone.
    """

    submitted_max: int = 10_000
    idle_s_max: float = 5.0
    request_messages_max: int = BATCH_MESSAGES_MAX
    request_bytes_max: int = REQUEST_BYTES_MAX


@dataclass(frozen=True, slots=True)
class _Entry:
    message: Message
    told: Told


@dataclass(slots=True)
class _Line:
    """The queue of messages to send. Empty in a forked child: the parent sends what was submitted there."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[_Entry] = field(default_factory=deque)
    on_their_way: int = 0
    thread: threading.Thread | None = None
    closed: bool = False


class BackgroundPublisher:
    """Publishes that nobody waits for: a thread, which the first submit() starts, sends what has gathered, and tells
    each what became of it. Thread-safe and fork-safe.

    While a request is on its way the next one gathers, so many small publishes of one thread, or of an event loop, cost
    few requests, and nobody waits for the sake of a batch. One request is on its way at a time: order is the order of
    submit().
    """

    def __init__(
        self,
        publish: Callable[[Sequence[Message]], Sequence[PublishResult]],
        *,
        address: str,
        wait_s_max: float,
        limits: SubmitLimits | None = None,
    ) -> None:
        """`wait_s_max` bounds how long submit() waits for room, and close() for what is left; `address` is where they
        go, for messages.
        """
        self._limits = limits or SubmitLimits()
        self._publish = publish
        self._address = address
        self._wait_s_max = wait_s_max
        self._line = _Line()
        reset_in_children(self)

    def submit(self, message: Message) -> Told:
        """Have a message published; what comes of it is the future's. A callback of a future runs in the thread that
        sends: it may submit, and must not wait.

        Raises BrokerUnavailable where there was no room in time, ConfigurationError behind close().
        """
        line, future = self._own_line(), Told()
        with line.changed:
            if line.thread is not threading.current_thread():
                in_time = line.changed.wait_for(lambda: line.closed or self._has_room(line), self._wait_s_max)
                if not in_time:
                    raise BrokerUnavailable(
                        f"{self._limits.submitted_max:,} messages wait for {self._address} to take them; "
                        "this one was not sent"
                    )
            if line.closed:
                raise ConfigurationError("this broker was closed; connect again")
            if line.thread is None:
                thread = threading.Thread(target=self._run, args=(line,), name="broker-submit", daemon=True)
                thread.start()  # where none can be started nothing was taken in
                line.thread = thread
            line.waiting.append(_Entry(message, future))
            if len(line.waiting) == 1:
                line.changed.notify_all()
        return future

    def close(self) -> None:
        """Send what is left, within the time; idempotent."""
        line = self._own_line()
        with line.changed:
            line.closed = True
            line.changed.notify_all()
            thread = line.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._wait_s_max)

    def reset_after_fork(self) -> None:
        """Begin with an empty queue in a forked child: the parent sends what was submitted to it."""
        self._line = _Line()

    def _run(self, line: _Line) -> None:
        batch: list[_Entry] = []
        try:
            while batch := _next(line, self._limits):
                self._send(batch)
        finally:
            for entry in _left(line, batch):  # where this thread ends before its time; the next submit() starts another
                _tell(entry, BrokerUnavailable(f"what sends to {self._address} was interrupted: this may have arrived"))

    def _send(self, batch: Sequence[_Entry]) -> None:
        to_send = [entry for entry in batch if entry.told.set_running_or_notify_cancel()]
        try:
            published = publish_isolated(self._publish, [entry.message for entry in to_send])
        except Exception as error:  # the thread boundary: who waits for a future must hear of it
            if not isinstance(error, OutboxError):
                logger.exception("submit_failed", extra={"messages": len(to_send)})
            for entry in to_send:
                _tell(entry, error)
            return
        for index, entry in enumerate(to_send):
            _tell(entry, _outcome_at(published, index))

    def _has_room(self, line: _Line) -> bool:
        return len(line.waiting) + line.on_their_way < self._limits.submitted_max

    def _own_line(self) -> _Line:
        notice_fork()
        return self._line


def _outcome_at(published: IsolatedPublish, index: int) -> PublishResult | Exception:
    """What a future gets: what an operator can help is raised, as publish() raises it."""
    refusal = published.refusals.get(index)
    if isinstance(refusal, NotAuthorized | NotSupported):
        return refusal
    result = published.results.get(index)
    if result is not None:
        return result
    return published.outage or BrokerUnavailable("it was not sent")


def _next(line: _Line, limits: SubmitLimits) -> list[_Entry]:
    """Returns the messages of the next request, waiting for the first; nothing if the thread has to end."""
    with line.changed:
        line.on_their_way = 0
        line.changed.notify_all()
        if not line.waiting and not line.closed:
            line.changed.wait(limits.idle_s_max)
        if not line.waiting:
            line.thread = None
            return []
        batch = _taken(line.waiting, limits)
        line.on_their_way = len(batch)
        return batch


def _left(line: _Line, batch: Sequence[_Entry]) -> list[_Entry]:
    """Returns the messages that are left if the thread ended early: they will not be sent."""
    with line.changed:
        if line.thread is not threading.current_thread():
            return []
        unsent = [entry for entry in (*batch, *line.waiting) if not entry.told.done()]
        line.waiting.clear()
        line.thread, line.on_their_way = None, 0
        line.changed.notify_all()
        return unsent


def _tell(entry: _Entry, outcome: PublishResult | Exception) -> None:
    try:
        if isinstance(outcome, OutboxError):
            entry.told.set_exception(_own(outcome))
        elif isinstance(outcome, Exception):
            entry.told.set_exception(outcome)
        else:
            entry.told.set_result(outcome)
    except BaseException:  # a callback's SystemExit, which a future lets through: it is no business of the others
        logger.exception("submit_callback_failed", extra={"message_id": entry.message.id})


def _taken(waiting: deque[_Entry], limits: SubmitLimits) -> list[_Entry]:
    """The first that wait, as many as a request may carry."""
    taken = [waiting.popleft()]
    size_bytes = len(taken[0].message.body)
    while waiting and len(taken) < limits.request_messages_max:
        size_bytes += len(waiting[0].message.body)
        if size_bytes > limits.request_bytes_max:
            break
        taken.append(waiting.popleft())
    return taken


def _own(error: OutboxError) -> OutboxError:
    """An exception of one's own that says the same: those who shared a request raise it in several threads. It has no
    results: theirs have other places.
    """
    if isinstance(error, BrokerThrottled):
        return BrokerThrottled(str(error), retry_after_ms=error.retry_after_ms)
    return type(error)(str(error))
