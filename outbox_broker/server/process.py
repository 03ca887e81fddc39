"""Runs the broker's process from its configuration to exit code 0: address, engine, server, and shutdown in reverse."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from outbox_broker.config.announcement import announce, forget
from outbox_broker.config.credential_reload import reload_credentials
from outbox_broker.engine.engine import Engine
from outbox_broker.http.server import HttpServer, StorageWatch, bind
from outbox_broker.http.service_ports import ServicePorts
from outbox_core.runtime import logs
from outbox_core.runtime.build_info import build
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.garbage_collection import freeze_what_stays
from outbox_core.runtime.reload_signal import ReloadSignal

if TYPE_CHECKING:
    from outbox_broker.config.broker_config import BrokerConfig

logger: EventLogger = EventLogger(__name__)

_ENGINE_CLOSE_MS: Final = 10_000


def run(config: BrokerConfig) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads certificate and tokens. Raises ConfigurationError if it cannot
    start; StorageFailed, too, and if the storage failed for good.
    """
    chosen = config.log_format or logs.fitting_format(sys.stderr)
    logs.configure(format=chosen, level=config.log_level)
    with ReloadSignal() as reloads:
        _serve(config, reloads)
    logger.info("server_stopped")


def _serve(config: BrokerConfig, reloads: ReloadSignal) -> None:
    access, tls = config.access(), config.tls
    bound = bind(config.host, config.port)
    try:
        engine = Engine.open(config.data, options=config.engine_options)
        try:
            forget(config.ready_file)  # left behind by a killed server
            server = HttpServer(ServicePorts.of(engine), bound, settings=config.http_settings, access=access, tls=tls)
            reload_credentials(config, server.use, reloads=reloads)
            freeze_what_stays()
            with StorageWatch(engine.check_usable, stop=server.stop) as watch:
                server.run(on_ready=lambda url: _announce(url, engine, config), handle_signals=True)
            watch.raise_failure()
        finally:
            forget(config.ready_file)
            engine.close(timeout_ms=_ENGINE_CLOSE_MS)
    finally:
        bound.close()


def _log_what_was_opened(engine: Engine, config: BrokerConfig) -> None:
    figures = engine.log_figures()
    logger.info(
        "broker_opened",
        extra={
            "version": build().version, "folder": str(config.data), "durability": str(config.engine_options.durability),
            "topics": len(engine.admin.topics()), "messages_bytes": figures["messages_bytes"],
            "scheduled": figures["scheduled"], "quarantined_bytes": figures["quarantined_bytes"],
            "quarantined_scheduled": figures["quarantined_scheduled"],
        },
    )  # fmt: skip


def _announce(url: str, engine: Engine, config: BrokerConfig) -> None:
    """Report readiness, and log what was opened."""
    announce(url, config.ready_file, what="broker")
    _log_what_was_opened(engine, config)
