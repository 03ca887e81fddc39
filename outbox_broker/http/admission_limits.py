"""The limits within which a request is admitted: how many of its class of work at once, and how many bytes of all."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum

from outbox_broker.http.problems import Problem
from outbox_core.protocol.problem import ProblemKind


class WorkClass(StrEnum):
    """How a route is executed, which also determines its limit."""

    PUBLISH = "publish"
    SETTLE = "settle"
    """Acks and similar short operations."""
    PAGE = "page"
    """A page of stored data."""
    PULL = "pull"
    READ = "read"
    OPERATE = "operate"

    @property
    def waits(self) -> bool:
        """Whether it waits for messages."""
        return self in {WorkClass.PULL, WorkClass.READ}


@dataclass(slots=True, kw_only=True)
class ConcurrencyLimit:
    """Counts requests; above the limit one is rejected for a retry, not queued. Used on the event loop only, so it
    needs no lock.
    """

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


class ByteBudget:
    """Counts leased bytes, of all requests and responses in progress. Thread-safe: responses grow in worker threads."""

    def __init__(self, bytes_max: int, *, retry_after_ms: int) -> None:
        self._bytes_max = bytes_max
        self._retry_after_ms = retry_after_ms
        self._lock = threading.Lock()
        self._leased = 0

    @property
    def leased_bytes(self) -> int:
        """The number of bytes leased now."""
        return self._leased

    def lease(self, size_bytes: int = 0) -> BudgetLease:
        """Lease bytes. Raises Problem, overloaded, if the budget is exhausted."""
        lease = BudgetLease(self)
        lease.resize(size_bytes)
        return lease

    def check(self, size_bytes: int) -> None:
        """Raise Problem, overloaded, if this many bytes are not available now."""
        with self._lock:
            self._check(self._leased, size_bytes)

    def move(self, held: int, wanted: int, *, always: bool = False) -> None:
        """Change the size of a lease; less is always granted, and more too if `always` is set.

        A lease larger than the whole budget is granted if nothing else is leased: its own limit has admitted it.
        """
        with self._lock:
            others = self._leased - held
            if wanted > held and not always:
                self._check(others, wanted)
            self._leased = others + wanted

    def _check(self, others: int, wanted: int) -> None:
        if others and others + wanted > self._bytes_max:
            raise Problem(
                ProblemKind.OVERLOADED,
                "the requests and answers in work have as many bytes as work_bytes_max allows; send it again",
                bound=("work_bytes_max", self._bytes_max),
                retry_after_ms=self._retry_after_ms,
            )


class BudgetLease:
    """Bytes of the budget that belong to one request."""

    __slots__ = ("_budget", "size_bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.size_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """Resize the lease. Raises Problem, overloaded, with nothing changed, if the budget is exhausted."""
        if size_bytes != self.size_bytes:
            self._budget.move(self.size_bytes, size_bytes)
            self.size_bytes = size_bytes

    def settle(self, size_bytes: int) -> None:
        """Change the size of the lease regardless of the budget: the result of completed work must be sent."""
        if size_bytes != self.size_bytes:
            self._budget.move(self.size_bytes, size_bytes, always=True)
            self.size_bytes = size_bytes

    def release(self) -> None:
        """Release all bytes; idempotent."""
        self.settle(0)
