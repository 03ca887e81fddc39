"""Decides which shards a node takes, opens, closes and releases, what the leader assigns, and why shards wait. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from outbox_broker.cluster.znode_records import NodeRecord, OwnerRecord
from outbox_core.assignment.even_assignment import Member, Resource, assign, check_zone
from outbox_core.common.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What one node read: itself (its session's id), the live nodes, the leader, the assignment and the owners.

    Parts may be from slightly different moments. Nothing is safe because of a view: taking a shard is a
    compare-and-set.
    """

    me: str
    nodes: Mapping[str, NodeRecord]
    leader: str | None
    assigned: Mapping[str, str]
    owners: Mapping[str, OwnerRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSteps:
    """The steps of one node, each a sorted list of shards."""

    take: tuple[str, ...]
    open: tuple[str, ...]
    close: tuple[str, ...]
    release: tuple[str, ...]


def decide_steps(view: ClusterView, *, shards: AbstractSet[str], hosted: AbstractSet[str]) -> ShardSteps:
    """Decide the steps of this node; `hosted`: the shards that it has open, or is about to open or close.

    A shard is released only when this node does not host it any more, and opened only when this node is its owner.
    """
    assigned = {shard for shard, node in view.assigned.items() if node == view.me and shard in shards}
    owned = {shard for shard, owner in view.owners.items() if owner.node == view.me}
    return ShardSteps(
        take=_sorted(assigned - view.owners.keys() - hosted),
        open=_sorted((owned & assigned) - hosted),
        close=_sorted(hosted - (owned & assigned)),
        release=_sorted(owned - assigned - hosted),
    )


def decide_assignment(view: ClusterView, *, shards: Iterable[str]) -> dict[str, str]:
    """Decide the node of each shard: even over the nodes that are able to take some, with the fewest moves.

    One node, the leader, decides for all: no shard may have two owners, and one that moves is closed by its node first.
    A shard whose assigned node is gone counts as its owner's, if that is alive: it need not move.
    """
    holders = {shard: owner.node for shard, owner in view.owners.items()} | {
        shard: node for shard, node in view.assigned.items() if node in view.nodes
    }
    members = {node: _member(record) for node, record in view.nodes.items()}
    return assign([Resource(shard) for shard in shards], members=members, holders=holders)


def why_waiting(shard: str, view: ClusterView) -> str | None:
    """Returns why a shard is not served; None if it is."""
    owner = view.owners.get(shard)
    if owner is not None:
        return _why_owner_waits(owner, view)
    node = view.assigned.get(shard)
    if node is not None and node in view.nodes:
        return f"node {view.nodes[node].name} is assigned and has not taken it yet"
    if not view.nodes:
        return "no node is alive: start one with `outbox delay serve`, or `outbox broker serve`"
    if all(record.unable is not None for record in view.nodes.values()):
        name, reason = next((record.name, record.unable) for record in view.nodes.values())
        return f"no node can take shards; node {name}: {reason}"
    if node is not None:
        return "its node is gone, and the leader has not assigned it anew yet"
    return "no node has room: raise --capacity, or start more nodes"


def zone_of(record: NodeRecord) -> str | None:
    """Returns the zone of a node; None, too, where its record has one that cannot be: that node would stop the leader's
    assignment of every shard.
    """
    try:
        check_zone(record.zone)
    except ConfigurationError:
        return None
    return record.zone


def _why_owner_waits(owner: OwnerRecord, view: ClusterView) -> str | None:
    record = view.nodes.get(owner.node)
    name = owner.node if record is None else record.name
    if record is None:
        return f"node {name} is gone, and its session has not expired yet"
    if owner.state == "serving":
        return None
    return f"node {name} is {owner.state} it" + ("" if owner.reason is None else f": {owner.reason}")


def _member(record: NodeRecord) -> Member:
    return Member(zone_of(record), 0 if record.unable is not None else record.capacity)


def _sorted(shards: AbstractSet[str]) -> tuple[str, ...]:
    return tuple(sorted(shards))
