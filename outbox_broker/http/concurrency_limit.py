"""Back-pressure: a limit on concurrent requests. Above it a request is rejected for a retry, not queued."""

from __future__ import annotations

from dataclasses import dataclass, field

from outbox_broker.http.problems import Problem
from outbox_core.protocol.problem import ProblemKind


@dataclass(slots=True, kw_only=True)
class ConcurrencyLimit:
    """Counts requests; used on the event loop only, so it needs no lock."""

    name: str
    requests_max: int
    retry_after_ms: int
    requests: int = field(default=0, init=False)

    def enter(self) -> None:
        """Count a request, until leave(). Raises Problem, throttled, at the limit."""
        self.check()
        self.requests += 1

    def check(self) -> None:
        """Raise Problem, throttled, at the limit."""
        if self.requests >= self.requests_max:
            raise Problem(
                ProblemKind.THROTTLED,
                f"as much is being worked on as {self.name}_max allows; nothing of this request was stored, "
                "send it again",
                bound=(f"{self.name}_max", self.requests_max),
                retry_after_ms=self.retry_after_ms,
            )

    def leave(self) -> None:
        """Uncount a completed request."""
        self.requests -= 1
