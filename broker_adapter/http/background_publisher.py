"""Publishes that nobody waits for: a thread sends what has gathered, and tells each what became of it. No requests.

While a request is on its way the next one gathers, so many small publishes of one thread, or of an event loop, cost few
requests, and nobody waits for the sake of a batch. One request is on its way at a time: order is the order of submit().
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from broker_adapter.http.error_mapping import own
from broker_adapter.http.publish_coalescing import REQUEST_BYTES_MAX
from outbox_core.common.errors import (
    BrokerUnavailable,
    ConfigurationError,
    NotAuthorized,
    NotSupported,
    OutboxError,
)
from outbox_core.messages.limits import BATCH_MESSAGES_MAX
from outbox_core.messages.message import Message, PublishResult
from outbox_core.messages.refused_batch_isolation import IsolatedPublish, publish_isolated
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

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
    """Publishes messages of one client in a thread, which the first submit() starts. Thread-safe and fork-safe."""

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
            _tell(entry, _outcome(published, index))

    def _has_room(self, line: _Line) -> bool:
        return len(line.waiting) + line.on_their_way < self._limits.submitted_max

    def _own_line(self) -> _Line:
        notice_fork()
        return self._line


def _outcome(published: IsolatedPublish, index: int) -> PublishResult | Exception:
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
            entry.told.set_exception(own(outcome))
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
