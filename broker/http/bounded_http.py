"""The HTTP/1.1 parser with a bound on a request's head, which uvicorn's own has not. Needs httptools."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from broker.http.problems import Problem
from messaging.problem import PROBLEM_TYPE, ProblemKind


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A head that grows over `head_bytes_max` is answered 431, and its connection closed."""

    head_bytes_max = 32 * 1024

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_head = False
        self._head_bytes = 0
        self._refused = False

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target, counted."""
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header that is complete, counted."""
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        """The head ends: only now a request comes of it, if it is not too long, nor behind one that was."""
        self._in_head = False
        if self._refused:
            return
        if self._head_bytes > self.head_bytes_max:
            self._refused = True
            self._refuse()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body; that of a refused request is dropped."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request ends."""
        if not self._refused:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes of a connection. A header that never ends is seen only here, so bytes within a head count, too."""
        if self._refused:
            return
        unfinished = self._in_head
        super().data_received(data)
        if unfinished and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > 2 * self.head_bytes_max and not self._refused:
                self._refused = True
                self._refuse()

    def _refuse(self) -> None:
        problem = Problem(
            ProblemKind.HEADERS_TOO_LARGE,
            f"the request line and headers have more than the {self.head_bytes_max:,} bytes allowed",
            bound=("request_head_bytes_max", self.head_bytes_max),
        )
        body = bytes(problem.response().body)
        head = (
            f"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: {PROBLEM_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def bounded_protocol(head_bytes_max: int) -> type[BoundedHttpProtocol]:
    """The protocol class with this bound; uvicorn makes an instance for each connection."""
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"head_bytes_max": head_bytes_max})
