"""A node of a delay cluster: its coordinator and shards, the server for its peers, and what its own server serves."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outbox_broker.cluster.bookie_room import BookieRoom
from outbox_broker.cluster.coordinator import Coordinator, CoordinatorOptions, Wakeup
from outbox_broker.cluster.memory_budget import MemoryBudget
from outbox_broker.cluster.owned_shard_operations import OwnedShardOperations
from outbox_broker.cluster.ownership_lease import ShardPermit
from outbox_broker.cluster.peer_client import PeerClient, PeerOptions
from outbox_broker.cluster.peer_protocol import peer_routes
from outbox_broker.cluster.request_router import RequestRouter
from outbox_broker.cluster.shard_host import OpenedShard, OpenShard, ShardHost
from outbox_broker.cluster.znode_records import NodeRecord, ZnodeLayout
from outbox_broker.cluster.zookeeper_registry import ZooKeeperRegistry
from outbox_broker.delay_service.cluster_shard import ClusterShard
from outbox_broker.delay_service.delay_proxy import has_room
from outbox_broker.delay_service.node_totals import NodeTotals
from outbox_broker.http.access_control import Access, Principal, Role
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer, Tls, bind
from outbox_broker.http.server_certificate import ServerCertificate
from outbox_broker.http.service_ports import ServicePorts
from outbox_broker.log.storage import DiskStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.lateness import Lateness
from outbox_core.common.clock import SystemClock
from outbox_core.messages.publish_guard import PublishTarget
from outbox_core.zookeeper.zookeeper_session import SessionOptions, ZooKeeperSession
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """One node of a cluster."""

    address: ZooKeeperAddress
    name: str
    url: str
    """Where clients reach this node."""
    version: str
    peer_host: str = "127.0.0.1"
    """The address on which this node listens for the others, and under which they reach it."""
    peer_port: int = 0
    peer_token: str | None = None
    zone: str | None = None
    capacity: int | None = None
    session: SessionOptions = field(default_factory=SessionOptions)
    coordinator: CoordinatorOptions = field(default_factory=CoordinatorOptions)
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    http: HttpSettings = field(default_factory=HttpSettings)
    tls: Tls | None = None
    ca_file: Path | None = None


class ClusterNode:
    """start() joins the cluster, close() hands the shards over and leaves. It has nothing on a disk of its own."""

    def __init__(
        self, options: NodeOptions, *, open_shard: OpenShard, target: PublishTarget, room: BookieRoom | None = None
    ) -> None:
        """Bind the address for other nodes. `room`: publishes are refused while it has none. Raises
        ConfigurationError.
        """
        self._options = options
        self._target = target
        self._room = room
        self._syncs = TimedStorage(DiskStorage(), clock_s=time.perf_counter)
        self._totals = NodeTotals()
        self._bound = bind(options.peer_host, options.peer_port)
        clock, wakeup = SystemClock(), Wakeup()
        record = self._record()
        self._registry = ZooKeeperRegistry(
            ZnodeLayout(options.address.root),
            connect=lambda: ZooKeeperSession(options.address, options=options.session, changed=wakeup.set),
            record=record,
        )
        self._host: ShardHost[ClusterShard] = ShardHost(
            open_shard=open_shard, run_shard=self._run_shard, clock=clock, changed=wakeup.set
        )
        self.coordinator = Coordinator(
            registry=self._registry, host=self._host, record=record, clock=clock, wakeup=wakeup,
            options=options.coordinator, why_refusing=None if room is None else room.why_none,
        )  # fmt: skip
        local = OwnedShardOperations(self._host.get)
        peers = PeerClient(
            PeerOptions(token=options.peer_token, tls=options.tls is not None, ca_file=options.ca_file)
        )  # fmt: skip
        self._router = RequestRouter(coordinator=self.coordinator, local=local, peers=peers)
        self._peer_server = HttpServer(
            self.served(), self._bound, settings=options.http, access=_peer_access(options), tls=options.tls,
            routes=peer_routes(local),
        )  # fmt: skip
        self._peer_thread = threading.Thread(target=self._peer_server.run, name="peer-server", daemon=True)

    def start(self) -> None:
        """Serve other nodes and join the cluster. Raises ConfigurationError or CoordinatorUnavailable; close() then."""
        self._peer_thread.start()
        self.coordinator.start()

    def close(self) -> None:
        """Hand the shards over, answering peers and clients meanwhile, then stop. Idempotent."""
        self.coordinator.stop()
        self._peer_server.stop()
        if self._peer_thread.is_alive():
            self._peer_thread.join(self._options.http.shutdown_timeout_ms / 1000)
        self._bound.close()
        self._router.close()

    def use_certificate(self, certificate: ServerCertificate | None) -> None:
        """Show other nodes this certificate from now on; see HttpServer.use."""
        self._peer_server.use(_peer_access(self._options), certificate)

    def served(self) -> ServicePorts:
        """Returns the ports for the server that clients use."""
        measures = NodeMeasures(
            self._host, self.coordinator, syncs=self._syncs, totals=self._totals, room=self._room
        )  # fmt: skip
        return ServicePorts(
            producers=self._router, catalog=self._router, measured=measures, refusals=self._router,
            refusal="a delay service only publishes: consume from its target broker, and operate on it",
        )  # fmt: skip

    def _record(self) -> NodeRecord:
        options = self._options
        scheme = "http" if options.tls is None else "https"
        return NodeRecord(
            name=options.name, url=options.url, version=options.version, zone=options.zone, capacity=options.capacity,
            peer_url=f"{scheme}://{options.peer_host}:{self._bound.getsockname()[1]}",
        )  # fmt: skip

    def _run_shard(self, opened: OpenedShard, permit: ShardPermit) -> ClusterShard:
        return ClusterShard.start(
            opened, permit, target=self._target, clock=self._registry.clock, syncs=self._syncs, room=self._room,
            budget=self._options.budget, totals=self._totals, shards=len(self.coordinator.shards().names()),
        )  # fmt: skip


class NodeMeasures:
    """Probes and metrics of one node: its own shards, and whether it may act for them."""

    def __init__(
        self,
        host: ShardHost[ClusterShard],
        coordinator: Coordinator,
        *,
        syncs: TimedStorage,
        totals: NodeTotals,
        room: BookieRoom | None,
    ) -> None:
        self._host = host
        self._coordinator = coordinator
        self._totals = totals
        self._room = room
        self.syncs = syncs

    @property
    def lateness(self) -> Lateness:
        """The histogram of how late messages reached the target, since the node's start."""
        return self._totals.lateness()

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Returns totals of the shards that this node has or had, since the node's start."""
        return self._totals.counters()

    def due_within(self, spans_ms: Sequence[int]) -> list[int]:
        """Returns how many messages of this node's shards are due within each ascending span; and last, the total."""
        parts = [shard.service.due_within(spans_ms) for shard in self._shards()]
        return [sum(part[at] for part in parts) for at in range(len(spans_ms) + 1)]

    def log_figures(self) -> Mapping[str, int]:
        """Returns the sums over this node's shards, of what is overdue the longest; and the node's own figures."""
        total: Counter[str] = Counter(
            messages_bytes=0, actions_bytes=0, scheduled=0, quarantined_runs=0, quarantined_scheduled=0
        )
        shards = [shard.service.schedule_figures() for shard in self._shards()]
        for figures in shards:
            total.update(figures)
        return {
            **total,
            "overdue_ms": max((figures["overdue_ms"] for figures in shards), default=0),
            "syncs": sum(count for _, count in self.syncs.counts()),
            "publishes_refused": 0 if has_room(self._room) else 1,
        }

    def check_ready(self) -> None:
        """Raise CoordinatorUnavailable if this node may not act for any shard now; StorageFailed if it refuses
        publishes because the bookies are full: what is scheduled is sent then, and can be canceled.
        """
        self._coordinator.check()
        if self._room is not None:
            self._room.check_room()

    def _shards(self) -> list[ClusterShard]:
        return list(self._host.serving().values())


def _peer_access(options: NodeOptions) -> Access:
    if options.peer_token is None:
        return Access(loopback_hosts_only=True)
    principal = Principal(name="peer", roles=frozenset(Role), topics=("*",))
    return Access(tokens={hashlib.sha256(options.peer_token.encode()).digest(): principal})
