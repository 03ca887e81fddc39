"""Members that decide for themselves, each by the leases that it reads: no resource is left without a holder."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.assignment.even_assignment import Member, Resource
from outbox_core.assignment.lease_decision import Lease, View, decide
from outbox_core.assignment.registry import execute

OVERDUE_BEATS = 3


class LeaseTable:
    """The leases of all members, in memory."""

    def __init__(self, members: int) -> None:
        self.members = {f"m{number}": Member() for number in range(members)}
        self.leases: dict[str, Lease] = {}


class TableRegistry:
    """A SharedRegistry of one member on a table."""

    def __init__(self, table: LeaseTable, me: str) -> None:
        self._table = table
        self._me = me

    def renew(self) -> View:
        """The whole table."""
        return View(me=self._me, members=dict(self._table.members), leases=dict(self._table.leases))

    def add(self, names: Sequence[str]) -> None:
        """New ones have no holder."""
        self._table.leases |= {name: Lease(holder=None, ended=True) for name in names}

    def take(self, names: Sequence[str]) -> set[str]:
        """All, since members take turns."""
        self._table.leases |= {name: Lease(holder=self._me, ended=False) for name in names}
        return set(names)

    def keep(self, names: Sequence[str]) -> None:
        """The lease has no end."""
        self.take(names)

    def offer(self, names: Sequence[str]) -> None:
        """The lease has ended."""
        self._table.leases |= {name: Lease(holder=self._me, ended=True) for name in names}

    def release(self, names: Sequence[str]) -> None:
        """No holder."""
        self.add(names)

    def leave(self, names: Sequence[str]) -> None:
        """No member."""
        self.release(names)
        del self._table.members[self._me]


class BeatingMember:
    """A member that knows some resources, and counts how long each has waited for another member."""

    def __init__(self, table: LeaseTable, me: str, known: set[str]) -> None:
        self._registry = TableRegistry(table, me)
        self._known = [Resource(name) for name in sorted(known)]
        self._waited: Counter[str] = Counter()

    def beat(self) -> None:
        """Read, decide, act."""
        overdue = {name for name, beats in self._waited.items() if beats >= OVERDUE_BEATS}
        decision = decide(self._registry.renew(), self._known, overdue=overdue)
        self._waited = Counter({name: self._waited[name] + 1 for name in decision.waiting})
        execute(decision, self._registry)


@given(
    st.lists(st.sets(st.sampled_from([f"s{n}" for n in range(10)])), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_members_that_know_different_resources_leave_none_without_one_that_serves_it(
    knows: list[set[str]], choices: random.Random
) -> None:
    table = LeaseTable(len(knows))
    members = [BeatingMember(table, f"m{number}", known) for number, known in enumerate(knows)]

    for _ in range(30):
        choices.choice(members).beat()
    for member in members:  # a member that beats five times more has seen that no other took what it knows
        for _ in range(5):
            member.beat()

    for name in set().union(*knows):
        holder = table.leases[name].holder
        assert holder is not None
        assert name in knows[int(holder[1:])]


@given(st.sets(st.sampled_from([f"s{n}" for n in range(10)])), st.integers(1, 4))
def test_members_that_know_the_same_resources_come_to_share_them_evenly(known: set[str], count: int) -> None:
    table = LeaseTable(count)
    members = [BeatingMember(table, f"m{number}", known) for number in range(count)]

    for _ in range(3):
        for member in members:
            member.beat()

    loads = Counter(lease.holder for lease in table.leases.values())
    assert sum(loads.values()) == len(known)
    assert max(loads[f"m{n}"] for n in range(count)) - min(loads[f"m{n}"] for n in range(count)) <= 1
