"""Keeps the one session of a process with NATS: a thread with an event loop, and the connection on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

from broker_adapter.nats.event_loop import LoopThread
from broker_adapter.nats.failover_connection import FailoverConnection, NatsServers
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

T = TypeVar("T")

GRACE_S: Final = 1.0
"""How much longer than the time-out a caller waits for the event loop to keep it."""


@dataclass(slots=True)
class _Session:
    thread: LoopThread
    connector: FailoverConnection


class ProcessSession:
    """Thread-safe. A forked child gets a session of its own, and leaves its parent's alone."""

    def __init__(self, servers: NatsServers, *, random: Random | None = None) -> None:
        self._servers = servers
        self._random = random or Random()
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._left: list[_Session] = []
        self._is_closed = False
        reset_in_children(self)

    def call(self, work: Callable[[FailoverConnection, float], Coroutine[Any, Any, T]], *, timeout_s: float) -> T:
        """Run a coroutine, which gets the deadline, on the event loop, and wait for it.

        Raises BrokerUnavailable once closed, and where it does not end in time.
        """
        notice_fork()
        with self._lock:
            if self._is_closed:
                raise BrokerUnavailable(f"the broker for NATS at {self._servers.place} is closed; open a new one")
            if self._session is None:
                thread = LoopThread()
                self._session = _Session(
                    thread, FailoverConnection(self._servers, loop=thread.loop, random=self._random)
                )
            session = self._session
        deadline = session.thread.loop.time() + timeout_s
        return session.thread.call(partial(work, session.connector, deadline), timeout_s=timeout_s + GRACE_S)

    def close(self) -> None:
        """End the connection and the thread; idempotent."""
        notice_fork()
        with self._lock:
            self._is_closed = True
            session, self._session = self._session, None
        if session is not None:
            session.thread.close()

    def reset_after_fork(self) -> None:
        """Forget the session in a forked child: thread and connection stay the parent's."""
        self._lock = threading.Lock()
        if self._session is not None:
            self._session.thread.leave_to_parent()
            self._left.append(self._session)
            self._session = None
