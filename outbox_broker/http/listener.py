"""Takes connections from a bound socket, each in a slot of the connection table, with TLS where it is asked for."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address, ip_network
from time import monotonic
from typing import Any, Final

from outbox_broker.http.connection import HttpConnection
from outbox_broker.http.connection_context import ConnectionContext
from outbox_broker.http.connection_table import ConnectionSlot

logger = logging.getLogger(__name__)

BACKLOG: Final = 2_048
ACCEPT_PAUSE_S: Final = 0.1
"""After an accept that failed, mostly for want of descriptors: others end meanwhile."""
LOG_LINES_PER_MINUTE: Final = 10
"""So many lines a minute are logged of what strangers can cause."""


class LogRateLimit:
    """So many log lines a minute of what anybody can cause, and no more."""

    def __init__(self) -> None:
        self._since, self._count = monotonic(), 0

    def allows(self) -> bool:
        """Whether one more may be logged; it is counted."""
        now = monotonic()
        if now - self._since >= 60:
            self._since, self._count = now, 0
        self._count += 1
        return self._count <= LOG_LINES_PER_MINUTE


@dataclass(slots=True, eq=False)
class Listener:
    """Accepts until its task is cancelled."""

    context: ConnectionContext
    bound: socket.socket
    tls: ssl.SSLContext | None
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
        """End the connections whose client has not shaken hands yet."""
        for accepted in self.opening.values():
            _shut_down(accepted)

    async def _open(self, accepted: socket.socket, slot: ConnectionSlot) -> None:
        """Make a connection of a socket; a client that does not shake hands in time is let go."""
        connection = HttpConnection(self.context, slot)
        timeout_s = self.context.settings.request_head_ms_max / 1000 if self.tls else None
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.context.loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self.tls, ssl_handshake_timeout=timeout_s
            )
            slot.evict = connection.abort
        except OSError:  # gone, or no TLS: strangers may do that as often as they like
            self.context.table.leave(slot)
            accepted.close()


def _shut_down(accepted: socket.socket) -> None:
    """Have a connection that is being made meet its end. To cancel its making would leave a half-made one behind."""
    with suppress(OSError):  # it has gone
        accepted.shutdown(socket.SHUT_RDWR)


def _network_of(address: str) -> str:
    """Whom connections are counted by: an IPv4 address, or the /64 of an IPv6 one, which is one subscriber's."""
    parsed = ip_address(address.partition("%")[0])
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return address
    return str(ip_network((parsed, 64), strict=False))


class LoopErrors:
    """The event loop's exception handler: logs what it is told of, but only so many lines a minute."""

    def __init__(self) -> None:
        self._log_rate = LogRateLimit()

    def handle(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Log one error of a callback or a transport."""
        if self._log_rate.allows():
            error = context.get("exception")
            logger.error("event_loop_error", extra={"error": str(context.get("message"))}, exc_info=error)
