"""Which connections a server has, and which of them make room: by their number, by address, with a reserve.

A connection that has not shown yet that it may use the server makes room for newer ones, the oldest first: so strangers
that are silent keep nobody out, however many they are. Where all are in use, a newcomer gets a seat of the reserve,
which is for probes, metrics and operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Seat:
    """The place of one connection."""

    address: str
    is_reserved: bool
    evict: Callable[[], None]
    """Ends the connection at once."""
    is_taken: bool = True


@dataclass(slots=True, kw_only=True)
class ConnectionTable:
    """The seats of one server; on its event loop only."""

    connections_max: int
    per_address_max: int
    reserved_max: int
    refused: int = field(default=0, init=False)
    evicted: int = field(default=0, init=False)
    _taken: int = field(default=0, init=False)
    _reserved: int = field(default=0, init=False)
    _by_address: Counter[str] = field(default_factory=Counter, init=False)
    _strangers: dict[str, dict[Seat, None]] = field(default_factory=dict, init=False)
    """Seats by address, in the order in which they were taken; those of the reserve are under no address."""
    _all_strangers: dict[Seat, None] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return self._taken + self._reserved

    def enter(self, address: str, evict: Callable[[], None]) -> Seat | None:
        """A seat for a new connection; None where there is none."""
        if self._has_room(address):
            return self._seat(address, evict, is_reserved=False)
        if self._reserved < self.reserved_max or self._evict_oldest(self._strangers.get("", {})):
            return self._seat(address, evict, is_reserved=True)
        self.refused += 1
        return None

    def know(self, seat: Seat) -> None:
        """Its client may use the server: the seat is its own from now on."""
        group = self._strangers.get(_group(seat))
        if group is not None and seat in group:
            del group[seat]
            self._all_strangers.pop(seat, None)
            if not group:
                del self._strangers[_group(seat)]

    def leave(self, seat: Seat) -> None:
        """The connection has ended; idempotent."""
        if not seat.is_taken:
            return
        seat.is_taken = False
        self.know(seat)
        if seat.is_reserved:
            self._reserved -= 1
            return
        self._taken -= 1
        self._by_address[seat.address] -= 1
        if not self._by_address[seat.address]:
            del self._by_address[seat.address]

    def _has_room(self, address: str) -> bool:
        if self._by_address[address] >= self.per_address_max and not self._evict_oldest(
            self._strangers.get(address, {})
        ):
            return False
        return self._taken < self.connections_max or self._evict_oldest(self._all_strangers)

    def _seat(self, address: str, evict: Callable[[], None], *, is_reserved: bool) -> Seat:
        seat = Seat(address, is_reserved, evict)
        self._strangers.setdefault(_group(seat), {})[seat] = None
        if is_reserved:
            self._reserved += 1
        else:
            self._all_strangers[seat] = None
            self._taken += 1
            self._by_address[address] += 1
        return seat

    def _evict_oldest(self, strangers: dict[Seat, None]) -> bool:
        oldest = next(iter(strangers), None)
        if oldest is None:
            return False
        self.evicted += 1
        self.leave(oldest)
        oldest.evict()
        return True


def _group(seat: Seat) -> str:
    return "" if seat.is_reserved else seat.address
