"""A delay cluster on real bookies under load while something fails: the history of its clients is right in each case.

Acknowledged messages are delivered, canceled or pending, each exactly one of them; none comes early; repetitions have
equal ids, and are counted.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from outbox_broker.cluster.bookkeeper.java_runtime import JARS_VARIABLE
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.java_server import java_home
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy, cutting_tcp_proxy
from tests.outbox_broker.cluster.delay_history import Fate
from tests.outbox_broker.cluster.delay_load import PENDING, DelayLoad
from tests.outbox_broker.cluster.node_process import NodeProcess
from tests.outbox_broker.cluster.recorded_target import RecordedTarget
from tests.outbox_broker.cluster.running_cluster import SHARDS, RunningCluster

MESSAGES = 150
"""Acknowledged at least before, and after, the failure."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Two nodes; the first one reaches the servers of ZooKeeper through proxies."""

    running: RunningCluster
    bookkeeper: BookKeeperCluster
    proxies: list[CuttingTcpProxy]
    target: RecordedTarget
    first: NodeProcess
    second: NodeProcess

    def wait_until_only_the_second_serves(self) -> None:
        self.running.wait_until_alive("n2")
        self.running.wait_until_served(self.second)

    def wait_until_settled(self) -> None:
        self.running.wait_until_served(self.first, self.second)

    def owners(self) -> dict[str, tuple[str, int]]:
        """The node and the epoch of each shard."""
        return {shard: (one["node"], one["epoch"]) for shard, one in self.running.status()["shards"].items()}


@pytest.fixture(scope="module")
def standing(
    running_cluster: BookKeeperCluster, jars: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """The cluster of all tests here: a node's start takes longer than most failures."""
    folder = tmp_path_factory.mktemp("nodes")
    password = folder / "ledgers-password"
    password.write_text("of the ledgers")
    settings = {
        "ledgers_uri": running_cluster.metadata_uri, "ledgers_password_file": str(password),
        "ensemble": "2", "write_quorum": "2", "ack_quorum": "2",  # which a third bookie can stand in for
        "session_ms": "8000",  # longer than an election of ZooKeeper's leader
    }  # fmt: skip
    addresses = [host.rpartition(":") for host in running_cluster.zookeeper_hosts.split(",")]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv(JARS_VARIABLE, str(jars))
        patch.setenv("JAVA_HOME", str(java_home()))
        proxies = [stack.enter_context(cutting_tcp_proxy(int(port), host=host)) for host, _, port in addresses]
        running = RunningCluster(running_cluster.zookeeper_hosts, folder, stack, settings=settings)
        target, url = running.recorded_target()
        first = running.node("n1", target=url, zookeeper=",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies))
        second = running.node("n2", target=url)
        yield Stage(running, running_cluster, proxies, target, first, second)


@pytest.fixture
def stage(standing: Stage, cluster: BookKeeperCluster) -> Stage:
    """The same, with both nodes serving."""
    standing.wait_until_settled()
    return standing


def owner_is_killed(stage: Stage, _load: DelayLoad) -> None:
    stage.first.end(signal.SIGKILL)
    stage.wait_until_only_the_second_serves()
    stage.first.start()


def owner_is_paused_past_its_lease(stage: Stage, _load: DelayLoad) -> None:
    stage.first.pause()
    stage.wait_until_only_the_second_serves()
    stage.first.resume()


def bookie_is_killed(stage: Stage, load: DelayLoad) -> None:
    stage.bookkeeper.kill9(stage.bookkeeper.bookie_ids[0])
    load.go_on(MESSAGES)
    stage.bookkeeper.restore()


def bookie_hangs(stage: Stage, load: DelayLoad) -> None:
    with stage.bookkeeper.paused(stage.bookkeeper.bookie_ids[1]):
        load.go_on(MESSAGES)


def session_with_zookeeper_is_cut(stage: Stage, _load: DelayLoad) -> None:
    for proxy in stage.proxies:
        proxy.cut_off()
    try:
        stage.wait_until_only_the_second_serves()
    finally:
        for proxy in stage.proxies:
            proxy.heal()


def zookeeper_is_killed_and_restarted(stage: Stage, load: DelayLoad) -> None:
    stage.bookkeeper.zookeeper.kill9()
    stage.bookkeeper.zookeeper.start()
    load.go_on(MESSAGES)


def zookeepers_leader_is_killed(stage: Stage, load: DelayLoad) -> None:
    """The shards keep their owners: sessions outlive the election of another leader."""
    owners = stage.owners()
    killed = stage.bookkeeper.zookeeper.kill9_leader()
    load.go_on(MESSAGES)
    stage.wait_until_settled()
    print(f"the leader was {killed}")
    assert stage.owners() == owners
    assert len(owners) == SHARDS
    stage.bookkeeper.restore()


def all_nodes_are_killed_and_restarted(stage: Stage, _load: DelayLoad) -> None:
    for node in (stage.first, stage.second):
        node.end(signal.SIGKILL)
    for node in (stage.first, stage.second):
        node.start()


@pytest.mark.parametrize(
    "fail",
    [
        owner_is_killed,
        owner_is_paused_past_its_lease,
        bookie_is_killed,
        bookie_hangs,
        session_with_zookeeper_is_cut,
        zookeeper_is_killed_and_restarted,
        zookeepers_leader_is_killed,
        all_nodes_are_killed_and_restarted,
    ],
    ids=lambda fail: fail.__name__,
)
def test_nothing_is_lost_early_or_canceled_and_delivered_when(
    fail: Callable[[Stage, DelayLoad], None], stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    load = DelayLoad([stage.first.url, stage.second.url], stage.target, prefix=fail.__name__)
    load.go_on(MESSAGES)
    fail(stage, load)
    load.go_on(MESSAGES)
    stage.wait_until_settled()

    verdict = load.finish()

    print(f"{fail.__name__}: {verdict}")
    record_property("verdict", str(verdict))
    assert not verdict.violations
    assert verdict.acknowledged == sum(verdict.fates.values()) >= 2 * MESSAGES
    assert verdict.fates[Fate.PENDING] == PENDING
    assert verdict.fates[Fate.CANCELED] > 0
