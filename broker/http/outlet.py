"""Answers written to a connection's socket with the interpreter's lock let go of. Not what is written, nor when.

uvloop's transport writes with the lock in its hands. The kernel wakes the client within that call, and where processors
are few it lets the client go first: for milliseconds every thread of the server would wait for a lock that nobody uses.
"""

from __future__ import annotations

import asyncio
import os


class Outlet:
    """The way out of one connection, beside its transport. On the loop only."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Of a connection with TLS all goes by the transport."""
        self._transport = transport
        self._descriptor = -1
        if transport.get_extra_info("sslcontext") is None:
            self._descriptor = transport.get_extra_info("socket").fileno()

    def write(self, head: bytes, body: bytes) -> None:
        """As transport.writelines(); what does not go at once is the transport's to send."""
        sent = self._written(head, body)
        if sent < len(head):
            self._transport.writelines((head[sent:], body))
        elif sent < len(head) + len(body):
            self._transport.write(memoryview(body)[sent - len(head) :])

    def _written(self, head: bytes, body: bytes) -> int:
        """How many bytes went. None while some wait before them, nor where the descriptor may be another's by now."""
        transport = self._transport
        if self._descriptor < 0 or transport.is_closing() or transport.get_write_buffer_size():
            return 0
        try:
            return os.writev(self._descriptor, (head, body))
        except OSError:  # full, or broken: the transport meets the same, and knows what is to be done
            return 0
