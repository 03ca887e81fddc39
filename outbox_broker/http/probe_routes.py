"""Routes of operation: probes, metrics and the OpenAPI document. Probes need no token, and then show no details."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from outbox_broker.http import content_negotiation, health_handlers
from outbox_broker.http.admission_limits import WorkClass
from outbox_broker.http.content_negotiation import Codec
from outbox_broker.http.openapi import document
from outbox_broker.http.request_context import Services
from outbox_broker.http.response import Response
from outbox_broker.http.routes import ROUTES
from outbox_core.protocol.wire import JSON_TYPE

Headers = Mapping[str, str]


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
    return _json(health_handlers.LIVE)


def _ready(services: Services, headers: Headers) -> Response:
    answer = health_handlers.readiness(services, in_detail=health_handlers.may_see_detail(services, headers))
    return _json(answer, status=200 if answer.status == "ok" else 503)


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


OPERATIONS: Final = (
    Operation(path="/livez", respond=_live),
    Operation(path="/readyz", respond=_ready),
    Operation(path="/healthz", respond=_ready),
    Operation(path="/metrics", respond=_metrics, check=health_handlers.check_may_scrape),
    Operation(path="/openapi.json", respond=_schema),
)
