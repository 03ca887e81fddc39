"""Runs the process of a cluster's node: address, target, node, server, and shutdown in reverse, to exit code 0.

It serves clients while it hands its shards over, forwarding their requests to the new owners.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox_broker.cluster.cluster_settings import ClusterSettings, load_cluster_settings
from outbox_broker.cluster.coordinator import CoordinatorOptions
from outbox_broker.cluster.memory_budget import MemoryBudget
from outbox_broker.cluster.shard_openers import shard_storage
from outbox_broker.config.broker_config import load
from outbox_broker.config.node_server import serve_until_handed_over
from outbox_broker.delay_service.cluster_node import ClusterNode, NodeOptions
from outbox_broker.http.server import HttpServer, bind
from outbox_core import connect
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import is_loopback
from outbox_core.runtime import logs
from outbox_core.runtime.build_info import build
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.garbage_collection import freeze_what_stays
from outbox_core.runtime.reload_signal import ReloadSignal

if TYPE_CHECKING:
    import socket

    from outbox_broker.config.broker_config import BrokerConfig

logger: EventLogger = EventLogger(__name__)


def run_node(
    flags: Mapping[str, Any], *, cluster_flags: Mapping[str, Any], file: Path | None, target: tuple[str, str | None]
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads certificate and tokens. `target`: its URL and token. Raises
    ConfigurationError or CoordinatorUnavailable if it cannot start.
    """
    if flags.get("data") is not None:
        raise ConfigurationError("--data is for one process, --store for a node of a cluster: give one of the two")
    config = load({**flags, "data": Path()}, file=file)  # a node has no folder of its own
    settings = load_cluster_settings(cluster_flags, file=file)
    logs.configure(format=config.log_format or logs.fitting_format(sys.stderr), level=config.log_level)
    _check_peers(config, settings)
    with ReloadSignal() as reloads:
        _run(config, settings, target, reloads=reloads)
    logger.info("server_stopped")


def _run(
    config: BrokerConfig, settings: ClusterSettings, target: tuple[str, str | None], *, reloads: ReloadSignal
) -> None:
    url, token = target
    broker = connect(url, **({} if token is None else {"token": token}))
    bound = bind(config.host, config.port)
    try:
        options = _node_options(config, settings, bound)
        with shard_storage(settings) as storage:
            node = ClusterNode(options, open_shard=storage.open_shard, target=broker, room=storage.room)
            try:
                node.start()
                freeze_what_stays()
                server = HttpServer(
                    node.served(), bound, settings=config.http_settings, access=config.access(), tls=config.tls
                )  # fmt: skip
                serve_until_handed_over(
                    server, config, reloads=reloads, what="delay service", hand_over=node.close,
                    use_certificate=node.use_certificate,
                )  # fmt: skip
            finally:
                node.close()
    finally:
        bound.close()
        broker.close()


def _check_peers(config: BrokerConfig, settings: ClusterSettings) -> None:
    """Check what guards the traffic between nodes: their token, and the znodes in which they find each other."""
    if config.tokens is not None and settings.peer_token_file is None:
        raise ConfigurationError(
            "with --tokens the port for other nodes needs a token, too, or whoever is on this machine publishes and "
            "cancels there without one: give all nodes one peer_token_file in the table [cluster]"
        )
    if is_loopback(settings.peer_host):
        return
    if settings.peer_token_file is None:
        raise ConfigurationError(
            f"{settings.peer_host} can be reached by others: give all nodes one peer_token_file in the table [cluster]"
        )
    if settings.zookeeper_user is None and settings.zookeeper_certificate is None:
        logger.warning("zookeeper_without_login", extra={"cure": "set zookeeper_user and zookeeper_password_file"})


def _node_options(config: BrokerConfig, settings: ClusterSettings, bound: socket.socket) -> NodeOptions:
    port = bound.getsockname()[1]
    return NodeOptions(
        address=settings.address,
        name=settings.node_name(config.host, port),
        url=settings.url(config.host, port, is_tls=config.tls is not None),
        version=build().version,
        peer_host=settings.peer_host,
        peer_port=settings.peer_port,
        peer_token=settings.peer_token,
        zone=settings.zone,
        capacity=settings.capacity,
        session=settings.session,
        coordinator=CoordinatorOptions(beat_ms=settings.beat_ms, drain_ms_max=settings.drain_ms),
        budget=MemoryBudget(bytes_max=settings.memory_bytes),
        http=config.http_settings,
        tls=config.tls,
        ca_file=settings.peer_ca_file,
    )
