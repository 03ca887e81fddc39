"""A broker on BookKeeper as one of several processes: one owns its shard and serves, the others stand by."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox_broker.cluster.broker_shard import BrokerShard
from outbox_broker.cluster.cluster_admin import init_cluster
from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.cluster_settings import ClusterSettings, load_cluster_settings
from outbox_broker.cluster.coordinator import Coordinator, CoordinatorOptions, Wakeup
from outbox_broker.cluster.ownership_lease import ShardPermit
from outbox_broker.cluster.shard_host import OpenedShard, ShardHost
from outbox_broker.cluster.shard_names import BROKER_SHARD
from outbox_broker.cluster.shard_openers import ShardStorage, shard_storage
from outbox_broker.cluster.znode_records import ClusterKind, NodeRecord, ZnodeLayout
from outbox_broker.cluster.zookeeper_registry import ZooKeeperRegistry
from outbox_broker.common.engine_options import Durability
from outbox_broker.config.announcement import forget
from outbox_broker.config.broker_config import load
from outbox_broker.config.node_server import serve_until_handed_over
from outbox_broker.http.server import HttpServer, bind
from outbox_broker.http.service_ports import ServicePorts, StandByMeasures
from outbox_broker.log.storage import DiskStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime import logs
from outbox_core.runtime.build_info import build
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.garbage_collection import freeze_what_stays
from outbox_core.runtime.reload_signal import ReloadSignal
from outbox_core.zookeeper.zookeeper_session import ZooKeeperSession

if TYPE_CHECKING:
    import socket

    from outbox_broker.config.broker_config import BrokerConfig

logger: EventLogger = EventLogger(__name__)


def run_node(flags: Mapping[str, Any], *, cluster_flags: Mapping[str, Any], file: Path | None) -> None:
    """Serve, or stand by, until SIGTERM or SIGINT; SIGHUP reloads certificate and tokens. Raises ConfigurationError or
    CoordinatorUnavailable if it cannot start.
    """
    if flags.get("data") is not None:
        raise ConfigurationError("--data is for a broker in a folder, --store for one on BookKeeper: give one of them")
    config = load({**flags, "data": Path()}, file=file)  # a node has no folder of its own
    if config.engine_options.durability is not Durability.FSYNC:
        raise ConfigurationError("durability is for a broker in a folder: bookies sync what they acknowledge")
    settings = load_cluster_settings(cluster_flags, file=file)
    logs.configure(format=config.log_format or logs.fitting_format(sys.stderr), level=config.log_level)
    with ReloadSignal() as reloads:
        _serve(config, settings, reloads)
    logger.info("server_stopped")


def _serve(config: BrokerConfig, settings: ClusterSettings, reloads: ReloadSignal) -> None:
    access, tls = config.access(), config.tls
    bound = bind(config.host, config.port)
    try:
        forget(config.ready_file)
        with closing(ZooKeeperSession(settings.address, options=settings.session)) as session:
            init_cluster(session, ZnodeLayout(settings.address.root), shards=1, kind=ClusterKind.BROKER)
        with shard_storage(settings) as storage:
            node = BrokerNode(config, settings, storage, record=_record(config, settings, bound))
            server = HttpServer(node.served(), bound, settings=config.http_settings, access=access, tls=tls)
            node.serve_by(server)
            try:
                node.coordinator.start()
                freeze_what_stays()
                serve_until_handed_over(server, config, reloads=reloads, what="broker", hand_over=node.coordinator.stop)
            finally:
                node.coordinator.stop()
    finally:
        forget(config.ready_file)
        bound.close()


def _record(config: BrokerConfig, settings: ClusterSettings, bound: socket.socket) -> NodeRecord:
    port, is_tls = bound.getsockname()[1], config.tls is not None
    url = settings.url(config.host, port, is_tls=is_tls)
    return NodeRecord(
        name=settings.node_name(config.host, port), url=url, peer_url=url, version=build().version,
        zone=settings.zone, capacity=settings.capacity,
    )  # fmt: skip


class BrokerNode:
    """What one process does with the broker's shard: `coordinator` says whether it owns it, and the server serves the
    engine while it does.
    """

    def __init__(
        self, config: BrokerConfig, settings: ClusterSettings, storage: ShardStorage, *, record: NodeRecord
    ) -> None:
        self._options = config.engine_options
        self._room = storage.room
        self._serving = threading.Lock()
        """Held while what the server serves is changed, for the order of changes."""
        self._server: HttpServer | None = None
        self._served: BrokerShard | None = None
        self._stand_by = ServicePorts(
            measured=StandByMeasures(TimedStorage(DiskStorage(), clock_s=time.perf_counter)),
            check_owner=self._refuse,
        )  # fmt: skip
        wakeup = Wakeup()

        def changed() -> None:
            self._serve_what_runs()
            wakeup.set()

        self._host: ShardHost[BrokerShard] = ShardHost(
            open_shard=storage.open_shard, run_shard=self._run_shard, clock=SystemClock(), changed=changed
        )
        self._registry = ZooKeeperRegistry(
            ZnodeLayout(settings.address.root),
            connect=lambda: ZooKeeperSession(settings.address, options=settings.session, changed=wakeup.set),
            record=record, kind=ClusterKind.BROKER,
        )  # fmt: skip
        self.coordinator = Coordinator(
            registry=self._registry, host=self._host, record=record, clock=SystemClock(), wakeup=wakeup,
            options=CoordinatorOptions(beat_ms=settings.beat_ms, drain_ms_max=settings.drain_ms),
            why_refusing=None if self._room is None else self._room.why_none,
        )  # fmt: skip

    def served(self) -> ServicePorts:
        """Returns what is served now."""
        running = self._host.serving().get(BROKER_SHARD)
        return self._stand_by if running is None else running.served()

    def serve_by(self, server: HttpServer) -> None:
        """Have this server serve the engine while there is one. Called before the coordinator is started."""
        self._server = server

    def _serve_what_runs(self) -> None:
        with self._serving:
            running = self._host.serving().get(BROKER_SHARD)
            if running is self._served or self._server is None:
                return
            self._served = running
            self._server.serve(self._stand_by if running is None else running.served())

    def _run_shard(self, opened: OpenedShard, permit: ShardPermit) -> BrokerShard:
        return BrokerShard.start(
            opened, permit, clock=self._registry.clock, options=self._options, room=self._room
        )  # fmt: skip

    def _refuse(self) -> None:
        """Raise NotOwner, with who serves the broker; CoordinatorUnavailable."""
        is_mine, owner = self.coordinator.owner_of(BROKER_SHARD)
        if is_mine:
            report = self._host.reports().get(BROKER_SHARD)
            why = "" if report is None or report.reason is None else f": {report.reason}"
            raise NotOwner(f"this node is opening the broker{why}; repeat the request")
        raise NotOwner(f"this node stands by: node {owner.name} at {owner.url} serves the broker")
