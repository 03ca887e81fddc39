"""Reads one response from a connection, completely and within a deadline. Does not decode it.

http.client reads an answer's head with the parser of e-mails, which costs more than all else of a small request: a
single publish by urllib3's pool, which reads so, takes this client 232 us of processor time, by this reader 83. What an
answer of HTTP/1.1 may look like is little (RFC 9112): a status line, fields, and a body with a length or in chunks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Protocol

from requests import exceptions as http
from urllib3.exceptions import ProtocolError

READ_BYTES: Final = 256 * 1024
HEAD_BYTES_MAX: Final = 64 * 1024
CHUNK_LINE_BYTES_MAX: Final = 4 * 1024
ANSWER_BYTES_A_SECOND_MIN: Final = 1024 * 1024
"""A broker or a network that is slower than this is given up: a read time-out alone never ends a trickle."""
ANSWER_BYTES_MAX: Final = 512 * 1024 * 1024
"""Bodies of 64 MiB, each byte of which takes six in JSON (a control character), and their headers. More is no answer
of this protocol.
"""
_HEAD_END: Final = b"\r\n\r\n"
_KNOWN_HEAD_BYTES_MAX: Final = 1024
_LENGTH_DIGITS_MAX: Final = 15
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class ReadableSocket(Protocol):
    """A socket, plain or TLS, whose reads time out."""

    def recv(self, size: int, /) -> bytes:
        """Some bytes; none at the end. Raises TimeoutError, OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """An answer that came whole. Names of headers are in lower case; of a repeated one the first counts."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    stays_open: bool = False
    """Whether the connection may carry another request."""


def read_answer(readable: ReadableSocket, *, timeout_s: float) -> HttpResponse:
    """One answer, its body within `timeout_s` and a second a MiB.

    Raises exceptions of requests: ReadTimeout, ConnectionError of a ProtocolError where it breaks off or is no HTTP,
    ContentDecodingError where it is too long.
    """
    try:
        return _Reader(readable, timeout_s=timeout_s).answer()
    except TimeoutError as error:
        raise http.ReadTimeout(error) from error
    except OSError as error:  # exceptions of requests are of this kind, too
        if isinstance(error, http.RequestException):
            raise
        raise http.ConnectionError(ProtocolError("the connection broke", error)) from error
    except ProtocolError as error:
        raise http.ConnectionError(error) from error


class _Reader:
    """Bytes of one answer, those that are read and not used yet in `_data`."""

    def __init__(self, readable: ReadableSocket, *, timeout_s: float) -> None:
        self._recv = readable.recv
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._data = b""

    def answer(self) -> HttpResponse:
        """Read it all. Answers of 1xx are passed over: they announce another."""
        status, version, headers = self._head()
        while 100 <= status < 200:
            status, version, headers = self._head()
        self._deadline_s = time.monotonic() + self._timeout_s
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if coding.lower() != "chunked":
                raise ProtocolError(f"an answer cannot be read in the transfer coding {coding[:100]!r}")
            content = self._chunks()
        elif length is not None:
            content = self._exactly(_number(length, base=10))
        else:
            # A head that breaks off, and a body that ends with the connection, look like a lost connection.
            raise ProtocolError("the answer has no length: its head broke off")
        certain = version == b"HTTP/1.1" and (coding is None or length is None) and not self._data
        stays_open = certain and headers.get("connection", "").lower() != "close"
        return HttpResponse(status_code=status, headers=headers, content=content, stays_open=stays_open)

    def _head(self) -> tuple[int, bytes, Mapping[str, str]]:
        end = self._data.find(_HEAD_END)
        while end < 0:
            if len(self._data) > HEAD_BYTES_MAX or (len(self._data) >= 5 and not self._data.startswith(b"HTTP/")):
                raise ProtocolError("the answer's head is none of HTTP")
            self._data += self._more()
            end = self._data.find(_HEAD_END)
        head = self._data[:end]
        self._data = self._data[end + len(_HEAD_END) :]
        return _known_head(head) if end <= _KNOWN_HEAD_BYTES_MAX else _read_head(head)

    def _exactly(self, size: int) -> bytes:
        if size > ANSWER_BYTES_MAX:
            raise http.ContentDecodingError(f"the answer has more than {ANSWER_BYTES_MAX:,} bytes")
        pieces, have = [self._data], len(self._data)
        while have < size:
            piece = self._more()
            self._check_pace(have)
            pieces.append(piece)
            have += len(piece)
        data = b"".join(pieces) if len(pieces) > 1 else pieces[0]
        self._data = data[size:]
        return data[:size] if self._data else data

    def _chunks(self) -> bytes:
        pieces: list[bytes] = []
        total = 0
        while size := _number(self._line().partition(b";")[0].decode("latin-1"), base=16):
            total += size
            if total > ANSWER_BYTES_MAX:
                raise http.ContentDecodingError(f"the answer has more than {ANSWER_BYTES_MAX:,} bytes")
            pieces.append(self._exactly(size + 2)[:size])
        while self._line():
            pass  # trailers
        return b"".join(pieces)

    def _line(self) -> bytes:
        while (end := self._data.find(b"\r\n")) < 0:
            if len(self._data) > CHUNK_LINE_BYTES_MAX:
                raise ProtocolError("the answer has a line of a chunk that does not end")
            self._data += self._more()
            self._check_pace(len(self._data))
        line, self._data = self._data[:end], self._data[end + 2 :]
        return line

    def _more(self) -> bytes:
        piece = self._recv(READ_BYTES)
        if not piece:
            raise ProtocolError("the connection was closed before the answer was whole")
        return piece

    def _check_pace(self, size_bytes: int) -> None:
        if (
            self._deadline_s is not None
            and time.monotonic() > self._deadline_s + size_bytes / ANSWER_BYTES_A_SECOND_MIN
        ):
            raise http.ReadTimeout("the answer trickles: it was not whole in time")


def _read_head(head: bytes) -> tuple[int, bytes, Mapping[str, str]]:
    status_line, *lines = head.split(b"\r\n")
    version, _, status_text = status_line.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not status_text[:3].isdigit():
        raise ProtocolError("the answer's first line is none of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise ProtocolError("the answer has a header line without a colon")
        first_value = headers.setdefault(name.decode("latin-1").lower(), text := value.strip().decode("latin-1"))
        if first_value != text and name.lower() in _FRAMING:
            raise ProtocolError("the answer says twice, and differently, where it ends")
    return int(status_text[:3]), version, MappingProxyType(headers)


_known_head = lru_cache(maxsize=64)(_read_head)
"""Answers of one second to one kind of request often begin with the same bytes."""


def _number(text: str, *, base: int) -> int:
    stripped = text.strip()
    if not stripped.isascii() or not stripped.isalnum() or len(stripped) > _LENGTH_DIGITS_MAX:
        raise ProtocolError(f"{stripped[:100]!r} is no length of an answer")
    try:
        return int(stripped, base)
    except ValueError as error:
        raise ProtocolError(f"{stripped[:100]!r} is no length of an answer") from error
