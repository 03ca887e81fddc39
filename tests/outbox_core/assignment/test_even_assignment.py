"""The assignment of resources: all are assigned, zones hold, loads are level, and few resources move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.assignment.even_assignment import Member, Resource, assign
from outbox_core.common.errors import ConfigurationError

ZONES = [None, "a", "b", "c"]
NAMES = [f"r{number:02d}" for number in range(40)]

zones = st.sampled_from(ZONES)
members_of_zones = st.dictionaries(st.sampled_from([f"m{n}" for n in range(8)]), st.builds(Member, zones), max_size=8)
limited_members = st.dictionaries(
    st.sampled_from([f"m{n}" for n in range(8)]),
    st.builds(Member, zones, st.none() | st.integers(0, 8)),
    min_size=1,
)
zones_and_priorities = st.lists(st.tuples(zones, st.integers(0, 2)), max_size=40)
resources_of_zones = zones_and_priorities.map(
    lambda found: [Resource(NAMES[number], zone) for number, (zone, _) in enumerate(found)]
)
resources_of_priorities = zones_and_priorities.map(
    lambda found: [Resource(NAMES[number], priority=priority) for number, (_, priority) in enumerate(found)]
)
holders_of_resources = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([f"m{n}" for n in range(10)]))


def allowed(resource: Resource, members: Mapping[str, Member]) -> set[str]:
    """The members that may have a resource by the rule of zones."""
    same = {one for one, member in members.items() if member.zone == resource.zone}
    return same if resource.zone is not None and same else set(members)


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """Resources that had a holder and have another one now."""
    return {name for name, one in before.items() if after.get(name) != one}


def unlimited(count: int) -> dict[str, Member]:
    """So many members without zones."""
    return {f"m{number}": Member() for number in range(count)}


def spread(counts: Iterable[int]) -> int:
    """The difference between the most and the least."""
    found = list(counts)
    return max(found) - min(found)


@given(resources_of_zones, members_of_zones, holders_of_resources)
def test_every_resource_goes_to_a_member_that_its_zone_allows(
    resources: Sequence[Resource], members: Mapping[str, Member], holders: Mapping[str, str]
) -> None:
    assigned = assign(resources, members=members, holders=holders)

    assert assigned.keys() == ({resource.name for resource in resources} if members else set())
    assert all(assigned[one.name] in allowed(one, members) for one in resources if members)


@given(resources_of_zones, members_of_zones, holders_of_resources)
def test_loads_of_those_that_may_have_a_resource_differ_by_at_most_one(
    resources: Sequence[Resource], members: Mapping[str, Member], holders: Mapping[str, str]
) -> None:
    assigned = assign(resources, members=members, holders=holders)

    bound = Counter(assigned[r.name] for r in resources if members and len(allowed(r, members)) < len(members))
    loads = Counter(assigned.values())
    for resource in resources if members else []:
        eligible = allowed(resource, members)
        if eligible == set(members):
            # What may go anywhere goes where least is: no member that has any of it has more than the least plus one.
            assert loads[assigned[resource.name]] <= min(loads[one] for one in members) + 1
        else:
            assert spread(bound[one] for one in eligible) <= 1


@given(resources_of_priorities, st.integers(1, 8), holders_of_resources)
def test_loads_are_even_within_one_for_each_priority_and_those_above_it(
    resources: Sequence[Resource], members: int, holders: Mapping[str, str]
) -> None:
    assigned = assign(resources, members=unlimited(members), holders=holders)

    for priority in range(3):
        loads = Counter(assigned[one.name] for one in resources if one.priority >= priority)
        assert spread(loads[f"m{number}"] for number in range(members)) <= 1


@given(resources_of_priorities, limited_members, holders_of_resources)
def test_no_member_exceeds_its_capacity_and_only_the_lowest_priorities_remain_without_one(
    resources: Sequence[Resource], members: Mapping[str, Member], holders: Mapping[str, str]
) -> None:
    assigned = assign(resources, members=members, holders=holders)

    loads = Counter(assigned.values())
    room = sum(member.limit(len(resources)) for member in members.values())
    assert all(loads[one] <= member.limit(len(resources)) for one, member in members.items())
    assert len(assigned) == min(room, len(resources))
    without = [one.priority for one in resources if one.name not in assigned]
    with_one = [one.priority for one in resources if one.name in assigned]
    assert not without or not with_one or max(without) <= min(with_one)


@given(resources_of_priorities, limited_members, holders_of_resources)
def test_loads_differ_by_more_than_one_only_where_the_lesser_member_is_full(
    resources: Sequence[Resource], members: Mapping[str, Member], holders: Mapping[str, str]
) -> None:
    loads = Counter(assign(resources, members=members, holders=holders).values())

    most = max(loads.values(), default=0)
    assert all(loads[one] >= most - 1 or loads[one] == member.capacity for one, member in members.items())


@given(
    st.integers(0, 5),
    st.dictionaries(
        st.sampled_from(["m0", "m1", "m2"]), st.builds(Member, zones, st.none() | st.integers(0, 3)), min_size=1
    ),
    st.dictionaries(st.sampled_from(NAMES[:5]), st.sampled_from(["m0", "m1", "m2", "gone"])),
)
def test_no_other_even_assignment_moves_fewer_resources(
    count: int, members: Mapping[str, Member], holders: Mapping[str, str]
) -> None:
    resources = [Resource(name) for name in NAMES[:count]]
    held = {name: one for name, one in holders.items() if name in NAMES[:count] and one in members}

    assigned = assign(resources, members=members, holders=holders)

    assert len(moved(held, assigned)) == min(len(moved(held, one)) for one in even_assignments(count, members))


def even_assignments(count: int, members: Mapping[str, Member]) -> list[dict[str, str]]:
    """All assignments of so many resources that give away as many as there is room for, and as evenly."""
    found = [
        {name: one for name, one in zip(NAMES, choice, strict=False) if one is not None}
        for choice in product([None, *members], repeat=count)
    ]
    fitting = [one for one in found if all(n <= members[m].limit(count) for m, n in Counter(one.values()).items())]
    most = max(len(one) for one in fitting)
    squares = {number: sum(n * n for n in Counter(one.values()).values()) for number, one in enumerate(fitting)}
    least = min(squares[number] for number, one in enumerate(fitting) if len(one) == most)
    return [one for number, one in enumerate(fitting) if len(one) == most and squares[number] == least]


@given(resources_of_priorities, limited_members, holders_of_resources)
def test_an_assignment_that_holds_stays_as_it_is(
    resources: Sequence[Resource], members: Mapping[str, Member], holders: Mapping[str, str]
) -> None:
    once = assign(resources, members=members, holders=holders)

    assert assign(resources, members=members, holders=once) == once


@given(resources_of_zones, members_of_zones, holders_of_resources, st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_changes_nothing(
    resources: list[Resource], members: dict[str, Member], holders: Mapping[str, str], random: object
) -> None:
    once = assign(resources, members=members, holders=holders)
    random.shuffle(resources)  # type: ignore[attr-defined]

    again = assign(resources, members=dict(reversed(members.items())), holders=holders)

    assert again == once


@given(st.integers(0, 60), st.integers(1, 8))
def test_a_member_that_joins_takes_its_fair_share_and_nothing_else_moves(count: int, members: int) -> None:
    resources = [Resource(f"r{number:02d}") for number in range(count)]
    before = assign(resources, members=unlimited(members), holders={})

    after = assign(resources, members=unlimited(members + 1), holders=before)

    assert {after[name] for name in moved(before, after)} <= {f"m{members}"}
    assert len(moved(before, after)) == count // (members + 1)


@given(st.integers(0, 60), st.integers(2, 8))
def test_what_a_dead_member_had_moves_and_nothing_else(count: int, members: int) -> None:
    resources = [Resource(f"r{number:02d}") for number in range(count)]
    before = assign(resources, members=unlimited(members), holders={})
    living = {one: member for one, member in unlimited(members).items() if one != "m0"}

    after = assign(resources, members=living, holders=before)

    assert moved(before, after) == {name for name, one in before.items() if one == "m0"}


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 4))
def test_a_remainder_is_spread_over_the_zones(count: int, zone_count: int, members_a_zone: int) -> None:
    members = {f"{zone}{n}": Member(f"zone-{zone}") for zone in range(zone_count) for n in range(members_a_zone)}

    assigned = assign([Resource(f"r{number:02d}") for number in range(count)], members=members, holders={})

    loads = Counter(members[one].zone for one in assigned.values())
    assert spread(loads[f"zone-{zone}"] for zone in range(zone_count)) <= 1


def test_a_few_important_resources_are_not_all_in_one_zone_after_another_zone_failed() -> None:
    members = {"a1": Member("a"), "a2": Member("a"), "b1": Member("b"), "b2": Member("b"), "c1": Member("c")}
    resources = [Resource("r00", priority=1), Resource("r01", priority=1)]
    living = {one: member for one, member in members.items() if member.zone != "b"}

    after = assign(resources, members=living, holders={"r00": "a1", "r01": "b1"})

    assert after == {"r00": "a1", "r01": "c1"}


def test_a_member_with_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="capacity is 0 or more"):
        Member(capacity=-1)
