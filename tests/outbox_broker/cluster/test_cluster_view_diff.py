"""What a node logs of changes in its cluster: each once, in the names of nodes; nothing while nothing changes."""

from __future__ import annotations

import logging
from dataclasses import replace

from outbox_broker.cluster.cluster_view_diff import LISTED_MAX, changes_between, moves
from outbox_broker.cluster.shard_decision import ClusterView
from outbox_broker.cluster.znode_records import NodeRecord, OwnerRecord


def record(name: str, *, unable: str | None = None, zone: str | None = None) -> NodeRecord:
    return NodeRecord(name=name, url="u", peer_url="p", version="1", unable=unable, zone=zone)


VIEW = ClusterView(
    me="1", nodes={"1": record("a"), "2": record("b")}, leader="1", assigned={"0-0000": "1"},
    owners={"0-0000": OwnerRecord(node="1", state="serving")},
)  # fmt: skip


def described(earlier: ClusterView | None, later: ClusterView) -> dict[str, object]:
    return {change.event: dict(change.fields) for change in changes_between(earlier, later)}


def test_nothing_is_logged_while_nothing_changes() -> None:
    busy = {"0-0000": OwnerRecord(node="1", state="failing to open", reason="no bookie answers")}

    assert described(VIEW, VIEW) == {}
    assert described(VIEW, replace(VIEW, owners=busy)) == {}  # its owner logs that itself


def test_the_first_view_is_described_whole() -> None:
    assert described(None, VIEW) == {
        "cluster_nodes_changed": {"joined": ["a", "b"], "left": []},
        "cluster_leader_changed": {"leader": "a"},
        "shard_owners_changed": {"shards": 1, "owners": {"0-0000": "none to a"}},
    }


def test_a_node_that_is_gone_shows_with_the_shards_that_it_leaves() -> None:
    later = replace(VIEW, me="2", nodes={"2": record("b")}, leader="2", owners={})

    assert described(replace(VIEW, me="2"), later) == {
        "cluster_nodes_changed": {"joined": [], "left": ["a"]},
        "cluster_leader_changed": {"leader": "b"},
        "shard_owners_changed": {"shards": 1, "owners": {"0-0000": "a to none"}},
    }


def test_a_node_that_takes_no_shards_shows_why_and_when_it_does_again() -> None:
    later = replace(VIEW, nodes={"1": record("a"), "2": record("b", unable="it is draining")})

    assert described(VIEW, later) == {"node_unable": {"node_name": "b", "reason": "it is draining"}}
    assert described(later, VIEW) == {"node_able_again": {"node_name": "b", "reason": None}}


def test_a_node_whose_zone_cannot_be_is_warned_of_once() -> None:
    later = replace(VIEW, nodes={**VIEW.nodes, "3": record("c", zone="Zürich")})

    levels = {change.event: change.level for change in changes_between(VIEW, later)}

    assert described(VIEW, later)["node_zone_ignored"] == {"node_name": "c", "zone": "Zürich"}
    assert levels == {"cluster_nodes_changed": logging.INFO, "node_zone_ignored": logging.WARNING}
    assert described(later, later) == {}


def test_a_new_session_of_the_node_itself_is_an_event() -> None:
    assert described(VIEW, replace(VIEW, me="3"))["node_session_changed"] == {"earlier": "1"}


def test_an_assignment_names_its_moves_up_to_a_limit() -> None:
    many = {f"0-{number:04d}": "2" for number in range(LISTED_MAX + 1)}

    assert moves(VIEW, {"0-0000": "2"}) == {"0-0000": "a to b"}
    assert moves(VIEW, {}) == {"0-0000": "a to none"}
    assert len(moves(VIEW, many)) == LISTED_MAX
