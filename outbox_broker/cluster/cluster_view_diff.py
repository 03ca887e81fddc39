"""Describes what changed in a cluster between two views of one node, as events for its log. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from outbox_broker.cluster.shard_decision import ClusterView, zone_of
from outbox_core.assignment.even_assignment import ZONE_CHARS_MAX

LISTED_MAX: Final = 64
"""Shards that one event names; it counts the others."""


@dataclass(frozen=True, slots=True)
class ClusterChange:
    """One event and its fields."""

    event: str
    fields: Mapping[str, object]
    level: int = logging.INFO


def changes_between(earlier: ClusterView | None, later: ClusterView) -> Iterator[ClusterChange]:
    """Yields an event for each kind of change; nothing where the views are equal.

    Shards show under the node that owns them, "none" without an owner.
    """
    before = earlier or ClusterView(me=later.me, nodes={}, leader=None, assigned={}, owners={})
    names = {node: record.name for view in (before, later) for node, record in view.nodes.items()}
    if before.me != later.me:
        yield ClusterChange("node_session_changed", {"earlier": before.me})
    joined, left = later.nodes.keys() - before.nodes.keys(), before.nodes.keys() - later.nodes.keys()
    if joined or left:
        yield ClusterChange(
            "cluster_nodes_changed",
            {"joined": sorted(names[node] for node in joined), "left": sorted(names[node] for node in left)},
        )
    for record in (later.nodes[node] for node in sorted(joined)):
        if record.zone is not None and zone_of(record) is None:
            fields = {"node_name": record.name, "zone": record.zone[:ZONE_CHARS_MAX]}
            yield ClusterChange("node_zone_ignored", fields, level=logging.WARNING)
    for node in sorted(later.nodes.keys() & before.nodes.keys()):
        if (reason := later.nodes[node].unable) != before.nodes[node].unable:
            event = "node_able_again" if reason is None else "node_unable"
            yield ClusterChange(event, {"node_name": names[node], "reason": reason})
    if before.leader != later.leader:
        leader = None if later.leader is None else names.get(later.leader, later.leader)
        yield ClusterChange("cluster_leader_changed", {"leader": leader})
    owned = _moved(_owners(before), _owners(later), names)
    if owned:
        yield ClusterChange("shard_owners_changed", {"shards": len(owned), "owners": _listed(owned)})


def moves(view: ClusterView, assigned: Mapping[str, str]) -> dict[str, str]:
    """Returns what an assignment changes, as shard -> "from to", in names of nodes."""
    names = {node: record.name for node, record in view.nodes.items()}
    return _listed(_moved(view.assigned, assigned, names))


def _owners(view: ClusterView) -> dict[str, str]:
    return {shard: owner.node for shard, owner in view.owners.items()}


def _moved(before: Mapping[str, str], after: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    def name(node: str | None) -> str:
        return "none" if node is None else names.get(node, node)

    return {
        shard: f"{name(before.get(shard))} to {name(after.get(shard))}"
        for shard in sorted(before.keys() | after.keys())
        if before.get(shard) != after.get(shard)
    }


def _listed(moved: Mapping[str, str]) -> dict[str, str]:
    return dict(list(moved.items())[:LISTED_MAX])
