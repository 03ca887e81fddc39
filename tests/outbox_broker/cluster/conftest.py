"""One ZooKeeper for the tests of this folder, a cluster of its own for each, and nodes in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.cluster.cluster_admin import init_cluster
from outbox_broker.cluster.coordinator import Coordinator, CoordinatorOptions, Wakeup
from outbox_broker.cluster.ownership_lease import ShardPermit
from outbox_broker.cluster.shard_host import OpenedShard, ShardHost
from outbox_broker.cluster.znode_records import NodeRecord, ZnodeLayout
from outbox_broker.cluster.zookeeper_registry import ZooKeeperRegistry
from outbox_broker.log.annotations import FolderAnnotations
from outbox_broker.log.storage import DiskStorage
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.clock import SystemClock
from outbox_core.zookeeper.zookeeper_session import SessionOptions, ZooKeeperSession
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress
from tests.fixtures.zookeeper_server import ZooKeeper, running_zookeeper

__all__ = ["SHORT_SESSION_MS", "Cluster", "HostedShard", "InProcessNode", "cluster", "eventually", "running_zookeeper"]

SESSION_MS = 30_000
"""A pause of a second or two costs no node its lease, which is two thirds of it."""
SHORT_SESSION_MS = 3_000
"""For tests that wait until a node has lost it."""
BEAT_MS = 300
DRAIN_MS = 30_000
SECONDS_MAX = 300
_numbers = itertools.count()


def eventually(holds: Callable[[], Any], *, what: str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, f"not seen in time: {what}"
        time.sleep(0.005)


@dataclass(eq=False)
class HostedShard:
    """A shard that has its store open and does nothing."""

    opened: OpenedShard
    permit: ShardPermit
    hosted: int = 0
    failure: Exception | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def limit_memory(self, *, hosted: int) -> None:
        self.hosted = hosted

    def close(self) -> None:
        self.opened.close()


class InProcessNode:
    """A coordinator, a host and segments on folders that all nodes of a test share."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        hosts: str | None = None,
        session_ms: int = SESSION_MS,
        drain_ms: int = DRAIN_MS,
        **values: Any,
    ) -> None:
        """`drain_ms`: how long a stop waits for other nodes. `values`: of the node's record."""
        self.name = name
        self.opened: list[tuple[str, int]] = []
        self.open_failure: Callable[[str], Exception | None] = lambda _shard: None
        self._cluster = cluster
        wakeup = Wakeup()
        record = NodeRecord(
            name=name, url=f"http://{name}:1", peer_url=f"http://{name}:2", version="1", **values
        )  # fmt: skip
        address = ZooKeeperAddress(hosts=hosts or cluster.server.hosts, root=cluster.root)
        self.sessions: list[ZooKeeperSession] = []

        def connect() -> ZooKeeperSession:
            session = ZooKeeperSession(
                address, options=SessionOptions(session_ms=session_ms, request_ms_max=session_ms), changed=wakeup.set
            )
            self.sessions.append(session)
            return session

        self.registry = ZooKeeperRegistry(cluster.layout, connect=connect, record=record)
        self.host: ShardHost[HostedShard] = ShardHost(
            open_shard=self._open, run_shard=HostedShard, clock=SystemClock(), changed=wakeup.set
        )
        self.coordinator = Coordinator(
            registry=self.registry, host=self.host, record=record, clock=SystemClock(), wakeup=wakeup,
            options=CoordinatorOptions(
                beat_ms=BEAT_MS, open_failures_max=2, unable_ms=60_000, drain_ms_max=drain_ms
            ),
        )  # fmt: skip

    def serves(self) -> set[str]:
        """The shards that it serves and may act for."""
        return {shard for shard, one in self.host.serving().items() if one.permit.why_ended() is None}

    def _open(self, shard: str) -> OpenedShard:
        failure = self.open_failure(shard)
        if failure is not None:
            raise failure
        store = LocalSegments.open(self._cluster.folder / shard)
        self.opened.append((shard, store.epoch))
        annotations = FolderAnnotations(self._cluster.folder / shard, storage=DiskStorage())
        return OpenedShard(store=store, epoch=store.epoch, annotations=annotations, close=store.close)


class Cluster:
    """A root of its own on the tests' ZooKeeper, with nodes that end with the test."""

    def __init__(self, server: ZooKeeper, folder: Path, *, shards: int) -> None:
        self.server = server
        self.folder = folder
        self.root = f"/test/{next(_numbers)}"
        self.layout = ZnodeLayout(self.root)
        self.nodes: list[InProcessNode] = []
        self.session = ZooKeeperSession(
            ZooKeeperAddress(hosts=server.hosts, root=self.root),
            options=SessionOptions(session_ms=30_000, request_ms_max=60_000),
        )
        init_cluster(self.session, self.layout, shards=shards)

    def node(self, name: str, **values: Any) -> InProcessNode:
        """Start a node."""
        one = InProcessNode(self, name, **values)
        self.nodes.append(one)
        one.coordinator.start()
        return one

    def close(self) -> None:
        """End everything."""
        for one in self.nodes:
            one.coordinator.stop()
        self.session.close()


@pytest.fixture
def cluster(running_zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with eight shards."""
    one = Cluster(running_zookeeper, tmp_path, shards=8)
    yield one
    one.close()
