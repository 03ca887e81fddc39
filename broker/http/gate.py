"""Back-pressure: a bound on how much is being worked on at once. Over it a request is told to come back, not queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from broker.http.problems import Problem
from messaging.problem import ProblemKind


@dataclass(slots=True, kw_only=True)
class Gate:
    """Counts requests and their bytes; used on the event loop alone, so it needs no lock."""

    name: str
    requests_max: int
    bytes_max: int | None = None
    retry_after_ms: int
    requests: int = field(default=0, init=False)
    bytes: int = field(default=0, init=False)

    @contextmanager
    def entered(self, size_bytes: int = 0) -> Iterator[None]:
        """Be inside for as long as the request is worked on. Raises Problem, throttled, where it is full.

        A request larger than the whole bound gets in when it is alone: it was let past `request_bytes_max` already.
        """
        if self.requests >= self.requests_max:
            raise self._full(f"{self.name}_max", self.requests_max)
        if self.bytes_max is not None and self.bytes and self.bytes + size_bytes > self.bytes_max:
            raise self._full(f"{self.name}_bytes_max", self.bytes_max)
        self.requests += 1
        self.bytes += size_bytes
        try:
            yield
        finally:
            self.requests -= 1
            self.bytes -= size_bytes

    def _full(self, bound: str, limit: int) -> Problem:
        return Problem(
            ProblemKind.THROTTLED,
            f"as much is being worked on as {bound} allows; nothing of this request was stored, send it again",
            bound=(bound, limit),
            retry_after_ms=self.retry_after_ms,
        )
