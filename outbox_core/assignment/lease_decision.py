"""Decides which leases one instance takes, keeps and offers at one beat. Pure; leased_assignment executes it.

A lease ends when its holder dies, or at its own end: a holder that should no longer have a source ends the lease and
continues to serve until another instance has taken it. So a handover leaves no gap, and a source that no other instance
knows is never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from outbox_core.assignment.even_assignment import assign
from outbox_core.assignment.resource import Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One row of the lease table; `ended` by the database's clock. The instance table says if the holder is alive."""

    holder: str | None
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one instance read: the live instances with their zones, itself among them, and all leases by source."""

    me: str
    instances: Mapping[str, str | None]
    leases: Mapping[str, Lease]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The steps to execute, each a sorted list of sources; `waiting`: free sources for another live instance."""

    add: tuple[str, ...]
    take: tuple[str, ...]
    keep: tuple[str, ...]
    offer: tuple[str, ...]
    release: tuple[str, ...]
    waiting: frozenset[str]


def decide(view: View, sources: Sequence[Resource], *, overdue: AbstractSet[str]) -> Decision:
    """Decide the steps of this instance.

    `overdue` are sources that another instance should have taken some beats ago and did not, for instance because it
    does not know them: the instance that notices takes them.
    """
    known = {source.name for source in sources}
    held = {name for name, lease in view.leases.items() if lease.holder == view.me}
    free = {name for name in known if _is_free(name, view)}
    wanted = _wanted(view, sources)
    take = free & (wanted | overdue)
    return Decision(
        add=_sorted(known - view.leases.keys()),
        take=_sorted(take),
        keep=_sorted({name for name in held & wanted if view.leases[name].ended}),
        offer=_sorted({name for name in held & known - wanted if not view.leases[name].ended}),
        release=_sorted(held - known),
        waiting=frozenset(_unserved(free - take, view)),
    )


def _wanted(view: View, sources: Sequence[Resource]) -> set[str]:
    holders = {name: lease.holder for name, lease in view.leases.items() if lease.holder is not None}
    shared = assign(sources, instances=view.instances, holders=holders)
    return {name for name, instance in shared.items() if instance == view.me}


def _is_free(name: str, view: View) -> bool:
    """Whether this instance may take a source: its lease has ended, or it never had a holder."""
    lease = view.leases.get(name)
    if lease is None or lease.holder is None:
        return True
    return lease.holder != view.me and (lease.ended or lease.holder not in view.instances)


def _unserved(names: AbstractSet[str], view: View) -> set[str]:
    """Those that no live instance serves; an instance that offers a source continues to serve it."""
    return {name for name in names if name not in view.leases or view.leases[name].holder not in view.instances}


def _sorted(names: AbstractSet[str]) -> tuple[str, ...]:
    # Sorted: statements of all instances must lock rows in one order.
    return tuple(sorted(names))
