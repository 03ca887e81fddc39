"""What kopf calls: a daemon for each resource that is there, and a handler for each that is deleted. Both only look."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import kopf

from outbox_core.common.errors import OutboxError
from outbox_core.runtime.event_logger import EventLogger
from outbox_operator.broker import ConditionType
from outbox_operator.kubernetes_api import KubernetesApi
from outbox_operator.metrics import OperatorMetrics
from outbox_operator.reconciliation import Reconciliation, RoundOutcome
from outbox_operator.resource import GROUP, MANAGER, PLURAL, VERSION

logger: EventLogger = EventLogger(__name__)

THREADS_MAX: Final = 32
"""Resources that are looked at at once: a broker that does not answer holds a thread for seconds."""
FINALIZER: Final = f"{GROUP}/drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two looks."""

    settled_s: float
    busy_s: float


class Rounds:
    """Looks at resources in threads, one at a time at each. For one event loop."""

    def __init__(self, api: KubernetesApi, metrics: OperatorMetrics) -> None:
        self._reconciliation = Reconciliation(api)
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="rounds")

    async def look(self, *, namespace: str | None, name: str, body: kopf.Body, memo: kopf.Memo) -> RoundOutcome:
        """Look at a resource once; what fails is logged, and left to the next look."""
        async with memo.setdefault("lock", asyncio.Lock()):
            loop = asyncio.get_running_loop()
            try:
                outcome = await loop.run_in_executor(self._threads, self._reconciliation.run, namespace or "", name)
            except OutboxError as error:
                self._metrics.record_round(done=False)
                logger.warning("round_failed", extra={"namespace": namespace, "broker": name, "error": str(error)})
                return RoundOutcome(settled=False, released=False)
            except Exception:  # the boundary of a thread: a defect with one resource must not end the care for others
                self._metrics.record_round(done=False)
                logger.exception("round_failed", extra={"namespace": namespace, "broker": name})
                return RoundOutcome(settled=False, released=False)
        self._metrics.record_round(done=True)
        for condition in outcome.changed:
            is_degraded = condition.type is ConditionType.DEGRADED and condition.status
            kind = "Warning" if is_degraded else "Normal"
            text = condition.message or f"{condition.type} is {condition.status}"
            kopf.event(body, type=kind, reason=condition.reason, message=text)
        return outcome


def register(registry: kopf.OperatorRegistry, rounds: Rounds, pace: Pace) -> None:
    """Add the handlers to a registry."""
    resource: dict[str, Any] = {"group": GROUP, "version": VERSION, "plural": PLURAL, "registry": registry}

    @kopf.on.event(**resource)
    async def note(*, meta: kopf.Meta, memo: kopf.Memo, **_: Any) -> None:
        """Have the daemon look at once at what a user changed, and not at what it has itself written."""
        asked = (meta.get("generation"), meta.deletion_timestamp)
        if memo.get("asked") != asked:
            memo["asked"] = asked
            memo.setdefault("changed", asyncio.Event()).set()

    @kopf.daemon(**resource, id="keep", cancellation_timeout=pace.settled_s)
    async def keep(
        *, stopped: kopf.DaemonStopped, namespace: str | None, name: str, body: kopf.Body, memo: kopf.Memo, **_: Any
    ) -> None:
        changed: asyncio.Event = memo.setdefault("changed", asyncio.Event())
        while not stopped:
            changed.clear()
            outcome = await rounds.look(namespace=namespace, name=name, body=body, memo=memo)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), pace.settled_s if outcome.settled else pace.busy_s)

    @kopf.on.delete(**resource, id="end")
    async def end(*, namespace: str | None, name: str, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
        outcome = await rounds.look(namespace=namespace, name=name, body=body, memo=memo)
        if not outcome.released:
            raise kopf.TemporaryError("it has not ended yet", delay=pace.busy_s)


def settings() -> kopf.OperatorSettings:
    """The framework's settings."""
    chosen = kopf.OperatorSettings()
    chosen.persistence.finalizer = FINALIZER
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    chosen.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    chosen.posting.reporting_component = MANAGER
    chosen.scanning.disabled = True  # it may not list definitions and namespaces, and need not
    return chosen


def login_with(registry: kopf.OperatorRegistry, api: KubernetesApi) -> None:
    """Have kopf log in as the client does."""

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        known = api.client.configuration
        scheme, separator, token = (known.get_api_key_with_prefix("BearerToken") or "").rpartition(" ")
        return kopf.ConnectionInfo(
            server=known.host, ca_path=known.ssl_ca_cert, insecure=not known.verify_ssl,
            username=known.username or None, password=known.password or None, scheme=scheme if separator else None,
            token=token or None,
            certificate_path=known.cert_file, private_key_path=known.key_file,
        )  # fmt: skip
