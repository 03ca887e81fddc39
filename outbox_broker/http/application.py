"""Processes requests: admission by the request head, then execution, and the mapping of errors to responses.

Knows no sockets. A connection asks it to admit a request by its head, before any of the body is read, and once the body
is complete has it execute the request in a thread, or wait for messages on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final
from urllib.parse import parse_qsl, unquote

from outbox_broker.http import content_negotiation
from outbox_broker.http.access_control import ANYONE, Principal, Role, authorize
from outbox_broker.http.admission_limits import BudgetLease, ConcurrencyLimit, WorkClass
from outbox_broker.http.content_negotiation import Codec
from outbox_broker.http.delivery_handlers import pull, read_on
from outbox_broker.http.probe_routes import OPERATIONS, Operation
from outbox_broker.http.request_context import Call, Services
from outbox_broker.http.request_reader import RequestHead
from outbox_broker.http.responses import CLOSE, Problem, Response, of_error
from outbox_broker.http.routes import ROUTES, Route, Router
from outbox_core.common.errors import InvalidMessage, OutboxError
from outbox_core.messages.message import check_group, check_topic
from outbox_core.protocol.problem import ProblemKind
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

BODY_COPIES: Final = 2
"""How often a body is counted: as received, and as decoded from it."""
UNREAD_BYTES_MAX: Final = 4 * 1024
"""Size limit of a body that the route does not use; it is ignored."""
_QUERY_FIELDS_MAX: Final = 64


@dataclass(slots=True, kw_only=True)
class AdmittedRequest:
    """An admitted request. Its owner responds to it, or discards it."""

    target: Route | Operation
    head: RequestHead
    lease: BudgetLease
    gate: ConcurrencyLimit | None
    principal: Principal
    body_bytes_max: int
    is_in_work: bool = False
    topic: str = ""
    group: str = ""
    item: str = ""
    body_codec: Codec = Codec.JSON
    answer_codec: Codec = Codec.JSON
    started: float = field(default_factory=perf_counter)

    @property
    def is_authorized(self) -> bool:
        """Whether its sender was authorised; operations such as probes are open to anybody."""
        return isinstance(self.target, Route)

    def count_body(self, size_bytes: int) -> None:
        """Lease bytes for what has arrived of its body: an announced length alone reserves nothing.

        Raises Problem if it is too large, or the byte budget is exhausted.
        """
        if size_bytes > self.body_bytes_max:
            raise too_large(self.body_bytes_max)
        self.lease.resize(BODY_COPIES * size_bytes)

    def enter_gate(self) -> None:
        """Count as a request in progress: the body is complete. Raises Problem, throttled."""
        if self.gate is not None:
            self.gate.enter()
            self.is_in_work = True

    def leave_gate(self) -> None:
        """Release the place among requests in progress; idempotent."""
        if self.gate is not None and self.is_in_work:
            self.gate.leave()
            self.is_in_work = False

    def discard(self) -> None:
        """Release everything: the body did not arrive, or the client is gone."""
        self.leave_gate()
        self.lease.release()


class Application:
    """Admission and execution of a server's requests."""

    def __init__(self, services: Services, *, routes: Sequence[Route] = ROUTES) -> None:
        threads = services.threads
        self._services = services
        self._pools: dict[WorkClass, ThreadPoolExecutor | None] = {
            WorkClass.PUBLISH: threads.publish, WorkClass.SETTLE: threads.settle, WorkClass.PAGE: threads.page,
            WorkClass.OPERATE: threads.operate, WorkClass.PULL: None, WorkClass.READ: None,
        }  # fmt: skip
        self._router: Router[Route | Operation] = Router((*routes, *OPERATIONS))

    def admit(self, head: RequestHead, *, is_reserved: bool) -> AdmittedRequest | Response:
        """Admit a request, or return the refusal. `is_reserved`: admit only probes, metrics and operators."""
        try:
            target, names = self._router.find(head.method, head.path)
        except Problem as problem:
            return problem.response()
        try:
            if isinstance(target, Operation):
                return self._admit_operation(target, head)
            return self._admit_route(target, head, names, is_reserved=is_reserved)
        except Problem as problem:
            return self.refuse(target, problem)

    def refuse(self, target: Route | Operation, problem: Problem) -> Response:
        """Returns the response to a refused request, which is counted."""
        response = problem.response()
        self._services.metrics.count_request(target.method, target.path, status=response.status, seconds=None)
        return response

    def pool_of(self, admitted: AdmittedRequest, *, body_bytes: int) -> ThreadPoolExecutor | None:
        """Returns the pool that executes work() for a request; None for one that waits for messages: see wait_for()."""
        work = admitted.target.work
        if work is WorkClass.PUBLISH and body_bytes > content_negotiation.LONG_BYTES:
            return self._services.threads.long_publish
        return self._pools[work]

    def work(self, admitted: AdmittedRequest, body: bytes | bytearray) -> Response:
        """Execute a request, in a thread that may block on a disk or a lock. Every error becomes a response."""
        target = admitted.target
        try:
            if isinstance(target, Operation):
                return target.respond(self._services, admitted.head.headers)
            call = self._call(admitted, body)
            return Response(
                content_negotiation.encode(_handled(target, call), call.answer_codec), call.answer_codec.value
            )
        except Exception as error:  # noqa: BLE001  (the boundary of a request, which logs and counts it)
            return self._failed(target.path, error)

    async def wait_for(
        self, admitted: AdmittedRequest, body: bytes | bytearray, gone: asyncio.Future[None]
    ) -> Response:
        """Execute a pull or a read, waiting for messages until `gone` is done: the client is gone, or sends no more.
        Every error becomes a response.
        """
        target = admitted.target
        try:
            call = self._call(admitted, body)
            answer = await (pull(call, gone) if target.work is WorkClass.PULL else read_on(call, gone))
            return Response(answer, call.answer_codec.value)
        except Exception as error:  # noqa: BLE001  (the boundary of a request, which logs and counts it)
            return self._failed(target.path, error)

    def finish(self, admitted: AdmittedRequest, response: Response) -> None:
        """End a request: release its place, count it, and lease the bytes of its response."""
        admitted.leave_gate()
        admitted.lease.settle(len(response.body))
        target = admitted.target
        seconds = None if target.work.waits else perf_counter() - admitted.started
        self._services.metrics.count_request(target.method, target.path, status=response.status, seconds=seconds)

    def _admit_operation(self, operation: Operation, head: RequestHead) -> AdmittedRequest:
        if operation.check is not None:
            self._services.access.check_origin(head.method, head.headers)
            operation.check(self._services, head.headers)
        _check_length(head, bytes_max=UNREAD_BYTES_MAX)
        lease = self._services.budget.lease()
        return AdmittedRequest(
            target=operation, head=head, lease=lease, gate=None, principal=ANYONE, body_bytes_max=UNREAD_BYTES_MAX
        )  # fmt: skip

    def _admit_route(
        self, route: Route, head: RequestHead, names: Mapping[str, str], *, is_reserved: bool
    ) -> AdmittedRequest:
        services, headers = self._services, head.headers
        services.access.check_origin(route.method, headers)
        principal = services.access.principal(headers)
        topic = _checked(names.get("topic"), check_topic, where="path.topic")
        group = _checked(names.get("group"), check_group, where="path.group")
        authorize(principal, route.role, topic or None)
        if is_reserved and route.role is not Role.ADMIN:
            raise services.out_of_connections()
        body_codec = Codec.JSON
        if route.body is not None and not (route.body_optional and not head.has_body):
            body_codec = content_negotiation.request_codec(headers.get("content-type"))
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Problem(ProblemKind.UNSUPPORTED_MEDIA_TYPE, "bodies are not compressed: send no Content-Encoding")
        answer_codec = content_negotiation.answer_codec(headers.get("accept"), default=body_codec)
        body_bytes_max = _body_bytes_max(route, services.settings.request_bytes_max)
        _check_length(head, bytes_max=body_bytes_max)
        gate = services.gate_of(route.work)
        services.budget.check(BODY_COPIES * head.content_length)  # they are leased as they arrive
        gate.check()
        return AdmittedRequest(
            target=route, head=head, lease=services.budget.lease(), gate=gate, principal=principal,
            body_bytes_max=body_bytes_max, topic=topic, group=group,
            item=unquote(names.get("id") or names.get("name", "")), body_codec=body_codec, answer_codec=answer_codec,
        )  # fmt: skip

    def _call(self, admitted: AdmittedRequest, body: bytes | bytearray) -> Call:
        return Call(
            services=self._services, ports=self._services.served, principal=admitted.principal, topic=admitted.topic,
            group=admitted.group, item=admitted.item, query=_query(admitted.head.query), body=body,
            body_codec=admitted.body_codec, answer_codec=admitted.answer_codec, lease=admitted.lease,
        )  # fmt: skip

    def _failed(self, path: str, error: Exception) -> Response:
        """Returns the response to an error; an unexpected one is logged and counted."""
        match error:
            case Problem():
                return error.response()
            case OutboxError():
                logger.info("request_failed", extra={"route": path, "error": str(error)})
                retry_after_ms = self._services.settings.storage_retry_after_ms
                return of_error(error, storage_retry_after_ms=retry_after_ms).response()
            case _:
                self._services.metrics.count_failure()
                logger.error("request_handler_failed", extra={"route": path}, exc_info=error)
                detail = "the broker met a defect of its own; its log says which"
                return Problem(ProblemKind.INTERNAL, detail).response()


def _check_length(head: RequestHead, *, bytes_max: int) -> None:
    if head.content_length > bytes_max:
        raise too_large(bytes_max)


def too_large(bytes_max: int) -> Problem:
    """Returns the problem of a body beyond its route's limit."""
    return Problem(
        ProblemKind.BODY_TOO_LARGE,
        f"the request has more than the {bytes_max:,} bytes allowed; send smaller batches",
        bound=("request_bytes_max", bytes_max),
        headers=CLOSE,
    )


def _handled(route: Route, call: Call) -> object:
    if route.handler is None:
        raise TypeError(f"{route.path} has no handler")
    return route.handler(call)


def _body_bytes_max(route: Route, request_bytes_max: int) -> int:
    if route.body is None:
        return UNREAD_BYTES_MAX
    return request_bytes_max if route.body_bytes_max is None else min(route.body_bytes_max, request_bytes_max)


def _query(query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=_QUERY_FIELDS_MAX))
    except ValueError as error:
        raise Problem(ProblemKind.WRONG_SHAPE, "the query has too many fields", where="query") from error


def _checked(part: str | None, check: Callable[[str], str], *, where: str) -> str:
    if part is None:
        return ""
    try:
        return check(unquote(part))
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_NAME, str(error), where=where) from error
