"""Runs the compensator as a process: the service, its status page, systemd notifications, signals."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial

from compensator.core.config import CompensatorConfig
from compensator.entry.composition import Parts
from compensator.entry.sd_notify import Notifier
from compensator.service.metrics import CompensatorMetrics
from compensator.service.service import CompensatorService
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError, StorageFailed
from outbox_core.messages.broker_port import WeaknessReporter
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.garbage_collection import freeze_what_stays
from outbox_core.runtime.reload_signal import ReloadSignal
from outbox_core.runtime.status_server import StatusServer
from outbox_core.runtime.stop_signals import StopSignals

logger: EventLogger = EventLogger(__name__)

INSPECT_EVERY_MS = 60_000


def serve(parts: Parts, config: CompensatorConfig, *, clock: Clock, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish the batches in progress; a second signal ends the process at once.

    Raises StorageFailed if they did not finish in time, ConfigurationError for a port that is in use.
    """
    metrics, notifier = parts.metrics, Notifier(os.environ)
    service = CompensatorService(
        parts.sources,
        gates=parts.gates,
        options=parts.options,
        metrics=metrics,
        assignment=parts.assignment,
        timers=parts.timers,
        clock=clock,
    )
    if notifier.watchdog_every_ms is not None:
        service.tasks.add("watchdog", lambda: _watch(service, notifier), every_ms=notifier.watchdog_every_ms)
    for index, broker in enumerate(parts.brokers):
        if isinstance(broker, WeaknessReporter):
            service.tasks.add(f"inspection-{index}", partial(_inspect, broker), every_ms=INSPECT_EVERY_MS)
    status = _status(service, metrics, config)
    freeze_what_stays()
    try:
        with ReloadSignal() as reloads, StopSignals() as signals:
            reloads.start(_refuse_reload)
            service.start()
            if status is not None:
                status.start()
            serving = f"{len(parts.sources)} source(s)"
            page = f", status on port {status.port}" if status else ""
            say(f"compensator runs, {serving}, a poll every {parts.options.pacing.interval_ms} ms{page}")
            notifier.ready(serving)
            signals.wait()
            signals.exit_at_next()
            notifier.stopping()
            logger.info("stopping", extra={"timeout_ms": parts.options.stop_timeout_ms})
            stopped = service.stop()
    finally:
        service.stop()
        if status is not None:
            status.stop()
    if not stopped:
        raise StorageFailed("the current pass did not end in time; its rows are sent again when their lease ends")


def _status(service: CompensatorService, metrics: CompensatorMetrics, config: CompensatorConfig) -> StatusServer | None:
    port = config.compensator.port
    if port is None:
        return None
    return StatusServer(service, registry=metrics.registry, host=config.compensator.host, port=port)


def _refuse_reload() -> None:
    logger.info("nothing_to_reload", extra={"hint": "restart it, and it reads its files again"})


def _inspect(broker: WeaknessReporter) -> None:
    """An outage is the circuit breaker's to report."""
    with contextlib.suppress(BrokerError):
        broker.report_weaknesses()


def _watch(service: CompensatorService, notifier: Notifier) -> None:
    if service.alive():
        notifier.watchdog()
