"""Routes of operation: probes, metrics and the OpenAPI document. Probes need no token, and tell strangers yes or no."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from broker.http import codec, health
from broker.http.call import Services
from broker.http.codec import Codec
from broker.http.openapi import document
from broker.http.response import Response
from broker.http.routes import ROUTES
from broker.http.work import Work
from messaging.wire import JSON_TYPE

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path, which is asked for by GET."""

    path: str
    respond: Callable[[Services, Headers], Response]
    check: Callable[[Services, Headers], None] | None = None
    """Raises Problem where the sender may not have it."""
    method: str = "GET"
    work: Work = Work.OPERATE


def _live(_services: Services, _headers: Headers) -> Response:
    return _json(health.LIVE)


def _ready(services: Services, headers: Headers) -> Response:
    answer = health.readiness(services, in_detail=health.may_see_detail(services, headers))
    return _json(answer, status=200 if answer.status == "ok" else 503)


def _metrics(services: Services, headers: Headers) -> Response:
    text, content_type = services.metrics.exposition(headers.get("accept", ""))
    return Response(text, content_type)


def _schema(_services: Services, _headers: Headers) -> Response:
    return Response(_document(), JSON_TYPE)


@lru_cache(maxsize=1)
def _document() -> bytes:
    return codec.encode(document(ROUTES), Codec.JSON)


def _json(answer: object, *, status: int = 200) -> Response:
    return Response(codec.encode(answer, Codec.JSON), JSON_TYPE, status)


OPERATIONS: Final = (
    Operation(path="/livez", respond=_live),
    Operation(path="/readyz", respond=_ready),
    Operation(path="/healthz", respond=_ready),
    Operation(path="/metrics", respond=_metrics, check=health.check_may_scrape),
    Operation(path="/openapi.json", respond=_schema),
)
