"""The pure part: everybody is served, zones are kept, loads are level, and few sources change hands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.assignment.even_assignment import assign
from outbox_core.assignment.lease_decision import Lease, View, decide
from outbox_core.assignment.resource import Resource

ZONES = [None, "a", "b", "c"]

zones = st.sampled_from(ZONES)
instances_of_zones = st.dictionaries(st.sampled_from([f"i{n}" for n in range(8)]), zones, max_size=8)
sources_of_zones = st.lists(zones, max_size=40).map(
    lambda found: [Resource(f"s{number:02d}", zone) for number, zone in enumerate(found)]
)
holders_of_sources = st.dictionaries(
    st.sampled_from([f"s{n:02d}" for n in range(40)]), st.sampled_from([f"i{n}" for n in range(10)])
)


def may_take(source: Resource, instances: Mapping[str, str | None]) -> set[str]:
    """Whom the rule of zones allows."""
    same = {one for one, zone in instances.items() if zone == source.zone}
    return same if source.zone is not None and same else set(instances)


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """Sources that had a holder and have another one now."""
    return {name for name, one in before.items() if after.get(name) != one}


@given(sources_of_zones, instances_of_zones, holders_of_sources)
def test_every_source_goes_to_one_that_its_zone_allows(
    sources: Sequence[Resource], instances: Mapping[str, str | None], holders: Mapping[str, str]
) -> None:
    shared = assign(sources, instances=instances, holders=holders)

    assert shared.keys() == ({source.name for source in sources} if instances else set())
    assert all(shared[source.name] in may_take(source, instances) for source in sources if instances)


@given(sources_of_zones, instances_of_zones, holders_of_sources)
def test_loads_of_those_who_may_take_a_source_differ_by_at_most_one(
    sources: Sequence[Resource], instances: Mapping[str, str | None], holders: Mapping[str, str]
) -> None:
    shared = assign(sources, instances=instances, holders=holders)

    bound = Counter(shared[s.name] for s in sources if instances and len(may_take(s, instances)) < len(instances))
    loads = Counter(shared.values())
    for source in sources if instances else []:
        eligible = may_take(source, instances)
        counted = bound if eligible != set(instances) else loads
        # What may go anywhere goes where least is: nobody who has got any of it has more than the least one plus one.
        if counted is loads:
            assert loads[shared[source.name]] <= min(loads[one] for one in instances) + 1
        else:
            assert max(counted[one] for one in eligible) - min(counted[one] for one in eligible) <= 1


@given(sources_of_zones, instances_of_zones, holders_of_sources)
def test_what_is_shared_out_well_stays_as_it_is(
    sources: Sequence[Resource], instances: Mapping[str, str | None], holders: Mapping[str, str]
) -> None:
    once = assign(sources, instances=instances, holders=holders)

    assert assign(sources, instances=instances, holders=once) == once


@given(sources_of_zones, instances_of_zones, holders_of_sources, st.randoms())
def test_the_order_of_what_is_given_changes_nothing(
    sources: list[Resource], instances: dict[str, str | None], holders: Mapping[str, str], random: object
) -> None:
    once = assign(sources, instances=instances, holders=holders)
    random.shuffle(sources)  # type: ignore[attr-defined]

    again = assign(sources, instances=dict(reversed(instances.items())), holders=holders)

    assert again == once


@given(st.integers(0, 60), st.integers(1, 8))
def test_who_joins_takes_its_fair_share_and_nothing_else_moves(count: int, instances: int) -> None:
    sources = [Resource(f"s{number:02d}") for number in range(count)]
    before = assign(sources, instances={f"i{n}": None for n in range(instances)}, holders={})

    after = assign(sources, instances={f"i{n}": None for n in range(instances + 1)}, holders=before)

    newcomer = f"i{instances}"
    assert {after[name] for name in moved(before, after)} <= {newcomer}
    assert len(moved(before, after)) == count // (instances + 1)


@given(st.integers(0, 60), st.integers(2, 8))
def test_what_a_dead_one_had_moves_and_nothing_else(count: int, instances: int) -> None:
    sources = [Resource(f"s{number:02d}") for number in range(count)]
    living = {f"i{n}": None for n in range(instances)}
    before = assign(sources, instances=living, holders={})

    after = assign(sources, instances={one: None for one in living if one != "i0"}, holders=before)

    assert moved(before, after) == {name for name, one in before.items() if one == "i0"}


@given(
    st.lists(st.sets(st.sampled_from([f"s{n}" for n in range(10)])), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_instances_that_know_different_sources_leave_none_without_one_that_serves_it(
    knows: list[set[str]], random: object
) -> None:
    leases: dict[str, Lease] = {}
    live = {f"i{number}": None for number in range(len(knows))}
    waited: list[Counter[str]] = [Counter() for _ in knows]

    for _ in range(30):
        number = random.randrange(len(knows))  # type: ignore[attr-defined]
        me, known = f"i{number}", [Resource(name) for name in sorted(knows[number])]
        overdue = {name for name, beats in waited[number].items() if beats >= 3}
        decision = decide(View(me=me, instances=live, leases=leases), known, overdue=overdue)
        waited[number] = Counter({name: waited[number][name] + 1 for name in decision.waiting})
        leases |= {name: Lease(holder=None, ended=True) for name in (*decision.add, *decision.release)}
        leases |= {name: Lease(holder=me, ended=False) for name in (*decision.take, *decision.keep)}
        leases |= {name: Lease(holder=me, ended=True) for name in decision.offer}
    for number, known_names in enumerate(knows):  # whoever comes five times more has seen that nobody else took it
        for _ in range(5):
            me, known = f"i{number}", [Resource(name) for name in sorted(known_names)]
            overdue = {name for name, beats in waited[number].items() if beats >= 3}
            decision = decide(View(me=me, instances=live, leases=leases), known, overdue=overdue)
            waited[number] = Counter({name: waited[number][name] + 1 for name in decision.waiting})
            leases |= {name: Lease(holder=me, ended=False) for name in (*decision.take, *decision.keep)}

    for name in set().union(*knows):
        holder = leases[name].holder
        assert holder is not None
        assert name in knows[int(holder[1:])]
