"""Splits the bytes received on a connection into requests: a head, then its body."""

from __future__ import annotations

from typing import Final

from outbox_broker.http.application import AdmittedRequest
from outbox_broker.http.byte_budget import BudgetLease, ByteBudget
from outbox_broker.http.chunked_body import ChunkedBody
from outbox_broker.http.problems import CLOSE, Problem
from outbox_broker.http.request_head import RequestHead, check_bytes, parse_head
from outbox_core.protocol.problem import ProblemKind

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

    def read_body(self, admitted: AdmittedRequest) -> bytearray | None:
        """Read what has arrived of a body; returns all of it once it is complete, else None. Raises Problem."""
        if self._chunked is not None:
            is_whole = self._chunked.read(self._received)
            self._body = self._chunked.data
        else:
            is_whole = self._read_length(admitted.head)
        admitted.count_body(len(self._body))
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
