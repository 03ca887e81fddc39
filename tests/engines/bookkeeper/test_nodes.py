"""Nodes of a delay cluster whose segments are on real bookies: nodes and bookies die, and nothing is lost or early."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbox_broker.cluster.bookkeeper.java_runtime import JARS_VARIABLE
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.java_server import java_home
from tests.outbox_broker.cluster.running_cluster import RunningCluster, messages, publish


@pytest.fixture
def running(
    cluster: BookKeeperCluster, jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningCluster]:
    """A delay cluster without nodes, whose shards are on the ledgers of the bookies."""
    monkeypatch.setenv(JARS_VARIABLE, str(jars))
    monkeypatch.setenv("JAVA_HOME", str(java_home()))
    password = tmp_path / "ledgers-password"
    password.write_text("of the ledgers")
    settings = {"ledgers_uri": cluster.metadata_uri, "ledgers_password_file": str(password)}
    settings |= {"ensemble": "2", "write_quorum": "2", "ack_quorum": "2"}  # which a third bookie can stand in for
    with ExitStack() as stack:
        yield RunningCluster(cluster.zookeeper_hosts, tmp_path, stack, settings=settings)


def test_a_dead_node_and_a_dead_bookie_lose_nothing_and_another_node_goes_on(
    running: RunningCluster, cluster: BookKeeperCluster
) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)
    batch = messages(300)
    publish(second.url, batch[:150])

    first.end(signal.SIGKILL)
    cluster.kill9(cluster.bookie_ids[0])
    publish(second.url, batch[150:])
    running.wait_until_served(second)
    came = running.consume({message.id for message in batch})

    assert Counter(one for one, _ in came).keys() == {message.id for message in batch}
    assert min(late_ms for _, late_ms in came) >= 0
    assert not list(running.folder.glob("segments*"))


def test_what_is_scheduled_outlives_all_nodes_and_all_bookies(
    running: RunningCluster, cluster: BookKeeperCluster
) -> None:
    node = running.node("n1")
    running.wait_until_served(node)
    batch = messages(100, due_in_ms=20_000)
    publish(node.url, batch)

    node.end(signal.SIGKILL)
    for bookie in cluster.bookie_ids:
        cluster.kill9(bookie)
    cluster.restore()
    running.wait_until_served(running.node("n2"))
    came = running.consume({message.id for message in batch})

    assert sorted(one for one, _ in came) == sorted(message.id for message in batch)
    assert min(late_ms for _, late_ms in came) >= 0
