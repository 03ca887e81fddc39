"""The ports of a registry: where the members of a group and the leases of their resources are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from outbox_core.assignment.lease_decision import Decision, View


class Registry(Protocol):
    """One member's access to the records of its group. Every write compares before it sets.

    For one thread at a time. Errors are OutboxErrors: after one that a retry can help, a write may have happened; the
    next renew() shows what is recorded.
    """

    def renew(self) -> View:
        """Record that this member is alive, registering it at first; returns the live members and all leases."""

    def take(self, names: Sequence[str]) -> AbstractSet[str]:
        """Become the holder of resources that are free by now; returns those that this member holds then.

        Two members never hold one resource: of two that take it at once, one gets it.
        """

    def release(self, names: Sequence[str]) -> None:
        """Stop holding resources: they have no holder from now on. Those of other members stay theirs. Idempotent."""

    def leave(self, names: Sequence[str]) -> None:
        """Release resources and end the registration, at stop. Idempotent."""


class SharedRegistry(Registry, Protocol):
    """A registry in which a holder may offer a resource, and serves it until another member has taken it."""

    def add(self, names: Sequence[str]) -> None:
        """Record new resources, without holders. Idempotent."""

    def offer(self, names: Sequence[str]) -> None:
        """Let others take resources that this member holds. Idempotent."""

    def keep(self, names: Sequence[str]) -> None:
        """Withdraw offers that no member took. Idempotent."""


def execute(decision: Decision, registry: SharedRegistry) -> AbstractSet[str]:
    """Execute a decision's steps, each as one write of its own; returns the resources that were taken."""
    for change, names in (
        (registry.release, decision.release),
        (registry.offer, decision.offer),
        (registry.keep, decision.keep),
        (registry.add, decision.add),
    ):
        if names:
            change(names)
    return registry.take(decision.take) if decision.take else frozenset()
