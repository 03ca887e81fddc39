"""The ASGI application: from a request to a Call, to a handler in a worker thread, to the answer. No routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from time import perf_counter
from typing import Final
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from broker.engine import Engine
from broker.http import codec, deliveries, health
from broker.http.access import Access, authorize
from broker.http.call import Call, Services
from broker.http.codec import Codec
from broker.http.direct import DIRECT, BrokerApp, Endpoint
from broker.http.gate import Gate
from broker.http.long_poll import LongPolls, Taken
from broker.http.metrics import Metrics
from broker.http.openapi import document
from broker.http.problems import Problem, of_error
from broker.http.routes import ROUTES, Route, Work
from broker.http.settings import HttpSettings
from messaging.clock import Clock, SystemClock
from messaging.errors import InvalidMessage, OutboxError
from messaging.message import check_group, check_topic
from messaging.problem import ProblemKind
from messaging.wire import (
    JSON_TYPE,
    PullRequest,
)

logger = logging.getLogger(__name__)

_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def create_app(
    engine: Engine, settings: HttpSettings | None = None, *, access: Access | None = None, clock: Clock | None = None
) -> FastAPI:
    """The HTTP face of an open engine, which stays its caller's to close. `app.state.services` are its parts."""
    services = _services(engine, settings or HttpSettings(), access=access or Access(), clock=clock or SystemClock())
    app = BrokerApp(title="Outbox MQ broker", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.services = services
    for path in {route.path: None for route in ROUTES}:
        by_method = {route.method: route for route in ROUTES if route.path == path}
        endpoint = _endpoint(services, path, by_method)
        app.add_route(path, endpoint, methods=list(by_method))
        if (last := path.rpartition("/")[2]) in DIRECT:
            app.direct[last] = endpoint
    _add_operations(app, services)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_middleware(RawPath)
    return app


class RawPath:
    """Routes by the path as it was sent, so that `..%2Fx` is one odd name and not two parts of a path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope.get("raw_path"):
            scope = {**scope, "path": scope["raw_path"].decode("latin-1")}
        await self._app(scope, receive, send)


def close(services: Services) -> None:
    """Let the worker threads end; what they work on is finished first. Idempotent."""
    for pool in (services.publish_pool, services.settle_pool, services.pull_pool):
        pool.shutdown(wait=False, cancel_futures=True)


def _services(engine: Engine, settings: HttpSettings, *, access: Access, clock: Clock) -> Services:
    def gate(name: str, requests_max: int, bytes_max: int | None = None) -> Gate:
        return Gate(
            name=name,
            requests_max=requests_max,
            bytes_max=bytes_max,
            retry_after_ms=settings.throttled_retry_after_ms,
        )

    return Services(
        engine=engine,
        settings=settings,
        clock=clock,
        access=access,
        metrics=Metrics(engine, series_max=settings.metric_series_max),
        polls=LongPolls(engine.subscribe),
        publishes=gate("publishes", settings.publishes_max, settings.publishes_bytes_max),
        requests=gate("requests", settings.requests_max),
        pulls=gate("waiting_pulls", settings.waiting_pulls_max),
        publish_pool=ThreadPoolExecutor(settings.publish_threads, "broker-publish"),
        settle_pool=ThreadPoolExecutor(settings.settle_threads, "broker-settle"),
        pull_pool=ThreadPoolExecutor(settings.pull_threads, "broker-pull"),
    )


def _endpoint(services: Services, path: str, by_method: dict[str, Route]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        route = by_method.get(request.method)
        if route is None:  # HEAD, which Starlette adds wherever there is a GET
            route = by_method["GET"]
        start = perf_counter()
        response = await _answer(services, route, request)
        waited = route.work is Work.PULL
        services.metrics.count_request(
            route.method, path, status=response.status_code, seconds=None if waited else perf_counter() - start
        )
        return response

    return endpoint


async def _answer(services: Services, route: Route, request: Request) -> Response:
    """The one boundary of a request: every error becomes its answer here."""
    try:
        return await _serve(services, route, request)
    except Problem as problem:
        return problem.response()
    except OutboxError as error:
        logger.info("request_failed", extra={"route": route.path, "error": str(error)})
        return of_error(error, storage_retry_after_ms=services.settings.storage_retry_after_ms).response()
    except ClientDisconnect:
        return Response(status_code=499)
    except Exception:
        services.metrics.count_failure()
        logger.exception("request_met_a_defect", extra={"route": route.path})
        return Problem(ProblemKind.INTERNAL, "the broker met a defect of its own; its log says which").response()


async def _serve(services: Services, route: Route, request: Request) -> Response:
    headers, names = request.headers, request.path_params
    services.access.check_origin(request.method, headers)
    principal = services.access.principal(headers)
    topic, group = _topic(names.get("topic")), _group(names.get("group"))
    authorize(principal, route.role, topic or None)
    body_codec = Codec.JSON
    if route.body is not None and not (route.body_optional and headers.get("content-length", "0") == "0"):
        body_codec = codec.request_codec(headers.get("content-type"))
    answer_codec = codec.answer_codec(headers.get("accept"), default=body_codec)
    with _admitted(services, route, request):
        body = await _read(request, services.settings) if route.body is not None else b""
        query = dict(request.query_params) if request.scope["query_string"] else {}
        call = Call(
            services=services, principal=principal, topic=topic, group=group, item=unquote(names.get("id", "")),
            query=query, body=body, body_codec=body_codec, answer_codec=answer_codec,
        )  # fmt: skip
        answer = await (_pull(call, request) if route.work is Work.PULL else _work(call, route))
    return Response(answer, 200, _HEADERS, media_type=answer_codec.value)


async def _work(call: Call, route: Route) -> bytes:
    services = call.services
    pool = services.publish_pool if route.work is Work.PUBLISH else services.settle_pool
    handler = route.handler
    if handler is None:
        raise TypeError(f"{route.path} has no handler")
    return await asyncio.get_running_loop().run_in_executor(
        pool, lambda: codec.encode(handler(call), call.answer_codec)
    )


async def _pull(call: Call, request: Request) -> bytes:
    """Pull at once, then wait in line. To a client that has gone nothing is handed out, as far as can be known."""
    services, wanted = call.services, call.read(PullRequest)
    loop = asyncio.get_running_loop()

    async def take() -> Taken | None:
        return await loop.run_in_executor(services.pull_pool, deliveries.take, call, wanted)

    deadline = loop.time() + wanted.wait_ms / 1000
    gone = asyncio.create_task(_gone(request))
    try:
        taken = await take()
        if taken is None and wanted.wait_ms and not gone.done():
            with services.metrics.waiting.track_inprogress():
                taken = await services.polls.wait(
                    call.topic, call.group, take=take, timeout_s=max(0.0, deadline - loop.time()), gone=gone
                )
        if taken is not None and gone.done():
            await loop.run_in_executor(services.pull_pool, deliveries.give_back, call, taken.receipts)
            raise ClientDisconnect
    finally:
        gone.cancel()
    return deliveries.no_deliveries(call) if taken is None else taken.answer


async def _gone(request: Request) -> None:
    """Ends when the client closes its connection. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextmanager
def _admitted(services: Services, route: Route, request: Request) -> Iterator[None]:
    """Inside the bound that the route's work falls under; a body is counted before any of it is read."""
    match route.work:
        case Work.PUBLISH:
            size_bytes = _declared_bytes(request, services.settings)
            with services.publishes.entered(size_bytes):
                yield
        case Work.SETTLE:
            with services.requests.entered():
                yield
        case Work.PULL:
            with services.pulls.entered():
                yield


def _declared_bytes(request: Request, settings: HttpSettings) -> int:
    """The body's size as its head tells it; one that does not tell counts as the largest."""
    length = request.headers.get("content-length")
    return min(int(length), settings.request_bytes_max) if length and length.isdigit() else settings.request_bytes_max


async def _read(request: Request, settings: HttpSettings) -> bytes:
    """The body. Raises Problem as soon as it is known to be too large, or when it takes too long."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > settings.request_bytes_max:
        raise _too_large(settings)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.request_read_ms_max / 1000):
            async for chunk in request.stream():
                size += len(chunk)
                if size > settings.request_bytes_max:
                    raise _too_large(settings)
                chunks.append(chunk)
    except TimeoutError as error:
        raise Problem(
            ProblemKind.BODY_TOO_SLOW,
            "the body did not arrive in time",
            bound=("request_read_ms_max", settings.request_read_ms_max),
            headers={"connection": "close"},
        ) from error
    return b"".join(chunks)


def _too_large(settings: HttpSettings) -> Problem:
    return Problem(
        ProblemKind.BODY_TOO_LARGE,
        f"the request has more than the {settings.request_bytes_max:,} bytes allowed; send smaller batches",
        bound=("request_bytes_max", settings.request_bytes_max),
        headers={"connection": "close"},
    )


def _topic(part: str | None) -> str:
    return "" if part is None else _checked(part, check_topic, where="path.topic")


def _group(part: str | None) -> str:
    return "" if part is None else _checked(part, check_group, where="path.group")


def _checked(part: str, check: Callable[[str], str], *, where: str) -> str:
    try:
        return check(unquote(part))
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_NAME, str(error), where=where) from error


async def _http_problem(request: Request, error: Exception) -> Response:
    """What Starlette refuses by itself: a path or a method that is not there."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    headers = dict(getattr(error, "headers", None) or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return Problem(
            ProblemKind.METHOD_NOT_ALLOWED, f"{request.method} is not allowed here", headers=headers
        ).response()
    return Problem(
        ProblemKind.UNKNOWN_ROUTE, "no route of the protocol has this path; /openapi.json lists them"
    ).response()


def _add_operations(app: FastAPI, services: Services) -> None:
    """Probes, metrics and the document. Probes need no token, and tell strangers only yes or no."""

    async def live(_request: Request) -> Response:
        return _json(health.LIVE)

    async def ready(request: Request) -> Response:
        in_detail = health.may_see_detail(services, request.headers)
        answer = await asyncio.get_running_loop().run_in_executor(
            services.settle_pool, lambda: health.readiness(services, in_detail=in_detail)
        )
        return _json(answer, status=200 if answer.status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        try:
            services.access.check_origin(request.method, request.headers)
            health.check_may_scrape(services, request.headers)
        except Problem as problem:
            return problem.response()
        text, content_type = await asyncio.get_running_loop().run_in_executor(
            services.settle_pool, services.metrics.exposition, request.headers.get("accept", "")
        )
        return Response(text, headers={**_HEADERS, "content-type": content_type})

    openapi = codec.encode(document(ROUTES), Codec.JSON)

    async def schema(_request: Request) -> Response:
        return Response(openapi, media_type=JSON_TYPE)

    for path, endpoint in (
        ("/livez", live),
        ("/readyz", ready),
        ("/healthz", ready),
        ("/metrics", metrics),
        ("/openapi.json", schema),
    ):
        app.add_route(path, endpoint, methods=["GET"])


def _json(answer: object, *, status: int = 200) -> Response:
    return Response(codec.encode(answer, Codec.JSON), status, _HEADERS, media_type=JSON_TYPE)
