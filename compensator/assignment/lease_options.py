"""The times of leases on sources, in milliseconds of the database's clock, or of ZooKeeper's."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_core.common.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """The interval of beat(), and how long after its last beat an instance counts as dead.

    `alone_after_beats`: after so many failed beats an instance serves every source. A source that two instances serve
    costs statements; one that no instance serves sends nothing.
    """

    beat_ms: int = 2_000
    lease_ms: int = 6_000
    forget_after_ms: int = 600_000
    alone_after_beats: int = 15

    def __post_init__(self) -> None:
        if not 0 < 2 * self.beat_ms <= self.lease_ms:
            raise ConfigurationError("lease_ms must be at least two beats, so that one late beat costs nothing")
        if self.alone_after_beats < 1:
            raise ConfigurationError("alone_after_beats must be at least 1")
        if self.forget_after_ms < self.lease_ms:
            raise ConfigurationError("forget_after_ms must not be below lease_ms")
