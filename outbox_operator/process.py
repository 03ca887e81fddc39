"""Runs the operator as a process: it waits for the lease, serves while it has it, and ends when it loses it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import kopf

from outbox_core.common.errors import ConfigurationError, OutboxError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.garbage_collection import freeze_what_stays
from outbox_core.runtime.status_server import StatusServer
from outbox_core.runtime.stop_signals import StopSignals
from outbox_operator.handlers import Pace, Rounds, login_with, register, settings
from outbox_operator.kubernetes_api import KubernetesApi, KubernetesRefused
from outbox_operator.leadership import LOST_AFTER_S, RENEW_EVERY_S, Leadership
from outbox_operator.metrics import OperatorMetrics
from outbox_operator.settings import OperatorTable

logger: EventLogger = EventLogger(__name__)

_STOP_SECONDS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorHealth:
    """Whether the API server answers, and who acts."""

    status: str
    leader: bool
    seconds_since_answer: float
    hint: str = ""

    @property
    def is_healthy(self) -> bool:
        """Whether the API server answers."""
        return self.status == "ok"

    def as_json(self) -> dict[str, Any]:
        """The body of a health page."""
        return asdict(self)


class OperatorService:
    """Holds the lease in one thread, and while it does looks after resources in another."""

    def __init__(self, api: KubernetesApi, table: OperatorTable, *, signals: StopSignals) -> None:
        self._api = api
        self._table = table
        self._signals = signals
        self.metrics = OperatorMetrics()
        self._leadership = Leadership(api, namespace=table.lease_namespace, monotonic_s=time.monotonic)
        self._stop = threading.Event()
        self._answered_s = time.monotonic()
        self.failure: OutboxError | None = None
        self._serving: threading.Thread | None = None
        self._leading = threading.Thread(target=self._lead, name="leadership", daemon=True)

    def start(self) -> None:
        """Begin to wait for the lease."""
        self._leading.start()

    def stop(self) -> None:
        """Stop looking after resources, and give the lease up."""
        self._stop.set()
        self._leading.join(_STOP_SECONDS_MAX)

    def alive(self) -> bool:
        """Whether its threads run."""
        return self._leading.is_alive() and (self._serving is None or self._serving.is_alive())

    def health(self) -> OperatorHealth:
        """Whether it can work."""
        silent_s = time.monotonic() - self._answered_s
        is_answered = silent_s < LOST_AFTER_S
        return OperatorHealth(
            status="ok" if is_answered and self.alive() else "fail",
            leader=self._serving is not None,
            seconds_since_answer=round(silent_s, 1),
            hint="" if is_answered else "the API server does not answer, or refuses the lease: see the log",
        )

    def _lead(self) -> None:
        try:
            while not self._stop.is_set():
                self._renew()
                if self._serving is not None and not self._serving.is_alive():
                    raise KubernetesRefused("the watch of resources ended: it is begun anew by a restart")
                self._stop.wait(RENEW_EVERY_S)
            if self._serving is not None:
                self._serving.join(_STOP_SECONDS_MAX)
                with suppress(KubernetesRefused):  # then it expires
                    self._leadership.release()
        except OutboxError as error:
            self.failure = error
            self._stop.set()
            self._signals.wake()

    def _renew(self) -> None:
        """Raises KubernetesRefused when the lease is lost: whoever has acted must not go on."""
        try:
            is_ours = self._leadership.hold()
            self._answered_s = time.monotonic()
        except KubernetesRefused as error:
            logger.warning("lease_not_renewed", extra={"error": str(error)})
            if self._serving is not None and time.monotonic() - self._answered_s > LOST_AFTER_S:
                raise
            return
        if is_ours and self._serving is None:
            logger.info("leading", extra={"identity": self._leadership.identity})
            self.metrics.set_leader(leads=True)
            self._serving = threading.Thread(target=self._serve, name="resources", daemon=True)
            self._serving.start()
        elif not is_ours and self._serving is not None:
            raise KubernetesRefused("another operator has taken the lease")

    def _serve(self) -> None:
        table, registry = self._table, kopf.OperatorRegistry()
        login_with(registry, self._api)
        pace = Pace(settled_s=table.interval / 1_000, busy_s=table.busy_interval / 1_000)
        register(registry, Rounds(self._api, self.metrics), pace)
        asyncio.run(
            kopf.operator(
                registry=registry,
                settings=settings(),
                standalone=True,
                clusterwide=not table.namespaces,
                namespaces=table.namespaces,
                stop_flag=self._stop,
            )
        )


def serve(table: OperatorTable) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigurationError if it cannot start, KubernetesRefused if it lost the
    lease.
    """
    api = KubernetesApi.connected(table.kubeconfig)
    try:
        api.check_definition()
    except KubernetesRefused as error:
        raise ConfigurationError(f"the cluster cannot be asked: {error}") from error
    with StopSignals() as signals:
        service = OperatorService(api, table, signals=signals)
        status = _status_page(service, table)
        freeze_what_stays()
        service.start()
        if status is not None:
            status.start()
            logger.info("status_page", extra={"port": status.port})
        try:
            signals.wait()
            signals.exit_at_next()
            logger.info("stopping")
        finally:
            service.stop()
            if status is not None:
                status.stop()
    if service.failure is not None:
        raise service.failure


def _status_page(service: OperatorService, table: OperatorTable) -> StatusServer | None:
    if table.port is None:
        return None
    return StatusServer(service, registry=service.metrics.registry, host=table.host, port=table.port)
