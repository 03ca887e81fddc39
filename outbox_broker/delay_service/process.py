"""Runs the delay service's process: address, schedule, target, server, and shutdown in reverse, to exit code 0."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from outbox_broker.backup.snapshot import FolderSnapshots
from outbox_broker.config.announcement import announce, forget
from outbox_broker.config.credential_reload import reload_credentials
from outbox_broker.delay_service.delay_proxy import DelayProxy
from outbox_broker.http.server import HttpServer, StorageWatch, bind
from outbox_broker.http.service_ports import ServicePorts
from outbox_broker.log.annotations import FolderAnnotations
from outbox_broker.log.cordon import Cordon
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.log.folder_format import note_format, refuse_other_format
from outbox_broker.log.folder_lock import refuse_nested
from outbox_broker.log.storage import DiskStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.segments.local import LocalSegments
from outbox_core import connect
from outbox_core.common.clock import SystemClock
from outbox_core.messages.broker_port import Broker
from outbox_core.runtime import logs
from outbox_core.runtime.build_info import build
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.garbage_collection import freeze_what_stays
from outbox_core.runtime.reload_signal import ReloadSignal

if TYPE_CHECKING:
    from outbox_broker.config.broker_config import BrokerConfig

logger: EventLogger = EventLogger(__name__)


def run(config: BrokerConfig, *, target_url: str, target_token: str | None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads certificate and tokens. Raises ConfigurationError if it cannot
    start; StorageFailed, too, and if the storage failed for good.

    The target is found by its URL's scheme: this package imports no adapter.
    """
    chosen = config.log_format or logs.fitting_format(sys.stderr)
    logs.configure(format=chosen, level=config.log_level, quiet=logs.QUIET_CLIENTS)
    with ReloadSignal() as reloads:
        access, tls = config.access(), config.tls
        target = connect(target_url, **({} if target_token is None else {"token": target_token}))
        bound = bind(config.host, config.port)
        try:
            with _RunningService(config, target) as service:
                server = HttpServer(service.served(), bound, settings=config.http_settings, access=access, tls=tls)
                reload_credentials(config, server.use, reloads=reloads)
                freeze_what_stays()
                with StorageWatch(service.check_usable, stop=server.stop) as watch:
                    server.run(on_ready=service.announce, handle_signals=True)
                watch.raise_failure()
        finally:
            bound.close()
            target.close()
    logger.info("server_stopped")


class _RunningService:
    """A proxy over an open folder, delivering; closed in reverse order."""

    def __init__(self, config: BrokerConfig, target: Broker) -> None:
        self._config = config
        self._target = target

    def __enter__(self) -> Self:
        forget(self._config.ready_file)
        syncs = TimedStorage(DiskStorage(), clock_s=time.perf_counter)
        refuse_nested(self._config.data)
        refuse_other_format(self._config.data)
        reserve = Reserve(self._config.data / "reserve", size_bytes=self._config.engine_options.reserve_bytes)
        self._store = LocalSegments.open(self._config.data, storage=syncs, reserve=reserve)
        try:
            note_format(self._config.data)  # it is asked again, now that nobody else can write
            self._schedule = DelayStore.open(self._store, reserve=reserve)
            reserve.take()
            cordon = Cordon(FolderAnnotations(self._config.data, storage=syncs), clock=SystemClock())
            cordon.load()
            snapshots = FolderSnapshots(
                self._config.data, clock=SystemClock(),
                locks=lambda: (self._schedule.standing_still(), self._store.standing_still()),
            )  # fmt: skip
            snapshots.remove_abandoned()
            self._proxy = DelayProxy(
                self._schedule, self._target, clock=SystemClock(), syncs=syncs, room=reserve, cordon=cordon,
                snapshots=snapshots,
            )  # fmt: skip
            self._proxy.start()
        except BaseException:
            self._store.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        forget(self._config.ready_file)
        try:
            self._proxy.close()
        finally:
            self._store.close()

    def served(self) -> ServicePorts:
        """Returns the ports for the server."""
        return self._proxy.served()

    def announce(self, url: str) -> None:
        """Report readiness, and log what was opened."""
        announce(url, self._config.ready_file, what="delay service")
        figures = self._schedule.queries.figures()
        logger.info(
            "delay_service_opened",
            extra={
                "version": build().version, "folder": str(self._config.data), "scheduled": figures["scheduled"],
                "quarantined_scheduled": figures["quarantined_messages"],
            },
        )  # fmt: skip

    def check_usable(self) -> None:
        """Raise StorageFailed if nothing can be made durable until the schedule is opened again."""
        self._schedule.check_ready()
