"""A request's head that was read and allowed before on its connection: the same bytes say the same. It reads nothing.

A client's requests to one path differ in their bodies, and in the digits of the body's length; all other bytes of
their heads are the same, time after time. So they need be parsed, looked at and allowed once a connection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from broker.http.serving import Head

HEADS_KNOWN_MAX: Final = 4
"""A connection's heads that are known at a time: what a consumer asks for in turn."""
HEAD_BYTES_MAX: Final = 4 * 1024
"""A longer head is read anew each time: ten thousand connections may know some."""
LENGTH_DIGITS_MAX: Final = 17
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,17})(?=\r\n)", re.IGNORECASE)
_HEAD_END: Final = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class KnownHead:
    """All of a head but the digits of its length, and what it said."""

    before: bytes
    behind: bytes
    head: Head

    def body_of(self, data: bytes) -> bytes | None:
        """The body, where `data` is one whole request with this head and nothing more; else None."""
        start = len(self.before)
        end = data.find(b"\r\n", start, start + LENGTH_DIGITS_MAX + 2)
        digits = data[start:end]
        if end < 0 or not digits.isdigit() or not data.startswith(self.before):
            return None
        body_at = end + len(self.behind)
        if not data.startswith(self.behind, end) or int(digits) != len(data) - body_at:
            return None
        return data[body_at:]


def known_head(data: bytes, head: Head, *, size_bytes: int) -> KnownHead | None:
    """The head with which `data` begins, where that was read as `head` with a body of so many bytes, and `data` is all
    of the request; None where that is not beyond doubt.
    """
    end = data.find(_HEAD_END) + len(_HEAD_END)
    lengths = list(_LENGTH.finditer(data, 0, end))
    if not len(_HEAD_END) < end <= HEAD_BYTES_MAX or len(lengths) != 1:
        return None
    start, stop = lengths[0].span(1)
    if int(data[start:stop]) != size_bytes or len(data) - end != size_bytes:
        return None
    return KnownHead(data[:start], data[stop:end], head)
