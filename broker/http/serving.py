"""One request from its head to its answer, whichever way it came: by ASGI, or the short way. No parsing of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import unquote

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from broker.broadcasting import READERS
from broker.http import broadcasts, codec, deliveries
from broker.http.access import Principal, authorize
from broker.http.call import Call, Services
from broker.http.codec import Codec
from broker.http.long_poll import Taken
from broker.http.problems import Problem, of_error
from broker.http.routes import Route, Work
from broker.http.settings import HttpSettings
from messaging.errors import InvalidMessage, OutboxError
from messaging.message import check_group, check_topic
from messaging.problem import ProblemKind
from messaging.wire import PullRequest
from messaging.wire_broadcast import ReadRequest

logger = logging.getLogger(__name__)

HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What the head of a request says, and that it is allowed."""

    route: Route
    principal: Principal
    topic: str
    group: str
    item: str
    body_codec: Codec
    answer_codec: Codec


def read_head(services: Services, route: Route, headers: Mapping[str, str], *, names: Mapping[str, str]) -> Head:
    """Who asks for what, in which codecs. Raises Problem where it is not allowed, or cannot be."""
    services.access.check_origin(route.method, headers)
    principal = services.access.principal(headers)
    topic = _checked(names.get("topic"), check_topic, where="path.topic")
    group = _checked(names.get("group"), check_group, where="path.group")
    authorize(principal, route.role, topic or None)
    body_codec = Codec.JSON
    if route.body is not None and not (route.body_optional and headers.get("content-length", "0") == "0"):
        body_codec = codec.request_codec(headers.get("content-type"))
    answer_codec = codec.answer_codec(headers.get("accept"), default=body_codec)
    return Head(
        route=route, principal=principal, topic=topic, group=group, item=unquote(names.get("id", "")),
        body_codec=body_codec, answer_codec=answer_codec,
    )  # fmt: skip


def admitted(services: Services, route: Route, *, size_bytes: int) -> AbstractContextManager[None]:
    """Inside the bound that the route's work falls under; a body is counted before any of it is read."""
    match route.work:
        case Work.PUBLISH:
            return services.publishes.entered(size_bytes)
        case Work.SETTLE:
            return services.requests.entered()
        case Work.PULL | Work.READ:
            return services.pulls.entered()


async def answered(services: Services, route: Route, serve: Awaitable[Response]) -> Response:
    """The one boundary of a request: every error becomes its answer here."""
    try:
        return await serve
    except Exception as error:  # noqa: BLE001  (failed() logs and counts it)
        return failed(services, route, error)


def failed(services: Services, route: Route, error: Exception) -> Response:
    """The answer that an error comes to; one that nobody has foreseen is logged and counted."""
    match error:
        case Problem():
            return error.response()
        case OutboxError():
            logger.info("request_failed", extra={"route": route.path, "error": str(error)})
            return of_error(error, storage_retry_after_ms=services.settings.storage_retry_after_ms).response()
        case ClientDisconnect():
            return Response(status_code=499)
        case _:
            services.metrics.count_failure()
            logger.error("request_met_a_defect", extra={"route": route.path}, exc_info=error)
            return Problem(ProblemKind.INTERNAL, "the broker met a defect of its own; its log says which").response()


async def serve(
    services: Services, head: Head, body: bytes, *, query: Mapping[str, str], gone: asyncio.Future[None] | None
) -> Response:
    """Do what is asked. `gone` ends when the client has gone, where that can be known: a pull asks for it."""
    call = call_of(services, head, body, query=query)
    if gone is None:
        answer = await _in_pool(pool_of(services, head.route), lambda: work(call, head.route))
    elif head.route.work is Work.PULL:
        answer = await pull(call, gone)
    else:
        answer = await read_on(call, gone)
    return Response(answer, 200, HEADERS, media_type=head.answer_codec.value)


def call_of(services: Services, head: Head, body: bytes, *, query: Mapping[str, str]) -> Call:
    """What the handler of a request gets."""
    return Call(
        services=services, principal=head.principal, topic=head.topic, group=head.group, item=head.item, query=query,
        body=body, body_codec=head.body_codec, answer_codec=head.answer_codec,
    )  # fmt: skip


def work(call: Call, route: Route) -> bytes:
    """Do what is asked of anything but a pull, in a worker thread: the answer."""
    if route.handler is None:
        raise TypeError(f"{route.path} has no handler")
    return codec.encode(route.handler(call), call.answer_codec)


def pool_of(services: Services, route: Route) -> ThreadPoolExecutor:
    """Where work() is to be called."""
    return services.publish_pool if route.work is Work.PUBLISH else services.settle_pool


def too_large(settings: HttpSettings) -> Problem:
    """A body beyond the bound."""
    return Problem(
        ProblemKind.BODY_TOO_LARGE,
        f"the request has more than the {settings.request_bytes_max:,} bytes allowed; send smaller batches",
        bound=("request_bytes_max", settings.request_bytes_max),
        headers={"connection": "close"},
    )


def too_slow(settings: HttpSettings) -> Problem:
    """A body that does not come."""
    return Problem(
        ProblemKind.BODY_TOO_SLOW,
        "the body did not arrive in time",
        bound=("request_read_ms_max", settings.request_read_ms_max),
        headers={"connection": "close"},
    )


async def pull(call: Call, gone: asyncio.Future[None]) -> bytes:
    """Pull at once, then wait in line; where there is a line, wait in it from the start: it knows whether anything may
    have come. To a client that has gone nothing is handed out, as far as can be known.
    """
    services, wanted = call.services, call.read(PullRequest)
    loop = asyncio.get_running_loop()

    async def take() -> Taken | None:
        at_hand = deliveries.take_at_hand(call, wanted)
        if at_hand is not None:
            return None if at_hand == "nothing" else at_hand
        return await _in_pool(services.pull_pool, lambda: deliveries.take(call, wanted))

    deadline = loop.time() + wanted.wait_ms / 1000
    waits = wanted.wait_ms > 0 and services.polls.has_line(call.topic, call.group)
    taken = None if waits else await take()
    if taken is None and wanted.wait_ms and not gone.done():
        with services.metrics.waiting.track_inprogress():
            taken = await services.polls.wait(
                call.topic, call.group, take=take, timeout_s=max(0.0, deadline - loop.time()), gone=gone
            )
    if taken is None:
        return deliveries.no_deliveries(call)
    if gone.done():
        receipts = taken.receipts
        await _in_pool(services.pull_pool, lambda: deliveries.give_back(call, receipts))
        raise ClientDisconnect
    return taken.answer


async def read_on(call: Call, gone: asyncio.Future[None]) -> bytes:
    """Read a topic on, waiting in its readers' line for the first message."""
    services, wanted = call.services, call.read(ReadRequest)
    place = await _in_pool(services.pull_pool, lambda: broadcasts.place_of(call, wanted))

    async def take() -> Taken | None:
        return await _in_pool(services.pull_pool, lambda: broadcasts.take(call, wanted, place))

    taken = None
    if not wanted.wait_ms:
        taken = await take()
    elif not gone.done():
        with services.metrics.waiting.track_inprogress():
            taken = await services.polls.wait(
                call.topic, READERS, take=take, timeout_s=wanted.wait_ms / 1000, gone=gone
            )  # fmt: skip
    return broadcasts.nothing(call, place) if taken is None else taken.answer


async def _in_pool(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """run_in_executor() without the future between futures, which costs as much as a small request's work."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # where there is no error it is one

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:  # noqa: BLE001  (it belongs to the request, which raises it)
            result, error = None, raised
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:  # the loop has ended: so has whoever asked
            return

    pool.submit(run)
    return await done


def _checked(part: str | None, check: Callable[[str], str], *, where: str) -> str:
    if part is None:
        return ""
    try:
        return check(unquote(part))
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_NAME, str(error), where=where) from error
