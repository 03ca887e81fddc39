"""The port to the registry of compensators: the records of one instance and of the leases that instances hold."""

from __future__ import annotations

from typing import Protocol

from compensator.assignment.lease_options import LeaseOptions
from outbox_core.assignment.registry import SharedRegistry


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
