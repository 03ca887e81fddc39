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
        self.cycle: Any = None
        self._unanswered = 0
        self._in_message = self._in_head = self._head_begins = False
        self._head_bytes = 0
        self._refused = False
        self._last_words = b""

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_message = self._in_head = self._head_begins = True
        self._head_bytes = 0

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
            self._refuse()
            return
        self._unanswered += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body; that of a refused request is dropped."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request ends."""
        self._in_message = False
        if not self._refused:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes of a connection. A header that never ends is seen only here, so bytes within a head count, too."""
        if self._refused:
            return
        self._head_begins = False
        super().data_received(data)
        if self._in_head and not self._refused:
            self._head_bytes += _unfinished_bytes(data, self.url) if self._head_begins else len(data)
            if self._head_bytes > 2 * self.head_bytes_max:
                self._refuse()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP: said behind the answers to what came before it, as the last thing."""
        if self._refused:
            return
        broken = self.cycle if self._in_message and not self._in_head else None
        if broken is not None:  # its head was well, its body is not: nobody works on it any more
            waiting = [one for one in self.pipeline if one[0] is broken]
            for one in waiting:
                self.pipeline.remove(one)
                self._unanswered -= 1
            if not waiting and broken.response_started:
                self.transport.close()
                return
        body = msg.encode("ascii")
        self._end_with(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body),
            at_once=broken is not None and not waiting,
        )

    def on_response_complete(self) -> None:
        """A request was answered; where one behind it was refused, and all before that are answered, that is said."""
        self._unanswered -= 1
        super().on_response_complete()
        if self._last_words and not self._unanswered and not self.transport.is_closing():
            self._say_last_words()

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
        self._end_with(head.encode("ascii") + body)

    def _end_with(self, words: bytes, *, at_once: bool = False) -> None:
        """Take nothing more of this connection, and close it with these words, in their turn."""
        self._refused, self._last_words = True, words
        if at_once or not self._unanswered:
            self._say_last_words()

    def _say_last_words(self) -> None:
        words, self._last_words = self._last_words, b""
        self.transport.write(words)
        self.transport.close()


def _unfinished_bytes(data: bytes, url: bytes) -> int:
    """The length of the last line of a head that begins among these bytes. One with its target may stand right
    behind a body, which does not count.
    """
    line = data[data.rfind(b"\n") + 1 :]
    return len(line) - max(0, line.rfind(url))
