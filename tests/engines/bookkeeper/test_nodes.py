"""Nodes of a delay cluster whose segments are on real bookies: nodes and bookies die, and nothing is lost or early."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.running_cluster import RunningCluster, messages, publish

if TYPE_CHECKING:
    from outbox_broker.cluster.bookkeeper.java_ledgers import JavaLedgers


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


def test_a_node_that_is_paused_while_it_sends_is_fenced_by_the_bookies(running: RunningCluster) -> None:
    handed = running.pause_while_sending()

    assert 0 < len(handed) < 400


def test_a_sweep_deletes_a_ledger_that_a_dead_process_never_named_and_no_other(
    running: RunningCluster, ledgers: JavaLedgers
) -> None:
    node = running.node("n1", session_ms="30000")  # of one that lost it, ledgers of an earlier epoch would go, too
    running.wait_until_served(node)
    batch = messages(50, due_in_ms=5_000)
    publish(node.url, batch)
    metadata = {
        "outbox-cluster": str(running.status()["cluster"]).encode(), "outbox-shard": b"0-0000", "outbox-epoch": b"0",
        "outbox-created-ms": b"0", "outbox-segment": b"a",
    }  # fmt: skip
    orphan = ledgers.begin_create(metadata)().ledger_id
    other = ledgers.begin_create({**metadata, "outbox-cluster": b"of another cluster"})().ledger_id

    would = running.sweep("--dry-run", "--retention", "0s")
    done = running.sweep("--retention", "0s")
    again = running.sweep("--retention", "0s")
    came = running.consume({message.id for message in batch})

    assert would["deleted"] == done["deleted"] == [orphan]
    assert again["deleted"] == []
    assert again["ledgers"] == again["named"] + again["young"] > 0
    assert other in {ledger for ledger, _ in ledgers.find()}
    assert len(came) == 50


def test_status_counts_the_bookies_and_says_when_none_can_be_spared(
    running: RunningCluster, cluster: BookKeeperCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    # Each command asks any server of ZooKeeper, which may be behind the one that was asked before.
    running.wait_until_shown(lambda it: it["bookies"]["warning"] is None, what="all bookies can be written to")

    cluster.kill9(cluster.bookie_ids[0])

    running.wait_until_shown(
        lambda it: (
            len(it["bookies"]["writable"]) == 2 and "no bookie can be spared" in (it["bookies"]["warning"] or "")
        ),
        what="two bookies are left, and a warning",
    )
    eventually(
        lambda: "WARNING: no bookie can be spared" in running.command("status").stdout, what="the warning as text"
    )


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
