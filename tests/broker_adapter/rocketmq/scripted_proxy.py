"""A gRPC server that answers as a test says: for what no real proxy can be made to say. Not a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.protocol import service_pb2 as service
from outbox_broker.http.server import Tls

SERVICE: Final = "apache.rocketmq.v2.MessagingService"
OK: Final = definition.Status(code=definition.OK)
Answer = Callable[[Sequence[definition.Message]], definition.Status]


def status(code: int, text: str = "") -> definition.Status:
    """A status of this code."""
    return definition.Status(code=code, message=text)  # type: ignore[arg-type]


class ScriptedProxy:
    """`answer` decides on each send; `topics` are those that are there. `sent` has the ids of each request.

    With `tls` a client shows the same certificate as the proxy.
    """

    def __init__(self, kind: int, *, tls: Tls | None = None) -> None:
        self.answer: Answer = lambda _: OK
        self.topics = {"t", "u"}
        self.sent: list[list[str]] = []
        self._kind = kind
        self._server = grpc.server(ThreadPoolExecutor(4))
        methods = {
            "Telemetry": grpc.stream_stream_rpc_method_handler(
                self._greet, service.TelemetryCommand.FromString, _bytes
            ),
            "QueryRoute": _unary(self._route, service.QueryRouteRequest),
            "SendMessage": _unary(self._send, service.SendMessageRequest),
            "NotifyClientTermination": _unary(self._end, service.NotifyClientTerminationRequest),
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
        self.port: int = _listen(self._server, tls)
        self._server.start()

    @property
    def url(self) -> str:
        """Of this proxy."""
        return f"rocketmq://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End it."""
        self._server.stop(None).wait()

    def _greet(self, commands: Iterator[service.TelemetryCommand], _: Any) -> Iterator[service.TelemetryCommand]:
        yield service.TelemetryCommand(status=OK, settings=next(commands).settings)

    def _route(self, request: service.QueryRouteRequest, _: Any) -> service.QueryRouteResponse:
        if request.topic.name not in self.topics:
            return service.QueryRouteResponse(status=status(definition.TOPIC_NOT_FOUND, "no route"))
        queue = definition.MessageQueue(permission=definition.READ_WRITE, accept_message_types=[self._kind])  # type: ignore[list-item]
        return service.QueryRouteResponse(status=OK, message_queues=[queue])

    def _send(self, request: service.SendMessageRequest, _: Any) -> service.SendMessageResponse:
        self.sent.append([one.system_properties.message_id for one in request.messages])
        answer = self.answer(request.messages)
        return service.SendMessageResponse(status=answer, entries=[service.SendResultEntry(status=answer)])

    def _end(self, *_: Any) -> service.NotifyClientTerminationResponse:
        return service.NotifyClientTerminationResponse(status=OK)


@contextlib.contextmanager
def scripted_proxy(kind: int, *, tls: Tls | None = None) -> Iterator[ScriptedProxy]:
    """A proxy whose topics take this type of messages, for the length of a block."""
    proxy = ScriptedProxy(kind, tls=tls)
    try:
        yield proxy
    finally:
        proxy.close()


def _listen(server: grpc.Server, tls: Tls | None) -> int:
    if tls is None:
        return int(server.add_insecure_port("127.0.0.1:0"))
    key, certificate = tls.key.read_bytes(), tls.certificate.read_bytes()
    credentials = grpc.ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)
    return int(server.add_secure_port("127.0.0.1:0", credentials))


def _unary(method: Callable[..., Any], request: Any) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(method, request.FromString, _bytes)


def _bytes(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return content
