"""The ASGI application: its parts, its routes' endpoints, its requests read. Not what is done with a request."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from time import perf_counter

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from broker.http import codec, health
from broker.http.access import Access
from broker.http.call import Services
from broker.http.codec import Codec
from broker.http.direct import DIRECT, BrokerApp, Endpoint
from broker.http.gate import Gate
from broker.http.long_poll import LongPolls
from broker.http.metrics import Metrics
from broker.http.openapi import document
from broker.http.problems import Problem
from broker.http.routes import ROUTES, WAITS, Route
from broker.http.served import Served
from broker.http.serving import HEADERS, admitted, answered, read_head, serve, too_large, too_slow
from broker.http.settings import HttpSettings
from messaging.clock import Clock, SystemClock
from messaging.problem import ProblemKind
from messaging.wire import (
    JSON_TYPE,
)


def create_app(
    engine: Served, settings: HttpSettings | None = None, *, access: Access | None = None, clock: Clock | None = None
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


def _services(engine: Served, settings: HttpSettings, *, access: Access, clock: Clock) -> Services:
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
        response = await answered(services, route, _serve(services, route, request))
        waited = route.work in WAITS
        services.metrics.count_request(
            route.method, path, status=response.status_code, seconds=None if waited else perf_counter() - start
        )
        return response

    return endpoint


async def _serve(services: Services, route: Route, request: Request) -> Response:
    head = read_head(services, route, request.headers, names=request.path_params)
    with admitted(services, route, size_bytes=_declared_bytes(request, services.settings)):
        body = await _read(request, services.settings) if route.body is not None else b""
        query = dict(request.query_params)
        if route.work not in WAITS:
            return await serve(services, head, body, query=query, gone=None)
        gone = asyncio.create_task(_gone(request))
        try:
            return await serve(services, head, body, query=query, gone=gone)
        finally:
            gone.cancel()


async def _gone(request: Request) -> None:
    """Ends when the client closes its connection. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _declared_bytes(request: Request, settings: HttpSettings) -> int:
    """The body's size as its head tells it; one that does not tell counts as the largest."""
    length = request.headers.get("content-length")
    return min(int(length), settings.request_bytes_max) if length and length.isdigit() else settings.request_bytes_max


async def _read(request: Request, settings: HttpSettings) -> bytes:
    """The body. Raises Problem as soon as it is known to be too large, or when it takes too long."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > settings.request_bytes_max:
        raise too_large(settings)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.request_read_ms_max / 1000):
            async for chunk in request.stream():
                size += len(chunk)
                if size > settings.request_bytes_max:
                    raise too_large(settings)
                chunks.append(chunk)
    except TimeoutError as error:
        raise too_slow(settings) from error
    return b"".join(chunks)


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
        return Response(text, headers={**HEADERS, "content-type": content_type})

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
    return Response(codec.encode(answer, Codec.JSON), status, HEADERS, media_type=JSON_TYPE)
