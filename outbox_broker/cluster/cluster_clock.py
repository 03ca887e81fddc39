"""The clock of a shard's owner: wall time that follows the cluster's, and no step of this machine's clock.

Each confirmed write to ZooKeeper is dated by its leader. The wall clock as it was read around the write must agree with
that date; then it is the anchor from which time is counted on by a clock that is never stepped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outbox_broker.cluster.ownership_lease import boot_ms
from outbox_core.common.clock import Clock

OFFSET_MS_MAX: Final = 1_000
"""A node whose wall clock differs by more from the cluster's takes no shards."""
ROUNDING_MS: Final = 1
"""By how much the difference of two readings in whole milliseconds may exceed the time between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """A confirmed write: this machine's clocks when it was sent and answered, and the date that the leader gave it.

    `sent_wall_ms` is read before `sent_boot_ms`: time that passes between the two makes the cluster's clock late, never
    early.
    """

    sent_boot_ms: int
    sent_wall_ms: int
    answered_wall_ms: int
    dated_ms: int

    @property
    def offset_ms(self) -> int:
        """How far this machine's wall clock is ahead of the cluster's at least; negative if it is behind."""
        if self.dated_ms < self.sent_wall_ms:
            return self.sent_wall_ms - self.dated_ms
        return min(0, self.answered_wall_ms - self.dated_ms)


class ClusterClock:
    """A Clock. Before the first contact it is the machine's own."""

    def __init__(self, clock: Clock, *, clock_ms: Callable[[], int] = boot_ms) -> None:
        """`clock`: the machine's. `clock_ms`: see boot_ms."""
        self._clock = clock
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._anchor: tuple[int, int] | None = None

    def correct(self, contact: Contact) -> str | None:
        """Anchor the clock at a contact; returns the reason if the wall clock is too far from the cluster's for that.

        Time goes on from the last anchor then.
        """
        offset_ms = contact.offset_ms
        if abs(offset_ms) > OFFSET_MS_MAX:
            word = "ahead of" if offset_ms > 0 else "behind"
            return (
                f"the clock of this machine is {abs(offset_ms) / 1000:.1f} s {word} the cluster's: run a time service "
                "(chrony, systemd-timesyncd) on every machine"
            )
        with self._lock:
            self._anchor = (contact.sent_wall_ms, contact.sent_boot_ms)
        return None

    def now_ms(self) -> int:
        """Returns the cluster's time in UTC milliseconds: never later than the wall clock of the last contact says."""
        with self._lock:
            anchor = self._anchor
        return self._clock.now_ms() if anchor is None else anchor[0] + self._clock_ms() - anchor[1] - ROUNDING_MS

    def monotonic_ms(self) -> int:
        """See Clock.monotonic_ms."""
        return self._clock.monotonic_ms()

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        """See Clock.wait."""
        return self._clock.wait(condition, timeout_ms)
