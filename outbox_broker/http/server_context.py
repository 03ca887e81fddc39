"""State shared by the connections of one server, and the periodic check of their deadlines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Final, Protocol

from outbox_broker.http.admission_limits import ByteBudget
from outbox_broker.http.application import Application
from outbox_broker.http.connection_table import ConnectionTable
from outbox_broker.http.http_settings import HttpSettings

READ_BYTES_MAX: Final = 256 * 1024
"""Bytes of a body read at a time."""


class Connection(Protocol):
    """The server's interface to a connection."""

    deadline: float
    """By the event loop's clock, when the current phase must end; infinity if it may take any time."""

    def expire(self) -> None:
        """Handle the passed deadline."""

    def finish(self) -> None:
        """Close after the response to the request in progress; at once if there is none."""

    def abort(self) -> None:
        """End at once."""


@dataclass(slots=True, kw_only=True, eq=False)
class ServerContext:
    """State shared by all connections of one server; used on its event loop only."""

    loop: asyncio.AbstractEventLoop
    application: Application
    budget: ByteBudget
    table: ConnectionTable
    settings: HttpSettings
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    is_stopping: bool = False
    date: bytes = b""
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES_MAX)))
    """The receive buffer of all connections: its content is copied or used before the next read."""

    def __post_init__(self) -> None:
        self.sweep()

    def sweep(self) -> None:
        """End connections past their deadlines, and update the date. To be called at least once a second."""
        self.date = formatdate(usegmt=True).encode("ascii")
        now = self.loop.time()
        for connection in [connection for connection in self.connections if connection.deadline <= now]:
            connection.expire()

    def stop(self) -> None:
        """Close idle connections, and each other one after its pending response."""
        self.is_stopping = True
        for connection in list(self.connections):
            connection.finish()
