"""Nodes on a real ZooKeeper: shards spread, move by request, and move when a session ends; nobody owns one twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outbox_broker.cluster.cluster_admin import add_generation, init_cluster, read_state
from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.owned_shard_operations import OwnedShardOperations
from outbox_broker.cluster.ownership_lease import boot_ms
from outbox_broker.cluster.peer_client import PeerClient, PeerOptions
from outbox_broker.cluster.request_router import RequestRouter
from outbox_broker.cluster.shard_decision import ClusterView, why_waiting
from outbox_broker.cluster.shard_names import ShardMap
from outbox_broker.cluster.znode_records import NodeRecord, ZnodeLayout
from outbox_broker.cluster.zookeeper_registry import ZooKeeperRegistry
from outbox_core import Message
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from tests.fixtures.cutting_tcp_proxy import cutting_tcp_proxy
from tests.fixtures.ended_session import end_session
from tests.fixtures.zookeeper_server import zookeeper
from tests.outbox_broker.cluster.conftest import SECONDS_MAX, SHORT_SESSION_MS, Cluster, InProcessNode, eventually

pytestmark = pytest.mark.processes
SHARDS = {f"0-{number:04d}" for number in range(8)}
PREEMPTED_MS = 100


def settled(*nodes: InProcessNode) -> bool:
    """Whether these nodes serve all shards, each one alone, evenly."""
    served = [node.serves() for node in nodes]
    sizes = [len(shards) for shards in served]
    return set.union(*served) == SHARDS and sum(sizes) == len(SHARDS) and max(sizes) - min(sizes) <= 1


class PreemptedMachine(SystemClock):
    """Clocks of a machine that does something else for a while behind each look at one of them."""

    def __init__(self) -> None:
        self.passed_ms = 0

    def now_ms(self) -> int:
        return self._read(super().now_ms())

    def boot_ms(self) -> int:
        return self._read(boot_ms())

    def _read(self, at_ms: int) -> int:
        read_ms = at_ms + self.passed_ms
        self.passed_ms += PREEMPTED_MS
        return read_ms


def test_time_that_passes_between_two_clocks_makes_the_clusters_clock_late_and_never_early(cluster: Cluster) -> None:
    machine = PreemptedMachine()
    registry = ZooKeeperRegistry(
        cluster.layout, connect=lambda: cluster.session, clock=machine, clock_ms=machine.boot_ms,
        record=NodeRecord(name="n1", url="http://n1:1", peer_url="http://n1:2", version="1"),
    )  # fmt: skip
    registry.renew()

    passed_ms = machine.passed_ms
    now_ms = registry.clock.now_ms()

    assert now_ms <= SystemClock().now_ms() + passed_ms


class MachineAhead(SystemClock):
    """A machine whose wall clock is an hour ahead."""

    def now_ms(self) -> int:
        return super().now_ms() + 3_600_000


def test_a_node_whose_clock_is_wrong_says_so_before_others_can_give_it_shards(cluster: Cluster) -> None:
    registry = ZooKeeperRegistry(
        cluster.layout, connect=lambda: cluster.session, clock=MachineAhead(),
        record=NodeRecord(name="n1", url="http://n1:1", peer_url="http://n1:2", version="1"),
    )  # fmt: skip

    view = registry.renew()

    assert "ahead of the cluster's" in str(view.nodes[registry.me].unable)
    written = cluster.session.read(cluster.layout.node(registry.me))
    assert written is not None
    assert written.version == 0, "its first record said that it is able"


def test_one_node_serves_every_shard(cluster: Cluster) -> None:
    only = cluster.node("n1")

    eventually(lambda: settled(only), what="one node with all shards")
    eventually(lambda: not read_state(cluster.session, cluster.layout).waiting, what="no shard waits")


def test_a_second_node_gets_half_of_the_shards_and_each_is_closed_before_it_is_opened_again(cluster: Cluster) -> None:
    first = cluster.node("n1")
    eventually(lambda: settled(first), what="one node with all shards")
    second = cluster.node("n2")
    eventually(lambda: settled(first, second), what="two nodes with four shards each")

    assert sorted(second.opened) == [(shard, 2) for shard in sorted(second.serves())]  # one writer after the other


def test_a_node_that_stops_hands_its_shards_over_and_leaves_no_record(cluster: Cluster) -> None:
    first, second = cluster.node("n1"), cluster.node("n2")
    eventually(lambda: settled(first, second), what="two nodes with four shards each")

    first.coordinator.stop()

    assert not first.serves()
    eventually(lambda: settled(second), what="the other node with all shards")
    assert [record.name for record in read_state(cluster.session, cluster.layout).view.nodes.values()] == ["n2"]


def test_a_node_that_cannot_hand_its_shards_over_in_time_leaves_once_and_for_all(cluster: Cluster) -> None:
    node = cluster.node("n1", drain_ms=100)
    eventually(lambda: settled(node), what="one node with all shards")
    is_late, stop_host = threading.Event(), node.host.stop
    for shard in node.host.serving().values():
        shard.opened = replace(shard.opened, close=closed_after(is_late, shard.opened.close))

    def stop(*, reason: str) -> None:
        is_late.set()
        stop_host(reason=reason)

    node.host.stop = stop  # type: ignore[method-assign]
    node.coordinator.stop()

    for thread in threading.enumerate():
        if thread.name == "coordinator":
            thread.join(SECONDS_MAX)
    assert len(node.sessions) == 1
    assert not read_state(cluster.session, cluster.layout).view.nodes


def test_a_request_to_another_node_is_refused_for_a_repetition_once_its_own_node_has_ended(cluster: Cluster) -> None:
    first, second = cluster.node("n1"), cluster.node("n2")
    eventually(lambda: settled(first, second), what="two nodes with four shards each")
    theirs_known = "the first node knows that the second one serves its shards"
    eventually(lambda: knows_owner(first.coordinator.view(), second.serves(), but=first), what=theirs_known)
    batch = [Message(id=f"m{number}", topic="t", body=b"") for number in range(100)]
    theirs = [one for one in batch if ShardMap([8]).shard_of(one.id) in second.serves()]
    router = RequestRouter(
        coordinator=first.coordinator, local=OwnedShardOperations(pytest.fail), peers=PeerClient(PeerOptions())
    )

    router.close()

    with pytest.raises(NotOwner, match="this node is stopping"):
        router.publish(theirs)


def knows_owner(view: ClusterView, shards: set[str], *, but: InProcessNode) -> bool:
    """Whether a view shows these shards as served by another node: an older one shows them as this node's own."""
    return all(why_waiting(one, view) is None and view.owners[one].node != but.registry.me for one in shards)


def closed_after(event: threading.Event, close: Callable[[], None]) -> Callable[[], None]:
    def closed() -> None:
        assert event.wait(SECONDS_MAX)
        close()

    return closed


def test_the_epoch_of_an_ownership_rises_with_each_owner(cluster: Cluster) -> None:
    first = cluster.node("n1")
    eventually(lambda: settled(first), what="one node with all shards")
    before = {shard: one.permit.epoch for shard, one in first.host.serving().items()}
    second = cluster.node("n2")
    first.coordinator.stop()
    eventually(lambda: settled(second), what="the other node with all shards")

    assert all(one.permit.epoch > before[shard] for shard, one in second.host.serving().items())


def test_a_session_that_ends_takes_every_shard_and_the_node_comes_back_as_another_one(cluster: Cluster) -> None:
    only = cluster.node("n1")
    eventually(lambda: settled(only), what="one node with all shards")
    permits = [one.permit for one in only.host.serving().values()]
    earlier = only.registry.me

    end_session(cluster.server.hosts, only.sessions[-1])

    eventually(lambda: all(permit.why_ended() for permit in permits), what="every permit ended")
    eventually(lambda: only.registry.me not in {"", earlier}, what="a new session")
    eventually(lambda: settled(only), what="the node with all shards again")


def test_a_node_without_zookeeper_stops_before_its_session_ends_and_goes_on_afterwards(tmp_path: Path) -> None:
    with zookeeper(tmp_path / "server") as server:
        cluster = Cluster(server, tmp_path / "data", shards=8)
        try:
            only = cluster.node("n1", session_ms=3 * SHORT_SESSION_MS)  # seconds from its lease's end to its session's
            eventually(lambda: settled(only), what="one node with all shards")
            server.pause()
            eventually(lambda: not only.serves(), what="no shard served without contact")
            with pytest.raises(NotOwner, match="two thirds of its session"):
                only.host.get("0-0000")
            server.resume()
            eventually(lambda: settled(only), what="all shards served again")
        finally:
            cluster.close()


def test_zookeeper_that_is_killed_and_restarted_costs_no_shard_its_owner_for_good(tmp_path: Path) -> None:
    with zookeeper(tmp_path / "server") as server:
        cluster = Cluster(server, tmp_path / "data", shards=8)
        try:
            nodes = [cluster.node(name, session_ms=SHORT_SESSION_MS) for name in ("n1", "n2")]
            eventually(lambda: settled(*nodes), what="two nodes with four shards each")
            server.kill9()
            eventually(lambda: not any(node.serves() for node in nodes), what="nobody serves without contact")
            server.start()
            eventually(lambda: settled(*nodes), what="two nodes with four shards each again")
        finally:
            cluster.close()


def test_a_node_that_is_cut_off_loses_its_shards_to_the_other_one(cluster: Cluster) -> None:
    with cutting_tcp_proxy(cluster.server.port) as proxy:
        cut = cluster.node("cut", hosts=f"127.0.0.1:{proxy.port}", session_ms=SHORT_SESSION_MS)
        eventually(lambda: settled(cut), what="the node behind the proxy with all shards")
        permits = [one.permit for one in cut.host.serving().values()]
        other = cluster.node("other")
        eventually(lambda: settled(cut, other), what="two nodes with four shards each")
        mine = cut.serves()
        proxy.close()
        # Its folder locks are free only once it has closed the shards by itself: nobody tells it.
        eventually(lambda: settled(other), what="the other node with all shards")

    assert mine
    assert not cut.serves()
    assert all(permit.why_ended() for permit in permits)


def test_a_shard_that_cannot_be_opened_waits_with_the_reason_and_is_served_once_it_can(cluster: Cluster) -> None:
    node = InProcessNode(cluster, "n1")
    node.open_failure = lambda shard: StorageFailed("2 of 3 bookies are writable") if shard == "0-0003" else None
    cluster.nodes.append(node)
    node.coordinator.start()

    eventually(lambda: node.serves() == SHARDS - {"0-0003"}, what="all other shards")
    eventually(
        lambda: "2 of 3 bookies" in read_state(cluster.session, cluster.layout).waiting.get("0-0003", ""),
        what="the reason",
    )
    with pytest.raises(NotOwner):
        node.host.get("0-0003")
    node.open_failure = lambda _shard: None
    eventually(lambda: settled(node), what="all shards")


def test_a_node_that_can_open_no_shard_leaves_them_to_the_others(cluster: Cluster) -> None:
    broken = InProcessNode(cluster, "broken")
    broken.open_failure = lambda _shard: StorageFailed("no bookie answers")
    cluster.nodes.append(broken)
    broken.coordinator.start()
    other = cluster.node("other")

    eventually(lambda: settled(other), what="the able node with all shards")
    records = read_state(cluster.session, cluster.layout).view.nodes.values()
    assert {record.name: record.unable for record in records} == {"broken": "no bookie answers", "other": None}


def test_a_store_that_fails_is_opened_again_under_the_next_epoch(cluster: Cluster) -> None:
    only = cluster.node("n1")
    eventually(lambda: settled(only), what="one node with all shards")

    only.host.serving()["0-0002"].failure = StorageFailed("a sync failed")

    eventually(lambda: ("0-0002", 2) in only.opened, what="the shard opened again")
    eventually(lambda: settled(only), what="all shards")


def test_a_shard_is_asked_to_limit_its_memory_by_how_many_shards_its_node_has(cluster: Cluster) -> None:
    first = cluster.node("n1")
    eventually(lambda: settled(first), what="one node with all shards")
    eventually(lambda: hosted(first) == {8}, what="one of eight each")
    second = cluster.node("n2")
    eventually(lambda: settled(first, second), what="two nodes with four shards each")

    eventually(lambda: hosted(first) == hosted(second) == {4}, what="one of four each")


def hosted(node: InProcessNode) -> set[int]:
    return {one.hosted for one in node.host.serving().values()}


def test_shards_of_a_new_generation_are_served_as_well(cluster: Cluster) -> None:
    only = cluster.node("n1")
    eventually(lambda: settled(only), what="one node with all shards")

    add_generation(cluster.session, cluster.layout, shards=2)

    eventually(lambda: only.serves() == SHARDS | {"1-0000", "1-0001"}, what="ten shards")
    assert only.coordinator.shards().shard_of("m").startswith("1-")


def test_a_path_without_a_cluster_is_refused_with_the_cure(cluster: Cluster) -> None:
    cluster.layout = ZnodeLayout("/test/none")
    node = InProcessNode(cluster, "n1")

    with pytest.raises(ConfigurationError, match="outbox delay init"):
        node.coordinator.start()
    node.coordinator.stop()


def test_a_cluster_of_a_later_version_is_refused(cluster: Cluster) -> None:
    cluster.session.write(cluster.layout.config, b'{"format": 2, "cluster": "x", "generations": [8]}')
    node = InProcessNode(cluster, "n1")

    with pytest.raises(ConfigurationError, match="upgrade this node"):
        node.coordinator.start()
    node.coordinator.stop()


def test_init_is_idempotent_and_never_changes_the_number_of_shards(cluster: Cluster) -> None:
    assert init_cluster(cluster.session, cluster.layout, shards=8).generations == [8]
    with pytest.raises(ConfigurationError, match="add-generation"):
        init_cluster(cluster.session, cluster.layout, shards=16)
