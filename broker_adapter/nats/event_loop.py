"""Runs an event loop in a thread, for clients that offer asyncio only."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from outbox_core.common.errors import BrokerUnavailable

T = TypeVar("T")

JOIN_SECONDS_MAX: Final = 10.0
_CLOSED: Final = "this broker was closed in this process; make a new one"


class ClientLoop(asyncio.SelectorEventLoop):
    """Knows the transports of its client, which hides them: to cut one, and to see whether it has become TLS."""

    def __init__(self) -> None:
        # poll() has no state in the kernel: an epoll would be shared with a forked child, whose garbage collector may
        # take the parent's sockets off it.
        super().__init__(selectors.PollSelector())
        self._client_transports: list[asyncio.BaseTransport] = []
        self._client_is_encrypted = False

    @property
    def is_encrypted(self) -> bool:
        """Whether the newest connection has been upgraded to TLS, its certificate checked."""
        return self._client_is_encrypted

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Connect, and remember the transport."""
        self._client_is_encrypted = False
        connection = await super().create_connection(*args, **options)
        still_open = [transport for transport in self._client_transports if not transport.is_closing()]
        self._client_transports = [*still_open, connection[0]]
        return connection

    async def start_tls(self, *args: Any, **options: Any) -> Any:
        """Upgrade to TLS, and remember that it was done."""
        transport = await super().start_tls(*args, **options)
        self._client_is_encrypted = True
        return transport

    def cut_connections(self) -> None:
        """End all connections at once, whatever is still to be sent."""
        for transport in self._client_transports:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        self._client_transports.clear()

    def leave_sockets(self) -> None:
        """Detach a forked child from the parent's connections, so that not even freeing them reaches them."""
        for transport in self._client_transports:
            shared: socket.socket | None = transport.get_extra_info("socket")
            if shared is not None and shared.fileno() >= 0:
                with Path(os.devnull).open("rb") as nothing, contextlib.suppress(OSError):
                    os.dup2(nothing.fileno(), shared.fileno())


class LoopThread:
    """Runs coroutines for callers in other threads of one process. Starts at once, ends with close()."""

    def __init__(self) -> None:
        self.loop: Final = ClientLoop()
        self._stop = asyncio.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="outbox-nats", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Coroutine[Any, Any, T]], *, timeout_s: float) -> T:
        """Run a coroutine to its end, and wait for it. Raises BrokerUnavailable where it does not end in time."""
        with self._lock:
            if self._closed:
                raise BrokerUnavailable(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(function(), self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise BrokerUnavailable(f"the server did not answer within {timeout_s:.1f} s") from error
        except concurrent.futures.CancelledError as error:
            raise BrokerUnavailable(_CLOSED) from error

    def close(self) -> None:
        """End what runs, and the thread. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(JOIN_SECONDS_MAX)

    def leave_to_parent(self) -> None:
        """Leave the parent's connections alone in a forked child: neither write to them nor close them."""
        self.loop.leave_sockets()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stop.wait()
        self.loop.cut_connections()
        await asyncio.sleep(0)  # the transports' own ends, so that none is left open
