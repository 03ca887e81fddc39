"""All interleavings of two nodes, their requests to ZooKeeper, its session expiry and the leader's moves of a shard.

The decisions and the lease are the real ones; ZooKeeper is a model: it ends a session a time-out after the last request
that it got, or any time later, and never says so. A node may stand still between any two of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

from outbox_broker.cluster.ownership_lease import OwnershipLease, ShardPermit
from outbox_broker.cluster.shard_decision import ClusterView, ShardSteps, decide_steps
from outbox_broker.cluster.znode_records import NodeRecord, OwnerRecord

SHARD = "0-0000"
NODES = ("a", "b")
SESSION_MS = 3
TIME_MS_MAX = 5
OWNERSHIPS_MAX = 2
MEMO_MAX = 100_000
RECORD = NodeRecord(name="n", url="u", peer_url="p", version="1")


class Node(NamedTuple):
    """What one node knows and has on its way. `permit`: the epoch for which it hosts the shard."""

    touched_ms: int | None = 0  # when ZooKeeper last got a request of its session; None: the session is over
    sent_ms: int | None = None
    is_received: bool = False
    confirmed_ms: int = 0
    permit: int | None = None


class World(NamedTuple):
    """One state. A tuple, as nodes are, since most of the time goes into making and hashing them."""

    now_ms: int
    a: Node
    b: Node
    assigned: str = "a"
    owner: tuple[str, int] | None = None
    epochs: int = 0

    def node(self, name: str) -> Node:
        return self.a if name == "a" else self.b

    def having(self, name: str, node: Node, **changes: Any) -> World:
        return self._replace(**{name: node}, **changes)


class Violation(Exception):
    """A node may act for a shard that it does not own, or epochs do not rise."""


@lru_cache(maxsize=MEMO_MAX)
def may_act(node: Node, *, now_ms: int, granted_ms: int) -> bool:
    """Whether the node's permit holds at this time, by its real lease. A pure function, of which most states repeat
    the arguments.
    """
    assert node.permit is not None
    lease = OwnershipLease(session_timeout_ms=granted_ms, clock_ms=lambda: now_ms)
    lease.extend(node.confirmed_ms)
    return ShardPermit(SHARD, lease, epoch=node.permit).why_ended() is None


@lru_cache(maxsize=MEMO_MAX)
def decision(name: str, *, assigned: str, owner: tuple[str, int] | None, is_hosted: bool) -> ShardSteps:
    """What the real decision says. A pure function, too."""
    owners = {} if owner is None else {SHARD: OwnerRecord(node=owner[0], state="serving")}
    view = ClusterView(
        me=name, nodes=dict.fromkeys(NODES, RECORD), leader="a", assigned={SHARD: assigned}, owners=owners
    )
    return decide_steps(view, shards={SHARD}, hosted={SHARD} if is_hosted else set())


def check(world: World, *, granted_ms: int) -> int:
    """Raise Violation if a node that may act is not the owner; returns how many may act."""
    active = 0
    for name in NODES:
        node = world.node(name)
        if node.permit is not None and may_act(node, now_ms=world.now_ms, granted_ms=granted_ms):
            active += 1
            if world.owner != (name, node.permit):
                raise Violation(f"{name} acts for a shard of {world.owner} at {world.now_ms}")
    return active


def successors(world: World) -> Iterator[World]:
    """Every state that one step leads to."""
    if world.now_ms < TIME_MS_MAX:
        yield world._replace(now_ms=world.now_ms + 1)
    if world.assigned == "a":
        yield world._replace(assigned="b")
    for name in NODES:
        node = world.node(name)
        if node.sent_ms is None:
            yield world.having(name, node._replace(sent_ms=world.now_ms))
        elif not node.is_received and node.touched_ms is not None:
            yield world.having(name, node._replace(is_received=True, touched_ms=world.now_ms))
        elif node.is_received:
            yield world.having(name, node._replace(sent_ms=None, is_received=False, confirmed_ms=node.sent_ms))
        if node.touched_ms is not None:
            if world.now_ms - node.touched_ms >= SESSION_MS:
                owner = None if world.owner is not None and world.owner[0] == name else world.owner
                yield world.having(name, node._replace(touched_ms=None), owner=owner)
            yield from steps_of(world, name)


def steps_of(world: World, name: str) -> Iterator[World]:
    """The steps that the node's decision names, with what ZooKeeper makes of them."""
    node = world.node(name)
    steps = decision(name, assigned=world.assigned, owner=world.owner, is_hosted=node.permit is not None)
    if steps.take:
        epoch = world.epochs + 1
        yield world.having(
            name, node._replace(permit=epoch, touched_ms=world.now_ms), owner=(name, epoch), epochs=epoch
        )
    if steps.open:
        assert world.owner is not None
        yield world.having(name, node._replace(permit=world.owner[1]))
    if steps.close:
        yield world.having(name, node._replace(permit=None))
    if steps.release:
        yield world._replace(owner=None)


def explore(*, granted_ms: int) -> tuple[int, int]:
    """Visit every state; returns how many there are, and in how many of them a node acts."""
    start = World(0, Node(), Node())
    seen, left, acting = {start}, [start], 0
    while left:
        world = left.pop()
        acting += check(world, granted_ms=granted_ms)
        for follower in successors(world):
            if follower.epochs <= OWNERSHIPS_MAX and follower not in seen:
                seen.add(follower)
                left.append(follower)
    return len(seen), acting


@pytest.mark.slow
def test_no_node_acts_for_a_shard_that_another_one_owns_in_any_interleaving() -> None:
    states, acting = explore(granted_ms=SESSION_MS)

    print(f"{states:,} states, a node acts in {acting:,}")
    assert states > 10_000
    assert acting > 1_000


def test_the_model_finds_a_lease_that_outlasts_the_session() -> None:
    with pytest.raises(Violation, match="acts for a shard"):
        explore(granted_ms=2 * SESSION_MS)
