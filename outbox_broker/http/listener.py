"""Accepts connections on a bound socket, each in a slot of the connection table, with TLS if configured."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address, ip_network
from time import monotonic
from typing import Any, Final

from outbox_broker.http.connection import HttpConnection
from outbox_broker.http.connection_table import ConnectionSlot
from outbox_broker.http.server_context import ServerContext
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

BACKLOG: Final = 2_048
ACCEPT_PAUSE_S: Final = 0.1
"""Pause after a failed accept, mostly for lack of descriptors: other connections end meanwhile."""
LOG_LINES_PER_MINUTE: Final = 10
"""Log lines per minute for events that strangers can cause."""


class LogRateLimit:
    """A rate limit for log lines that anybody can cause."""

    def __init__(self) -> None:
        self._since, self._count = monotonic(), 0

    def allows(self) -> bool:
        """Returns whether one more line may be logged, and counts it."""
        now = monotonic()
        if now - self._since >= 60:
            self._since, self._count = now, 0
        self._count += 1
        return self._count <= LOG_LINES_PER_MINUTE


@dataclass(slots=True, eq=False)
class Listener:
    """Accepts until its task is cancelled."""

    context: ServerContext
    bound: socket.socket
    tls: Callable[[], ssl.SSLContext | None]
    """Returns that of the next connection."""
    log_rate: LogRateLimit = field(default_factory=LogRateLimit)
    opening: dict[asyncio.Task[None], socket.socket] = field(default_factory=dict)

    async def run(self) -> None:
        """Accept connections."""
        self.bound.settimeout(0)
        self.bound.listen(BACKLOG)
        loop = self.context.loop
        while True:
            try:
                accepted, address = await loop.sock_accept(self.bound)
            except OSError as error:
                if self.log_rate.allows():
                    logger.warning("connection_not_accepted", extra={"error": error.strerror})
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            slot = self.context.table.enter(_network_of(str(address[0])), partial(_shut_down, accepted))
            if slot is None:
                accepted.close()
                continue
            task = loop.create_task(self._open(accepted, slot))
            self.opening[task] = accepted
            task.add_done_callback(self.opening.pop)

    def stop_opening(self) -> None:
        """End the connections whose TLS handshake is not complete."""
        for accepted in self.opening.values():
            _shut_down(accepted)

    async def _open(self, accepted: socket.socket, slot: ConnectionSlot) -> None:
        """Create a connection on a socket; a client that does not complete the handshake in time is dropped."""
        connection = HttpConnection(self.context, slot)
        tls = self.tls()
        timeout_s = self.context.settings.request_head_ms_max / 1000 if tls else None
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.context.loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=timeout_s
            )
            slot.evict = connection.abort
        except OSError:  # gone, or no TLS: strangers can cause this at any rate
            self.context.table.leave(slot)
            accepted.close()


def _shut_down(accepted: socket.socket) -> None:
    """End a connection being created. Cancelling the creation would leave a half-created one behind."""
    with suppress(OSError):  # it is closed already
        accepted.shutdown(socket.SHUT_RDWR)


def _network_of(address: str) -> str:
    """Returns the key for counting connections: an IPv4 address, or the /64 of an IPv6 one: one subscriber."""
    parsed = ip_address(address.partition("%")[0])
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return address
    return str(ip_network((parsed, 64), strict=False))


class LoopErrors:
    """The event loop's exception handler: logs errors, with a rate limit."""

    def __init__(self) -> None:
        self._log_rate = LogRateLimit()

    def handle(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Log one error of a callback or a transport."""
        if self._log_rate.allows():
            error = context.get("exception")
            logger.error("event_loop_error", extra={"error": str(context.get("message"))}, exc_info=error)
