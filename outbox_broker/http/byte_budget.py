"""One bound on the bytes of everything in work: what requests carry and what answers wait to be read."""

from __future__ import annotations

import threading

from outbox_broker.http.problems import Problem
from outbox_core.protocol.problem import ProblemKind


class ByteBudget:
    """Counts bytes that are leased. Safe for threads: answers grow in worker threads."""

    def __init__(self, bytes_max: int, *, retry_after_ms: int) -> None:
        self._bytes_max = bytes_max
        self._retry_after_ms = retry_after_ms
        self._lock = threading.Lock()
        self._leased = 0

    @property
    def leased_bytes(self) -> int:
        """How many bytes are leased now."""
        return self._leased

    def lease(self, size_bytes: int = 0) -> BudgetLease:
        """Lease bytes. Raises Problem, overloaded, where there is no room for them."""
        lease = BudgetLease(self)
        lease.resize(size_bytes)
        return lease

    def check(self, size_bytes: int) -> None:
        """Raise Problem, overloaded, where there is no room for so many bytes now."""
        with self._lock:
            self._check(self._leased, size_bytes)

    def move(self, held: int, wanted: int, *, always: bool = False) -> None:
        """Replace a lease's bytes by others; less is always granted, and more where it is to be `always`.

        What is larger than the whole budget is granted when nothing else is leased: its own bound let it pass.
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
        """Hold so many bytes from now on. Raises Problem, overloaded, and changes nothing, where there is no room."""
        if size_bytes != self.size_bytes:
            self._budget.move(self.size_bytes, size_bytes)
            self.size_bytes = size_bytes

    def settle(self, size_bytes: int) -> None:
        """Hold so many bytes, whether there is room or not: what was done must be told."""
        if size_bytes != self.size_bytes:
            self._budget.move(self.size_bytes, size_bytes, always=True)
            self.size_bytes = size_bytes

    def release(self) -> None:
        """Give all bytes back; idempotent."""
        self.settle(0)
