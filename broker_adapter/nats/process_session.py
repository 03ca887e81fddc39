"""Keeps the one session of a process with NATS: a thread with an event loop, and the connection on it, to the next
server where one cannot be reached.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

from nats import errors as client_errors

from broker_adapter.nats.connection import Limits, Login, NatsConnection
from broker_adapter.nats.errors import exception_for
from broker_adapter.nats.event_loop import ClientLoop, LoopThread
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, NotAuthorized
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

        Raises ConfigurationError once closed, and BrokerUnavailable where it does not end in time.
        """
        notice_fork()
        with self._lock:
            if self._is_closed:
                raise ConfigurationError("this broker was closed; connect again")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsServers:
    """The addresses of a cluster or a single server, as `nats://host:port`; `shown_addresses` is for messages."""

    addresses: tuple[str, ...]
    shown_addresses: str
    login: Login
    limits: Limits = field(default_factory=Limits)


class FailoverConnection:
    """The one connection of an event loop, whose coroutines share it: opened when it is needed, to the next server
    where one cannot be reached.
    """

    def __init__(self, servers: NatsServers, *, loop: ClientLoop, random: Random) -> None:
        self._servers = servers
        self._loop = loop
        self._addresses = random.sample(servers.addresses, len(servers.addresses))
        self._lock = asyncio.Lock()
        self._connection: NatsConnection | None = None

    async def connected(self, *, deadline: float) -> NatsConnection:
        """An open connection. Raises NotAuthenticated, and BrokerUnavailable where no server can be reached."""
        async with self._lock:
            if self._connection is not None:
                if self._connection.is_open:
                    return self._connection
                await self._connection.close()
                self._connection = None
            error = BrokerUnavailable(f"NATS at {self._servers.shown_addresses} was not asked: no time was left")
            for _ in self._servers.addresses:
                try:
                    async with asyncio.timeout_at(deadline):
                        self._connection = await self._open_next()
                    return self._connection
                except NotAuthorized:
                    raise
                except BrokerUnavailable as refused:
                    error = refused
                except TimeoutError:
                    break
            raise error

    async def drop(self, connection: NatsConnection) -> None:
        """End a connection that is broken."""
        async with self._lock:
            if self._connection is connection:  # else another batch was quicker, and this would cut the next one
                self._connection = None
                await connection.close()

    async def _open_next(self) -> NatsConnection:
        address = self._addresses.pop(0)
        self._addresses.append(address)
        try:
            return await NatsConnection.open(
                address, login=self._servers.login, limits=self._servers.limits, loop=self._loop
            )
        except (client_errors.Error, OSError) as error:
            raise exception_for(error, what=f"NATS at {address.partition('://')[2]} cannot be used") from error
