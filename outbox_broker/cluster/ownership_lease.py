"""The lease of a node: how long after ZooKeeper last confirmed a write of it the node may act as an owner.

ZooKeeper ends a session one session time-out after it last got a request of it, at the earliest. A write that it
confirmed was received after the node sent it. So a node that stops two thirds of the time-out after it sent the write
stops before anybody else can become an owner, whatever its own threads, its network or its wall clock do. A read or a
ping proves less: a server that is cut off from the quorum answers both. The last third covers what a follower reports
late to the leader (half a tick), and the send that begins just before the lease ends. ZooKeeper's own word that a
session ended comes too late for a node that was paused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from outbox_broker.cluster.cluster_errors import NotOwner

_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_ms() -> int:
    """Returns milliseconds that no clock step changes, and that include the time for which a machine was suspended."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


class OwnershipLease:
    """The lease of one session. Thread-safe. It ends by itself, and for good by end()."""

    def __init__(self, *, session_timeout_ms: int, clock_ms: Callable[[], int] = boot_ms) -> None:
        """`session_timeout_ms`: what ZooKeeper granted. `clock_ms`: see boot_ms."""
        self.length_ms = _length_ms(session_timeout_ms)
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._until_ms: int | None = None
        self._ended: str | None = None

    def now_ms(self) -> int:
        """Returns the time to pass to extend(): read it before the write is sent."""
        return self._clock_ms()

    def shorten(self, session_timeout_ms: int) -> None:
        """Take account of a session time-out that another server granted when the session moved to it."""
        with self._lock:
            self.length_ms = min(self.length_ms, _length_ms(session_timeout_ms))

    def extend(self, sent_ms: int) -> None:
        """Extend the lease by a write that was sent at this time and confirmed since."""
        with self._lock:
            self._until_ms = max(self._until_ms or 0, sent_ms + self.length_ms)

    def end(self, reason: str) -> None:
        """End the lease for good; the first reason is kept."""
        with self._lock:
            self._ended = self._ended or reason

    def left_ms(self) -> int:
        """Returns how much of the lease is left, in milliseconds; 0 if it has ended."""
        with self._lock:
            if self._ended is not None or self._until_ms is None:
                return 0
            return max(0, self._until_ms - self._clock_ms())

    def overdue_ms(self) -> int:
        """Returns for how long the lease has been over for lack of contact, in milliseconds."""
        with self._lock:
            return 0 if self._until_ms is None else max(0, self._clock_ms() - self._until_ms)

    def why_ended(self) -> str | None:
        """Returns why the lease has ended; None while it lasts."""
        if self.left_ms():
            return None
        with self._lock:
            return self._ended or "ZooKeeper has confirmed no write of this node for two thirds of its session time-out"


def _length_ms(session_timeout_ms: int) -> int:
    return session_timeout_ms * 2 // 3


class ShardPermit:
    """What a shard's owner checks before it acts: its node's lease, and that the shard was not taken from it."""

    def __init__(self, shard: str, lease: OwnershipLease, *, epoch: int) -> None:
        """`epoch`: the ownership's; a later ownership of the shard, by any node, has a greater one."""
        self.shard = shard
        self.epoch = epoch
        self._lease = lease
        self._revoked: str | None = None

    def revoke(self, reason: str) -> None:
        """End the permit for good."""
        self._revoked = self._revoked or reason

    def why_ended(self) -> str | None:
        """Returns why this node may not act for the shard; None while it may."""
        return self._revoked or self._lease.why_ended()

    def require(self) -> None:
        """Raise NotOwner if this node may not act for the shard."""
        if (reason := self.why_ended()) is not None:
            raise NotOwner(f"shard {self.shard} is not this node's now: {reason}")
