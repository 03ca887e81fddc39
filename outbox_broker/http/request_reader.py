"""Splits the bytes received on a connection into requests: a head, then its body.

A head is parsed with llhttp (httptools), and everything is rejected that two servers could read differently. RFC 9112
leaves servers some freedom, and llhttp uses part of it. Each freedom that request smuggling was built on is rejected
here: an ambiguous head gets an error and the end of its connection, never an interpretation.

A body in the chunked transfer coding (RFC 9112, 7.1) is decoded up to its exact end: llhttp would continue into the
next request, and does not report where this one ended; so this part of the grammar is implemented here. Extensions and
trailers are ignored, within limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import httptools

from outbox_broker.http.admission_limits import BudgetLease, ByteBudget
from outbox_broker.http.responses import CLOSE, Problem, malformed
from outbox_core.protocol.problem import ProblemKind

FREE_HEAD_BYTES: Final = 4 * 1024
"""An incomplete head is leased from the budget above this size."""
LENGTH_DIGITS_MAX: Final = 18
_CONTROLS: Final = bytes({*range(32), 127} - set(b"\t\r\n"))
_SINGLE: Final = frozenset(
    {"authorization", "content-encoding", "content-length", "content-type", "expect", "host", "transfer-encoding"}
)
"""Fields that must not be repeated."""
_REQUEST_LINE: Final = re.compile(rb"[^ ]+ [^ ]+ HTTP/\d\.\d\r\n")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+;=-]*)(?::[0-9]{0,5})?")
"""RFC 9110, 7.2, without the comma, which separates lists in other fields."""
_ABSOLUTE: Final = re.compile(r"https?://([^/?#]*)([/?].*)?", re.IGNORECASE)
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


@dataclass(slots=True, kw_only=True)
class RequestHead:
    """A parsed request head. `path` is as sent, not decoded; field names are lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    content_length: int = 0
    is_chunked: bool = False
    keep_alive: bool = True
    expects_continue: bool = False

    @property
    def has_body(self) -> bool:
        """Whether bytes of a body follow."""
        return self.is_chunked or self.content_length > 0


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


def parse_head(data: bytes) -> RequestHead:
    """Parse a whole head, including its empty line. Raises Problem, which closes the connection."""
    check_bytes(data)
    if not _REQUEST_LINE.match(data):
        raise malformed("the request line is not a method, a target and a version with one blank in between")
    parts = _HeadParts()
    parser = httptools.HttpRequestParser(parts)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # all of the head was read, and no other protocol is supported
    except httptools.HttpParserError as error:
        raise malformed(f"the head is not well formed: {error}") from error
    if not parts.is_complete:
        raise malformed("the head ends before its empty line")
    return _checked(parts, version=parser.get_http_version(), method=parser.get_method().decode("ascii"))


class _HeadParts:
    """Collects the parts that httptools reports. No reference to the parser: that would be a cycle per request."""

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        """Append a piece of the target."""
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Append a field."""
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Mark the head as complete."""
        self.is_complete = True


def _checked(parts: _HeadParts, *, version: str, method: str) -> RequestHead:
    if version not in {"1.0", "1.1"}:
        raise malformed(f"the version {version} of HTTP is not spoken here")
    headers = _by_name(parts.fields)
    if version == "1.1" and "host" not in headers:
        raise malformed("there is no Host")
    if not _HOST.fullmatch(headers.get("host", "")):
        raise malformed("the Host is no host and port")
    length, is_chunked = _framing(headers, version=version)
    target = parts.target.decode("latin-1")
    path, _, query = _origin_form(target, method=method, host=headers.get("host", "")).partition("?")
    expect = headers.get("expect", "").lower()
    if expect not in {"", "100-continue"}:
        raise Problem(ProblemKind.EXPECTATION_FAILED, "the only Expect that is met is 100-continue", headers=CLOSE)
    connection = {token.strip().lower() for token in headers.get("connection", "").split(",")}
    is_last = version == "1.0" or "close" in connection or "upgrade" in headers or method == "CONNECT"
    return RequestHead(
        method=method, path=path, query=query, headers=headers, content_length=length, is_chunked=is_chunked,
        keep_alive=not is_last, expects_continue=bool(expect) and version == "1.1",
    )  # fmt: skip


def check_bytes(data: bytes | bytearray) -> None:
    """Raise Problem if head lines contain control bytes, a lone CR or LF, or folded lines.

    No client sends them, and servers differ in reading them.
    """
    lines = data.count(b"\r\n")
    if (
        len(data.translate(None, _CONTROLS)) != len(data)
        or data.count(b"\n") != lines
        or data.count(b"\r") != lines
        or b"\n " in data
        or b"\n\t" in data
    ):
        raise malformed("the head has a control character, a line end that is not CRLF, or a folded line")


def _by_name(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns fields by name; equal names are joined by commas, as RFC 9110 defines for lists."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in fields:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip(" \t")
        if name in headers:
            if name in _SINGLE:
                raise malformed(f"there are two fields named {name}")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def _framing(headers: Mapping[str, str], *, version: str) -> tuple[int, bool]:
    """Returns the length of the body, and whether it is chunked."""
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None:
        if length is not None or version != "1.1":
            raise malformed("Transfer-Encoding stands beside Content-Length, or in version 1.0")
        if coding.lower() != "chunked":
            raise Problem(
                ProblemKind.UNSUPPORTED_TRANSFER_CODING, "the only Transfer-Encoding is chunked", headers=CLOSE
            )
        return 0, True
    if length is None:
        return 0, False
    if not (length.isascii() and length.isdigit() and len(length) <= LENGTH_DIGITS_MAX):
        raise malformed("the Content-Length is no number of bytes")
    return int(length), False


def _origin_form(target: str, *, method: str, host: str) -> str:
    """Returns the path and query of a target; those of CONNECT and `*` match no route."""
    if target.startswith("/") and "#" not in target:
        return target
    if method == "CONNECT" or (method == "OPTIONS" and target == "*"):
        return "*"
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or "#" in target or absolute[1].lower() != host.lower():
        raise malformed("the target is neither a path nor a URL of this host")
    path = absolute[2] or "/"
    return path if path.startswith("/") else f"/{path}"


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
