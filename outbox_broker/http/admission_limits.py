"""The limits within which a server admits: how many connections in total and of an address, how many requests of a
class of work at once, and how many bytes of all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from outbox_broker.http.responses import Problem
from outbox_core.protocol.problem import ProblemKind


@dataclass(eq=False, slots=True)
class ConnectionSlot:
    """The slot of one connection."""

    address: str
    is_reserved: bool
    evict: Callable[[], None]
    """Ends the connection at once."""
    is_taken: bool = True


@dataclass(slots=True, kw_only=True)
class ConnectionTable:
    """The connections of one server: limits in total and per address, a reserve, and eviction. Used on its event loop
    only.

    A connection that was not authorised yet is evicted for newer ones, the oldest first: so any number of silent
    strangers keeps nobody out. If all slots are in use, a new connection gets a slot of the reserve, which is for
    probes, metrics and operators.
    """

    connections_max: int
    per_address_max: int
    reserved_max: int
    refused: int = field(default=0, init=False)
    evicted: int = field(default=0, init=False)
    _taken: int = field(default=0, init=False)
    _reserved: int = field(default=0, init=False)
    _by_address: Counter[str] = field(default_factory=Counter, init=False)
    _unauthorized: dict[str, dict[ConnectionSlot, None]] = field(default_factory=dict, init=False)
    """Slots by address, in the order in which they were taken; those of the reserve have no address."""
    _all_unauthorized: dict[ConnectionSlot, None] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return self._taken + self._reserved

    def enter(self, address: str, evict: Callable[[], None]) -> ConnectionSlot | None:
        """Take a slot for a new connection; None if there is none."""
        if self._has_room(address):
            return self._slot(address, evict, is_reserved=False)
        if self._reserved < self.reserved_max or self._evict_oldest(self._unauthorized.get("", {})):
            return self._slot(address, evict, is_reserved=True)
        self.refused += 1
        return None

    def mark_authorized(self, slot: ConnectionSlot) -> None:
        """Protect the slot of an authorised client from eviction."""
        group = self._unauthorized.get(_group(slot))
        if group is not None and slot in group:
            del group[slot]
            self._all_unauthorized.pop(slot, None)
            if not group:
                del self._unauthorized[_group(slot)]

    def leave(self, slot: ConnectionSlot) -> None:
        """Release the slot of a closed connection; idempotent."""
        if not slot.is_taken:
            return
        slot.is_taken = False
        self.mark_authorized(slot)
        if slot.is_reserved:
            self._reserved -= 1
            return
        self._taken -= 1
        self._by_address[slot.address] -= 1
        if not self._by_address[slot.address]:
            del self._by_address[slot.address]

    def _has_room(self, address: str) -> bool:
        if self._by_address[address] >= self.per_address_max and not self._evict_oldest(
            self._unauthorized.get(address, {})
        ):
            return False
        return self._taken < self.connections_max or self._evict_oldest(self._all_unauthorized)

    def _slot(self, address: str, evict: Callable[[], None], *, is_reserved: bool) -> ConnectionSlot:
        slot = ConnectionSlot(address, is_reserved, evict)
        self._unauthorized.setdefault(_group(slot), {})[slot] = None
        if is_reserved:
            self._reserved += 1
        else:
            self._all_unauthorized[slot] = None
            self._taken += 1
            self._by_address[address] += 1
        return slot

    def _evict_oldest(self, slots: dict[ConnectionSlot, None]) -> bool:
        oldest = next(iter(slots), None)
        if oldest is None:
            return False
        self.evicted += 1
        self.leave(oldest)
        oldest.evict()
        return True


def _group(slot: ConnectionSlot) -> str:
    return "" if slot.is_reserved else slot.address


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
