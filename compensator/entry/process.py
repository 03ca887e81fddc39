"""The compensator as a process: a service, its status page, systemd and the signals, from start to exit."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

from compensator.core.config import CompensatorConfig
from compensator.entry.sd_notify import Notifier
from compensator.entry.status_server import StatusServer
from compensator.entry.wiring import Parts
from compensator.service.metrics import CompensatorMetrics
from compensator.service.service import CompensatorService
from outbox_core.common.clock import Clock
from outbox_core.common.errors import StorageFailed

logger = logging.getLogger(__name__)

EXIT_BY_SIGNAL = 128


def serve(parts: Parts, config: CompensatorConfig, *, clock: Clock, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then end what is in hand; a second signal ends the process at once.

    Raises StorageFailed where what was in hand did not end in time, ConfigurationError for a port that is taken.
    """
    told = _signals()
    metrics, notifier = parts.metrics, Notifier(os.environ)
    service = CompensatorService(
        parts.sources,
        gates=parts.gates,
        options=parts.options,
        metrics=metrics,
        assignment=parts.assignment,
        clock=clock,
    )
    if notifier.watchdog_every_ms is not None:
        service.chores.add("watchdog", lambda: _watch(service, notifier), every_ms=notifier.watchdog_every_ms)
    status = _status(service, metrics, config)
    try:
        service.start()
        if status is not None:
            status.start()
        serving = f"{len(parts.sources)} source(s)"
        page = f", status on port {status.port}" if status else ""
        say(f"compensator runs, {serving}, a look every {parts.options.pacing.interval_ms} ms{page}")
        notifier.ready(serving)
        told.wait()
        notifier.stopping()
        logger.info("stopping", extra={"timeout_ms": parts.options.stop_timeout_ms})
        stopped = service.stop()
    finally:
        service.stop()
        if status is not None:
            status.stop()
    if not stopped:
        raise StorageFailed("the turn in hand did not end in time; its rows are sent again when their lease ends")


def _status(service: CompensatorService, metrics: CompensatorMetrics, config: CompensatorConfig) -> StatusServer | None:
    port = config.compensator.port
    if port is None:
        return None
    return StatusServer(service, registry=metrics.registry, host=config.compensator.host, port=port)


def _watch(service: CompensatorService, notifier: Notifier) -> None:
    if service.alive():
        notifier.watchdog()


def _signals() -> threading.Event:
    """Set by the first SIGTERM or SIGINT; the second one ends the process. Unsent rows are safe in their tables."""
    told = threading.Event()

    def tell(number: int, _frame: object) -> None:
        if told.is_set():
            os._exit(EXIT_BY_SIGNAL + number)
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    return told
