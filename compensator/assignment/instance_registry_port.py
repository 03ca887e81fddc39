"""The port to the registry of compensators: the records of one instance and of the leases that instances hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outbox_core.assignment.registry import SharedRegistry
from outbox_core.common.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """The interval of beat(), and how long after its last beat an instance counts as dead, in milliseconds of the
    database's clock, or of ZooKeeper's.

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


class InstanceLifecycle(Protocol):
    """One process as an instance: its id, its options, and its end."""

    @property
    def instance(self) -> str:
        """The id of this process's instance; empty before it is known."""

    @property
    def options(self) -> LeaseOptions:
        """The interval of beats, and how long leases last."""

    @property
    def joined(self) -> bool:
        """Whether renew() ever succeeded: what fails before then may be a wrong configuration."""

    def purge(self) -> None:
        """Delete records of instances that have been dead for long."""

    def close(self) -> None:
        """Close the connections. Idempotent."""

    def reset_after_fork(self) -> None:
        """Become a new instance in a forked child; connections and leases remain the parent's."""


class InstanceRegistry(SharedRegistry, InstanceLifecycle, Protocol):
    """A registry of leases that one instance opens, and closes at its end. For one thread at a time."""
