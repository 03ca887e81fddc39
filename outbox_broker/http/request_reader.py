"""Splits the bytes received on a connection into requests: a head, then its body.

A body in the chunked transfer coding (RFC 9112, 7.1) is decoded up to its exact end: llhttp would continue into the
next request, and does not report where this one ended; so this part of the grammar is implemented here. Extensions and
trailers are ignored, within limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from outbox_broker.http.admission_limits import BudgetLease, ByteBudget
from outbox_broker.http.problems import CLOSE, Problem, malformed
from outbox_broker.http.request_head import RequestHead, check_bytes, parse_head
from outbox_core.protocol.problem import ProblemKind

LINE_BYTES_MAX: Final = 1_024
"""A chunk size with its extensions."""
TRAILER_BYTES_MAX: Final = 8 * 1024
SMALL_CHUNKS_MAX: Final = 4_096
"""Chunks of any size are allowed up to this number; beyond, their mean size must be MEAN_BYTES_MIN or more."""
MEAN_BYTES_MIN: Final = 64
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_FIELD: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")
_DETAIL: Final = (
    "the chunked body is malformed, or of too many small chunks, or its extensions or trailers are too long"
)
"""One text for all cases: the response must not depend on how much of a line has arrived."""
_CRLF: Final = b"\r\n"


class _Part(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()


class ChunkedBody:
    """Decodes one body."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._part = _Part.SIZE
        self._missing = 0
        self._chunks = 0
        self._trailer_bytes = 0

    def read(self, received: bytearray) -> bool:
        """Consume the bytes of the body from the front of `received`, leaving what follows; returns whether the body is
        complete.

        Raises Problem, which closes the connection.
        """
        while True:
            if self._part is _Part.DATA:
                with memoryview(received) as view:
                    self.data += view[: self._missing]
                taken = min(self._missing, len(received))
                del received[:taken]
                self._missing -= taken
                if self._missing:
                    return False
                self._part = _Part.DATA_END
            line = _next_line(received)
            if line is None:
                return False
            if self._part is _Part.TRAILER and not line:
                return True
            self._read_line(line)

    def _read_line(self, line: bytes) -> None:
        if self._part is _Part.SIZE:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise malformed(_DETAIL)
            self._missing = int(size[1], 16)
            self._part = _Part.DATA if self._missing else _Part.TRAILER
            self._chunks += 1
            if self._chunks > SMALL_CHUNKS_MAX + len(self.data) // MEAN_BYTES_MIN:
                raise malformed(_DETAIL)
        elif self._part is _Part.DATA_END:
            if line:
                raise malformed(_DETAIL)
            self._part = _Part.SIZE
        else:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > TRAILER_BYTES_MAX or not _FIELD.fullmatch(line):
                raise malformed(_DETAIL)


def _next_line(received: bytearray) -> bytes | None:
    """Consume and return the next line, without its end; None if it is incomplete. Raises Problem."""
    end = received.find(_CRLF, 0, LINE_BYTES_MAX + 2)
    if end < 0:
        # A lone CR or LF can never become a valid line end.
        partial_line = received[:-1] if received.endswith(b"\r") else received
        if len(partial_line) > LINE_BYTES_MAX or b"\n" in partial_line or b"\r" in partial_line:
            raise malformed(_DETAIL)
        return None
    line = bytes(received[:end])
    del received[: end + 2]
    return line


FREE_HEAD_BYTES: Final = 4 * 1024
"""An incomplete head is leased from the budget above this size."""


class RequestReader:
    """Reads the requests of one connection. Raises Problem for invalid bytes; it must not be used after that."""

    def __init__(self, budget: ByteBudget, *, head_bytes_max: int) -> None:
        self._budget = budget
        self._head_bytes_max = head_bytes_max
        self._received = bytearray()
        """Bytes that belong to no request yet."""
        self._searched = 0
        """The end of the last complete line of an incomplete head."""
        self._head_lease: BudgetLease | None = None
        self._chunked: ChunkedBody | None = None
        self._body = bytearray()

    @property
    def ahead_bytes(self) -> int:
        """The number of received bytes that belong to no request yet."""
        return len(self._received)

    def feed(self, data: memoryview) -> None:
        """Append received bytes; they are copied."""
        self._received += data

    def read_head(self) -> RequestHead | None:
        """Returns the next request's head; None if it is incomplete. Raises Problem."""
        received = self._received
        while received.startswith(b"\r\n"):  # empty lines before a request are skipped (RFC 9112, 2.2)
            del received[:2]
        end = received.find(b"\r\n\r\n", self._searched)
        size = len(received) if end < 0 else end + 4
        if size > self._head_bytes_max:
            raise Problem(
                ProblemKind.HEADERS_TOO_LARGE,
                f"the request line and headers have more than the {self._head_bytes_max:,} bytes allowed",
                bound=("request_head_bytes_max", self._head_bytes_max),
                headers=CLOSE,
            )
        if end < 0:
            check_bytes(received[self._searched : size - received.endswith(b"\r")])
            self._searched = max(0, received.rfind(b"\r\n"))
            if size > FREE_HEAD_BYTES:
                self._head_lease = self._head_lease or self._budget.lease()
                self._head_lease.resize(size)
            return None
        data = bytes(received[:size])
        del received[:size]
        self._end_head()
        head = parse_head(data)
        self._chunked = ChunkedBody() if head.is_chunked else None
        return head

    def missing_bytes(self, head: RequestHead) -> int | None:
        """Returns how many bytes of the body are missing; None if its length is unknown."""
        return None if head.is_chunked else head.content_length - len(self._body)

    def read_body(self, head: RequestHead, *, count: Callable[[int], None]) -> bytearray | None:
        """Read what has arrived of a body; returns all of it once it is complete, else None. Raises Problem.

        `count` is told how many bytes of it there are, and raises Problem if they are too many.
        """
        if self._chunked is not None:
            is_whole = self._chunked.read(self._received)
            self._body = self._chunked.data
        else:
            is_whole = self._read_length(head)
        count(len(self._body))
        if not is_whole:
            return None
        body, self._body, self._chunked = self._body, bytearray(), None
        return body

    def skip(self, count: int) -> int:
        """Drop bytes; returns how many of them have not arrived yet."""
        missing = max(0, count - len(self._received))
        del self._received[:count]
        return missing

    def clear(self) -> None:
        """Drop everything, and release its lease."""
        self._received.clear()
        self.drop_request()

    def drop_request(self) -> None:
        """Drop what was read of an incomplete request; bytes after it stay."""
        self._end_head()
        self._body, self._chunked = bytearray(), None

    def _read_length(self, head: RequestHead) -> bool:
        missing = head.content_length - len(self._body)
        if not self._body and len(self._received) == missing:
            self._body, self._received = self._received, self._body
        else:
            with memoryview(self._received) as received:
                self._body += received[:missing]
            del self._received[:missing]
        return len(self._body) == head.content_length

    def _end_head(self) -> None:
        self._searched = 0
        if self._head_lease is not None:
            self._head_lease.release()
            self._head_lease = None
