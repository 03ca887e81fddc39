"""What a node has counted never goes back: a shard that leaves it takes nothing of its counters along."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from outbox_broker.cluster.memory_budget import MemoryBudget
from outbox_broker.cluster.ownership_lease import OwnershipLease, ShardPermit
from outbox_broker.cluster.shard_host import OpenedShard
from outbox_broker.delay_service.cluster_shard import ClusterShard
from outbox_broker.delay_service.node_totals import NodeTotals
from outbox_broker.log.annotations import FolderAnnotations
from outbox_broker.log.storage import DiskStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.clock import SystemClock
from outbox_core.messages.message import Message
from tests.outbox_broker.polling import until

SHARD = "0-0000"


class Node:
    """One that opens and closes a shard on files, in front of a broker."""

    def __init__(self, folder: Path, target: EmbeddedBroker) -> None:
        self._folder = folder
        self._target = target
        self.totals = NodeTotals()

    def open(self) -> ClusterShard:
        """Open the shard, which delivers from then on."""
        store = LocalSegments.open(self._folder)
        annotations = FolderAnnotations(self._folder, storage=DiskStorage())
        lease = OwnershipLease(session_timeout_ms=3_600_000)
        lease.extend(lease.now_ms())
        return ClusterShard.start(
            OpenedShard(store=store, epoch=1, annotations=annotations, close=store.close),
            ShardPermit(SHARD, lease, epoch=1),
            target=self._target, clock=SystemClock(), syncs=TimedStorage(DiskStorage(), clock_s=time.perf_counter),
            budget=MemoryBudget(), totals=self.totals, shards=1,
        )  # fmt: skip

    def shown(self) -> tuple[int, int, int]:
        """Messages stored, passed on, and in the histogram of lateness."""
        counters = self.totals.counters()
        stored, fired = (counters.get((what, "t", ""), 0) for what in ("published_stored", "fired"))
        return stored, fired, sum(count for _, count in self.totals.lateness().counts())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with closing(EmbeddedBroker(f"embedded:{tmp_path / 'target'}")) as target:
        yield Node(tmp_path / "shard", target)


def test_the_counters_of_a_shard_stay_when_it_leaves_and_go_on_when_it_is_back(node: Node) -> None:
    shown = [node.shown()]
    for number in range(2):
        shard = node.open()
        shard.service.publish([Message(id=f"m{number}", topic="t", body=b"")])
        until(lambda before=shown[-1]: node.shown() > before and len(set(node.shown())) == 1)
        shown.append(node.shown())
        shard.close()
        shown.append(node.shown())

    assert shown == [(0, 0, 0), (1, 1, 1), (1, 1, 1), (2, 2, 2), (2, 2, 2)]
