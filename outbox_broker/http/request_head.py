"""Parses a request head with llhttp (httptools), and rejects everything that two servers could read differently.

RFC 9112 leaves servers some freedom, and llhttp uses part of it. Each freedom that request smuggling was built on is
rejected here: an ambiguous head gets an error and the end of its connection, never an interpretation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httptools

from outbox_broker.http.problems import CLOSE, Problem, malformed
from outbox_core.protocol.problem import ProblemKind

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
