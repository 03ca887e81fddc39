"""What a node does with its shards, what the leader assigns, and the reasons for which a shard waits."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_broker.cluster.shard_decision import ClusterView, decide_assignment, decide_steps, why_waiting
from outbox_broker.cluster.shard_names import ShardMap, is_shard_name
from outbox_broker.cluster.znode_records import NodeRecord, OwnerRecord
from outbox_core.common.errors import ConfigurationError


def node(name: str, **values: Any) -> NodeRecord:
    return NodeRecord(name=name, url=f"http://{name}", peer_url=f"http://{name}", version="1", **values)


def view(
    *, assigned: dict[str, str], owners: dict[str, str], nodes: dict[str, NodeRecord] | None = None
) -> ClusterView:
    return ClusterView(
        me="a",
        nodes={"a": node("a"), "b": node("b")} if nodes is None else nodes,
        leader="a",
        assigned=assigned,
        owners={shard: OwnerRecord(node=owner, state="serving") for shard, owner in owners.items()},
    )


def steps(of: ClusterView, *, hosted: set[str]) -> dict[str, tuple[str, ...]]:
    decided = decide_steps(of, shards={"0-0000", "0-0001"}, hosted=hosted)
    every = {"take": decided.take, "open": decided.open, "close": decided.close, "release": decided.release}
    return {step: shards for step, shards in every.items() if shards}


def test_a_free_shard_is_taken_by_its_assigned_node() -> None:
    assert steps(view(assigned={"0-0000": "a", "0-0001": "b"}, owners={}), hosted=set()) == {"take": ("0-0000",)}


def test_a_shard_of_another_owner_is_left_alone_until_it_is_released() -> None:
    assert steps(view(assigned={"0-0000": "a"}, owners={"0-0000": "b"}), hosted=set()) == {}


def test_a_shard_whose_creation_was_not_answered_is_opened() -> None:
    assert steps(view(assigned={"0-0000": "a"}, owners={"0-0000": "a"}), hosted=set()) == {"open": ("0-0000",)}


def test_a_shard_that_moves_is_closed_first_and_released_afterwards() -> None:
    moved = view(assigned={"0-0000": "b"}, owners={"0-0000": "a"})

    assert steps(moved, hosted={"0-0000"}) == {"close": ("0-0000",)}
    assert steps(moved, hosted=set()) == {"release": ("0-0000",)}


def test_a_shard_that_was_lost_is_closed_and_not_taken_again_before_that() -> None:
    assert steps(view(assigned={"0-0000": "a"}, owners={}), hosted={"0-0000"}) == {"close": ("0-0000",)}


def test_a_shard_that_the_cluster_does_not_have_is_never_taken() -> None:
    assert steps(view(assigned={"7-0000": "a"}, owners={}), hosted=set()) == {}


def test_shards_are_spread_evenly_and_an_able_owner_keeps_its_own() -> None:
    shards = ShardMap([8]).names()
    before = decide_assignment(view(assigned={}, owners={}, nodes={"a": node("a")}), shards=shards)
    after = decide_assignment(view(assigned=before, owners=before), shards=shards)

    assert set(before.values()) == {"a"}
    assert sorted(after.values()) == ["a"] * 4 + ["b"] * 4
    assert sum(before[shard] != after[shard] for shard in shards) == 4


@pytest.mark.parametrize("zone", ["Zürich", "a\nb", "", "z" * 65])
def test_a_node_with_a_zone_that_cannot_be_gets_shards_as_one_without_a_zone(zone: str) -> None:
    shards = ShardMap([4]).names()
    nodes = {"a": node("a", zone="z1"), "b": node("b", zone=zone)}

    after = decide_assignment(view(assigned={}, owners={}, nodes=nodes), shards=shards)

    assert sorted(after.values()) == ["a", "a", "b", "b"]


def test_a_node_that_is_draining_gets_nothing() -> None:
    nodes = {"a": node("a", unable="it is draining"), "b": node("b")}

    assert set(
        decide_assignment(view(assigned={"0-0000": "a"}, owners={}, nodes=nodes), shards=["0-0000"]).values()
    ) == {"b"}


def test_zones_come_from_the_nodes_records() -> None:
    nodes = {"a": node("a", zone="z1"), "b": node("b", zone="z1"), "c": node("c", zone="z2")}
    assigned = decide_assignment(view(assigned={}, owners={}, nodes=nodes), shards=ShardMap([5]).names())

    assert sorted(assigned.values()).count("c") == 2  # the remainder goes to the zone that has the fewest


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (view(assigned={}, owners={}, nodes={}), "no node is alive"),
        (view(assigned={}, owners={}, nodes={"a": node("a", unable="2 of 3 bookies")}), "2 of 3 bookies"),
        (view(assigned={}, owners={}), "no node has room"),
        (view(assigned={"0-0000": "a"}, owners={}), "has not taken it yet"),
        (view(assigned={"0-0000": "gone"}, owners={}), "the leader has not assigned it anew"),
        (view(assigned={"0-0000": "a"}, owners={"0-0000": "gone"}), "its session has not expired yet"),
    ],
)
def test_a_shard_that_waits_has_a_reason(of: ClusterView, reason: str) -> None:
    assert reason in (why_waiting("0-0000", of) or "")


def test_a_shard_that_is_served_does_not_wait() -> None:
    assert why_waiting("0-0000", view(assigned={"0-0000": "a"}, owners={"0-0000": "b"})) is None


def test_a_message_keeps_its_shard_in_every_earlier_generation() -> None:
    one, two = ShardMap([4]), ShardMap([4, 64])

    for number in range(200):
        message_id = f"m{number}"
        assert list(two.older_shards_of(message_id)) == [one.shard_of(message_id)]
        assert two.shard_of(message_id).startswith("1-")
        assert is_shard_name(two.shard_of(message_id))
    assert len(two.names()) == len(set(two.names())) == 68


@pytest.mark.parametrize("generations", [[], [0], [5_000], [1] * 17])
def test_numbers_of_shards_beyond_their_bounds_are_refused(generations: list[int]) -> None:
    with pytest.raises(ConfigurationError):
        ShardMap(generations)
