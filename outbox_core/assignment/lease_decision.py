"""Decides which leases one member takes, keeps and offers at one beat. Pure; registry.execute() acts on it.

A lease ends when its holder dies, or at its own end: a holder that should no longer have a resource ends the lease and
continues to serve until another member has taken it. So a handover leaves no gap, and a resource that no other member
knows is never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from outbox_core.assignment.even_assignment import Member, Resource, assign


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who holds a resource, and whether the lease has ended by itself. The members say if the holder is alive."""

    holder: str | None
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one member read: the live members, itself among them, and all leases by resource."""

    me: str
    members: Mapping[str, Member]
    leases: Mapping[str, Lease]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The steps to execute, each a sorted list of resources; `waiting`: free resources for another live member."""

    add: tuple[str, ...]
    take: tuple[str, ...]
    keep: tuple[str, ...]
    offer: tuple[str, ...]
    release: tuple[str, ...]
    waiting: frozenset[str]


def decide(view: View, resources: Sequence[Resource], *, overdue: AbstractSet[str]) -> Decision:
    """Decide the steps of this member.

    `overdue` are resources that another member should have taken some beats ago and did not, for instance because it
    does not know them: the member that notices takes them.
    """
    names = {resource.name for resource in resources}
    held = {name for name, lease in view.leases.items() if lease.holder == view.me}
    free = {name for name in names if _is_free(name, view)}
    assigned = _wanted(view, resources)
    take = free & (assigned | overdue)
    return Decision(
        add=_sorted(names - view.leases.keys()),
        take=_sorted(take),
        keep=_sorted({name for name in held & assigned if view.leases[name].ended}),
        offer=_sorted({name for name in held & names - assigned if not view.leases[name].ended}),
        release=_sorted(held - names),
        waiting=frozenset(_unserved(free - take, view)),
    )


def _wanted(view: View, resources: Sequence[Resource]) -> set[str]:
    holders = {name: lease.holder for name, lease in view.leases.items() if lease.holder is not None}
    shared = assign(resources, members=view.members, holders=holders)
    return {name for name, member in shared.items() if member == view.me}


def _is_free(name: str, view: View) -> bool:
    """Whether this member may take a resource: its lease has ended, or it never had a holder."""
    lease = view.leases.get(name)
    if lease is None or lease.holder is None:
        return True
    return lease.holder != view.me and (lease.ended or lease.holder not in view.members)


def _unserved(names: AbstractSet[str], view: View) -> set[str]:
    """Those that no live member serves; a member that offers a resource continues to serve it."""
    return {name for name in names if name not in view.leases or view.leases[name].holder not in view.members}


def _sorted(names: AbstractSet[str]) -> tuple[str, ...]:
    # Sorted: the writes of all members must lock records in one order.
    return tuple(sorted(names))
