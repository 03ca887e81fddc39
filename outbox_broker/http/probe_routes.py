"""Routes of operation: probes, metrics and the OpenAPI document. Probes need no token, and then show no details.

`/livez` checks only the process; `/readyz` whether the broker can serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from outbox_broker.http import content_negotiation
from outbox_broker.http.access_control import Principal, Role, authorize
from outbox_broker.http.admission_limits import WorkClass
from outbox_broker.http.content_negotiation import Codec
from outbox_broker.http.openapi import document
from outbox_broker.http.request_context import Services
from outbox_broker.http.responses import Problem, Response
from outbox_broker.http.routes import ROUTES
from outbox_broker.http.service_ports import ServicePorts
from outbox_core.common.errors import OutboxError
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    JSON_TYPE,
    Check,
    HealthAnswer,
)
from outbox_core.runtime.build_info import build
from outbox_core.runtime.terminal_text import utc_text

Headers = Mapping[str, str]
LIVE: Final = HealthAnswer(status="ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path, for GET requests."""

    path: str
    respond: Callable[[Services, Headers], Response]
    check: Callable[[Services, Headers], None] | None = None
    """Raises Problem if the sender is not allowed."""
    method: str = "GET"
    work: WorkClass = WorkClass.OPERATE


def _live(_services: Services, _headers: Headers) -> Response:
    return _json(LIVE)


def _ready(services: Services, headers: Headers) -> Response:
    sender = _known_sender(services, headers)
    answer = readiness(services, in_detail=sender is not None and sender.allows(Role.READ, None))
    told = msgspec.structs.replace(
        answer,
        now_ms=services.clock.now_ms(),
        roles=[] if sender is None else sorted(sender.roles),
        version=None if sender is None else build().version or None,
    )
    return _json(told, status=200 if told.status == "ok" else 503)


def _metrics(services: Services, headers: Headers) -> Response:
    text, content_type = services.metrics.exposition(headers.get("accept", ""))
    return Response(text, content_type)


def _schema(_services: Services, _headers: Headers) -> Response:
    return Response(_document(), JSON_TYPE)


@lru_cache(maxsize=1)
def _document() -> bytes:
    return content_negotiation.encode(document(ROUTES), Codec.JSON)


def _json(answer: object, *, status: int = 200) -> Response:
    return Response(content_negotiation.encode(answer, Codec.JSON), JSON_TYPE, status)


def readiness(services: Services, *, in_detail: bool) -> HealthAnswer:
    """Check whether the server can serve; details are for authorised senders, if tokens are used."""
    served = services.served  # once: something else may be served by the next check
    checks = [_serving(services), _storage(served, in_detail=in_detail)]
    operations = served.operations
    cordon = None if operations is None else operations.cordon.note
    if cordon is not None:  # consumers must reach it all the same: so it is ready, and says what it does not take
        since = f"publishes are refused since {utc_text(cordon.since_ms)}"
        checks.append(Check(name="cordoned", status="ok", observed=since, hint="outbox broker uncordon"))
    status = "ok" if all(check.status == "ok" for check in checks) else "failed"
    if not in_detail:
        checks = [Check(name=check.name, status=check.status) for check in checks]
    return HealthAnswer(status=status, checks=checks)  # type: ignore[arg-type]  # one of the two words, as above


def _known_sender(services: Services, headers: Mapping[str, str]) -> Principal | None:
    """Returns the sender; None for one whose token is missing or unknown."""
    try:
        return services.access.principal(headers)
    except Problem:
        return None


def _serving(services: Services) -> Check:
    if services.stopping:
        return Check(
            name="serving", status="failed", observed="stopping", hint="wait for its restart, and look at its log"
        )
    return Check(name="serving", status="ok", observed="requests are taken")


def _storage(served: ServicePorts, *, in_detail: bool) -> Check:
    try:
        served.check_owner()
        served.measured.check_ready()
        if not in_detail:  # log_figures() visits every run of the schedule: too much for each probe
            return Check(name="storage", status="ok")
        figures = served.measured.log_figures()
    except OutboxError as error:
        return Check(name="storage", status="failed", observed="it takes nothing", hint=str(error))
    observed = f"{figures['messages_bytes']:,} bytes of messages, {figures['scheduled']:,} scheduled"
    if figures.get("publishes_refused"):  # consumers must reach it all the same: they free space
        observed += "; publishes are refused until there is room on the disk"
    return Check(name="storage", status="ok", observed=observed)


def check_may_scrape(services: Services, headers: Mapping[str, str]) -> None:
    """Raise Problem if the sender may not read the metrics of every topic."""
    principal = services.access.principal(headers)
    authorize(principal, Role.READ, None)
    if not principal.covers_all:
        raise Problem(ProblemKind.FORBIDDEN, "metrics are of all topics, and the token is limited to some")


OPERATIONS: Final = (
    Operation(path="/livez", respond=_live),
    Operation(path="/readyz", respond=_ready),
    Operation(path="/healthz", respond=_ready),
    Operation(path="/metrics", respond=_metrics, check=check_may_scrape),
    Operation(path="/openapi.json", respond=_schema),
)
