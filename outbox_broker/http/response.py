"""An HTTP response as a value, and its serialisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Final

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}
_COMMON: Final = b"cache-control: no-store\r\nx-content-type-options: nosniff\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(slots=True)
class Response:
    """The response to a request: one body of known length."""

    body: bytes | bytearray
    media_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def closes(self) -> bool:
        """Whether the connection ends after it."""
        return self.headers.get("connection") == "close"


def head_of(response: Response, *, date: bytes, keep_alive: bool) -> bytes:
    """Returns the status line and header fields, with the empty line after them."""
    head = _head_start(response.status, response.media_type)
    fields = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items()).encode("latin-1")
    end = b"" if keep_alive or response.closes else b"connection: close\r\n"
    return b"%bdate: %b\r\n%b%bcontent-length: %d\r\n\r\n" % (head, date, fields, end, len(response.body))


@lru_cache(maxsize=256)
def _head_start(status: int, media_type: str) -> bytes:
    return b"%b%bcontent-type: %b\r\n" % (_STATUS_LINES[status], _COMMON, media_type.encode("ascii"))
