"""The connections of a server: limits in total and per address, a reserve, and eviction.

A connection that was not authorised yet is evicted for newer ones, the oldest first: so any number of silent strangers
keeps nobody out. If all slots are in use, a new connection gets a slot of the reserve, which is for probes, metrics and
operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


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
    """The slots of one server; used on its event loop only."""

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
