"""Small publishes of many threads share requests, as commits share a sync. Not how a request is made, nor its retries.

A call that finds no request of its topic on the way sends its own at once. Calls that come meanwhile wait; when the
request ends, the first of them sends one request for all, and gives each its results. So nobody is delayed for the
sake of a batch, and no thread works for others for longer than one request. A thread's own order stays: it waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from broker_adapter.http.failures import own
from messaging import limits
from messaging.errors import BrokerUnavailable, OutboxError
from messaging.message import Message, PublishResult

CALL_MESSAGES_MAX: Final = 100
CALL_BYTES_MAX: Final = 256 * 1024
"""Larger publishes gain nothing by company, and go by themselves."""
REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024

Send = Callable[[str, Sequence[Message]], list[PublishResult]]


class _Signal:
    """An event for one who waits, and told once. A lock by itself: threading.Event costs more than its message."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Tell."""
        self._lock.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until told; whether it was."""
        told = self._lock.acquire(timeout=timeout_s)
        if told:
            self._lock.release()
        return told

    def is_set(self) -> bool:
        """Whether it was told."""
        return not self._lock.locked()


@dataclass(eq=False, slots=True)
class _Call:
    """One publish that waits. `leads` is what it is to send, itself first; else `results` or `error` is what it got."""

    messages: Sequence[Message]
    woken: _Signal = field(default_factory=_Signal)
    leads: list[_Call] | None = None
    results: list[PublishResult] | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Lanes:
    """By topic with a request on its way, the calls that wait. A forked child begins with none."""

    process: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: dict[str, list[_Call]] = field(default_factory=dict)


class Gathering:
    """Publishes of one client. `send` publishes a list to a topic: one request, or several where it is refused."""

    def __init__(self, send: Send, *, place: str, wait_s_max: float) -> None:
        """`wait_s_max` bounds how long a call waits for its turn; `place` is where they go, for messages."""
        self._send = send
        self._place = place
        self._wait_s_max = wait_s_max
        self._lanes = _Lanes()

    def publish(self, topic: str, messages: Sequence[Message]) -> list[PublishResult]:
        """As `send`, perhaps together with others'. Raises what `send` raises, and BrokerUnavailable out of turn."""
        if len(messages) > CALL_MESSAGES_MAX or _size_bytes(messages) > CALL_BYTES_MAX:
            return self._send(topic, messages)
        call = _Call(messages)
        lanes = self._own_lanes()
        with lanes.lock:
            waiting = lanes.waiting.get(topic)
            if waiting is None:
                lanes.waiting[topic] = []
            else:
                waiting.append(call)
        if waiting is None:
            try:
                return self._send(topic, messages)
            finally:
                _hand_over(lanes, topic)
        self._wait(lanes, topic, call)
        return _outcome(call)

    def waiting(self, topic: str) -> int:
        """How many calls wait for their turn."""
        lanes = self._own_lanes()
        with lanes.lock:
            return len(lanes.waiting.get(topic, ()))

    def _wait(self, lanes: _Lanes, topic: str, call: _Call) -> None:
        try:
            in_turn = call.woken.wait(self._wait_s_max)
        except BaseException:  # an interrupt: whoever waits behind this one must not wait for it
            _leave(lanes, topic, call)
            raise
        if not in_turn and _leave(lanes, topic, call):
            raise BrokerUnavailable(
                f"no answer at {self._place} for the publishes to {topic} before this one; it was not sent"
            )
        call.woken.wait()  # was taken along by a request at the last moment, which ends by its own time-out
        if call.leads is not None:
            self._lead(lanes, topic, call.leads)

    def _lead(self, lanes: _Lanes, topic: str, calls: list[_Call]) -> None:
        """One request for all; each call gets its part of the results, or the error."""
        try:
            results = iter(self._send(topic, [message for call in calls for message in call.messages]))
            for call in calls:
                call.results = [next(results) for _ in call.messages]
        except BaseException as error:
            for call in calls:
                call.error = error
            if not isinstance(error, OutboxError):
                raise
        finally:
            _hand_over(lanes, topic)
            for call in calls[1:]:
                call.woken.set()

    def _own_lanes(self) -> _Lanes:
        if self._lanes.process != os.getpid():
            self._lanes = _Lanes()
        return self._lanes


def _hand_over(lanes: _Lanes, topic: str) -> None:
    """The request has ended: the first that waits leads the next one, of as many as fit."""
    with lanes.lock:
        waiting = lanes.waiting[topic]
        if not waiting:
            del lanes.waiting[topic]
            return
        count = _count_that_fits(waiting)
        lanes.waiting[topic] = waiting[count:]
        leader = waiting[0]
        leader.leads = waiting[:count]
    leader.woken.set()


def _leave(lanes: _Lanes, topic: str, call: _Call) -> bool:
    """Stop waiting; False where a request has taken the call along. One that was to lead lets the next one lead."""
    with lanes.lock:
        waiting = lanes.waiting.get(topic, [])
        if call in waiting:
            waiting.remove(call)
            return True
        if call.leads is None:
            return False
        lanes.waiting[topic] = call.leads[1:] + waiting
        call.leads = None
    _hand_over(lanes, topic)
    return True


def _count_that_fits(calls: Sequence[_Call]) -> int:
    messages = size_bytes = 0
    for count, call in enumerate(calls):
        messages += len(call.messages)
        size_bytes += _size_bytes(call.messages)
        if count and (messages > limits.BATCH_MESSAGES_MAX or size_bytes > REQUEST_BYTES_MAX):
            return count
    return len(calls)


def _outcome(call: _Call) -> list[PublishResult]:
    match call.error:
        case None if call.results is not None:
            return call.results
        case OutboxError() as error:
            raise own(error) from error
        case error:
            raise BrokerUnavailable("the thread that sent this publish was interrupted: it may have arrived") from error


def _size_bytes(messages: Sequence[Message]) -> int:
    return sum([len(message.body) for message in messages])
