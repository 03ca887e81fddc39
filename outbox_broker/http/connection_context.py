"""What the connections of one server share, and the clock that ends those which are too slow."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Final, Protocol

from outbox_broker.http.application import Application
from outbox_broker.http.byte_budget import ByteBudget
from outbox_broker.http.connection_table import ConnectionTable
from outbox_broker.http.http_settings import HttpSettings

READ_BYTES_MAX: Final = 256 * 1024
"""What is read of a body at a time."""


class Connection(Protocol):
    """What a server asks of a connection."""

    deadline: float
    """By the event loop's clock, when what it is doing has to be done; infinity where that may take any time."""

    def expire(self) -> None:
        """The deadline has passed."""

    def finish(self) -> None:
        """Close behind the response to what is in work; at once where nothing is."""

    def abort(self) -> None:
        """End at once."""


@dataclass(slots=True, kw_only=True, eq=False)
class ConnectionContext:
    """What all connections of one server share; on its event loop only."""

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
    """Where all connections read into: what came is copied or used before the next one reads."""

    def __post_init__(self) -> None:
        self.sweep()

    def sweep(self) -> None:
        """End what is past its deadline, and tell the time anew. To be called at least once a second."""
        self.date = formatdate(usegmt=True).encode("ascii")
        now = self.loop.time()
        for connection in [one for one in self.connections if one.deadline <= now]:
            connection.expire()

    def stop(self) -> None:
        """Close connections that are idle, and each other one behind the response that it waits for."""
        self.is_stopping = True
        for connection in list(self.connections):
            connection.finish()
