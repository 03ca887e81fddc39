"""Decodes a body in the chunked transfer coding (RFC 9112, 7.1), up to its exact end.

llhttp would continue into the next request, and does not report where this one ended; so this part of the grammar is
implemented here. Extensions and trailers are ignored, within limits.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from outbox_broker.http.problems import malformed

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
