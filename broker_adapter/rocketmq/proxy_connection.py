"""Reads topics' routes from a RocketMQ proxy and sends to topics; every call has a deadline."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import grpc
import msgspec

from broker_adapter.rocketmq.errors import Refusal, concerns_one_message, exception_for
from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.protocol import service_pb2 as service
from broker_adapter.rocketmq.signature import CLIENT_VERSION, Credentials, request_metadata
from outbox_core.common.clock import Clock
from outbox_core.messages.broker_port import Weakness
from outbox_core.messages.ids import new_token

ROUTE_MS: Final = 60_000
FAREWELL_SECONDS: Final = 1.0
IN_FLIGHT_MAX: Final = 64

_SUCCESSES: Final = frozenset({definition.OK, definition.MULTIPLE_RESULTS})
_LEFT_TO_PARENT: Final[list[ProxyChannel]] = []
SERVICE: Final = "/apache.rocketmq.v2.MessagingService"
REPEAT_SECONDS: Final = 0.1
"""Between two tries to connect."""
CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, whatever an earlier one met
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_NO_CONNECTION: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_WRITABLE: Final = frozenset({definition.WRITE, definition.READ_WRITE})


class _Answer(Protocol):
    """The common part of all answers of RocketMQ's protocol."""

    status: definition.Status


A = TypeVar("A", bound=_Answer)


class ProxyConnection:
    """Used by one thread at a time. After any exception it is of no use any more: close it."""

    def __init__(self, servers: ProxyServers, *, clock: Clock) -> None:
        """Does no I/O: the first call connects."""
        self._servers = servers
        self._clock = clock
        self._channel: ProxyChannel | None = None
        self._routes: dict[str, tuple[TopicRoute, int]] = {}
        self._is_sound = False

    def connect(self, *, deadline_ms: int) -> ProxyChannel:
        """Connect now, where that has not been done yet."""
        if self._channel is None:
            self._channel = connect(self._servers, clock=self._clock, deadline_ms=deadline_ms)
        return self._channel

    def route(self, topic: str, *, deadline_ms: int) -> TopicRoute | Refusal:
        """Returns a topic's route, at most ROUTE_MS old, or why nothing can be sent to it; a failure is not cached."""
        now_ms = self._clock.monotonic_ms()
        route, asked_at_ms = self._routes.get(topic, (None, 0))
        if route is not None and now_ms - asked_at_ms <= ROUTE_MS:
            return route
        channel = self.connect(deadline_ms=deadline_ms)
        request = service.QueryRouteRequest(topic=definition.Resource(name=topic), endpoints=channel.endpoints)
        call = channel.method("QueryRoute", service.QueryRouteResponse)
        answer: service.QueryRouteResponse | Refusal = self._answer(
            lambda: call(request, timeout=self._seconds(deadline_ms), metadata=channel.metadata())
        )
        if isinstance(answer, Refusal):
            return answer
        route = TopicRoute.of_queues(answer.message_queues)
        self._routes[topic] = (route, now_ms)
        return route

    def forget_routes(self) -> None:
        """Ask anew for each topic."""
        self._routes.clear()

    def send(self, requests: Sequence[Sequence[definition.Message]], *, deadline_ms: int) -> list[Refusal | None]:
        """Send requests of one or more messages of one topic each, beside each other; None for one that is durable.

        Raises where one of them is in doubt or the servers cannot store. What is refused was not stored.
        """
        outcomes: list[Refusal | None] = []
        for first in range(0, len(requests), IN_FLIGHT_MAX):
            outcomes += self._send_together(requests[first : first + IN_FLIGHT_MAX], deadline_ms)
        if any(outcomes):
            self.forget_routes()  # they may be what was wrong
        return outcomes

    def close(self) -> None:
        """End the connection; if it works, notify the proxy, which then forgets this client. Idempotent."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        if self._is_sound:
            farewell = channel.method("NotifyClientTermination", service.NotifyClientTerminationResponse)
            with contextlib.suppress(grpc.RpcError):
                request = service.NotifyClientTerminationRequest()
                farewell(request, timeout=FAREWELL_SECONDS, metadata=channel.metadata())
        channel.channel.close()

    def leave_to_parent(self) -> None:
        """Never free the channel in a forked child: closing it would reach the parent's proxy."""
        if self._channel is not None:
            _LEFT_TO_PARENT.append(self._channel)
            self._channel = None

    def _send_together(
        self, requests: Sequence[Sequence[definition.Message]], deadline_ms: int
    ) -> list[Refusal | None]:
        channel = self.connect(deadline_ms=deadline_ms)
        call = channel.method("SendMessage", service.SendMessageResponse)
        options = {"timeout": self._seconds(deadline_ms), "metadata": channel.metadata()}
        sends = [service.SendMessageRequest(messages=messages) for messages in requests]
        if len(sends) == 1:  # without the thread of a call that is not waited for
            return [self._outcome(lambda: call(sends[0], **options))]
        calls = [call.future(request, **options) for request in sends]
        try:
            return [self._outcome(pending.result) for pending in calls]
        finally:
            for pending in calls:
                pending.cancel()

    def _outcome(self, wait: Callable[[], Any]) -> Refusal | None:
        """Returns a refusal: that of the first entry that is not durable, or the common one; else None."""
        answer: service.SendMessageResponse | Refusal = self._answer(wait)
        if isinstance(answer, Refusal):
            return answer
        failed = (entry.status for entry in answer.entries if entry.status.code != definition.OK)
        return next((self._checked(Refusal.of_status(status)) for status in failed), None)

    def _answer(self, wait: Callable[[], A]) -> A | Refusal:
        """The answer to one call; what it is refused where that concerns one message or topic."""
        self._is_sound = False
        try:
            answer = wait()
        except grpc.RpcError as error:
            return self._checked(Refusal.of_call(error))
        self._is_sound = True
        return answer if answer.status.code in _SUCCESSES else self._checked(Refusal.of_status(answer.status))

    def _checked(self, refusal: Refusal) -> Refusal:
        if not concerns_one_message(refusal):
            raise exception_for(refusal, addresses=self._servers.addresses)
        return refusal

    def _seconds(self, deadline_ms: int) -> float:
        return max(1, deadline_ms - self._clock.monotonic_ms()) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyServers:
    """The proxies' addresses and the login. `credentials`: TLS; None: plain text."""

    hosts: Sequence[tuple[str, int]]
    addresses: str
    login: Credentials | None
    credentials: grpc.ChannelCredentials | None


class ProxyChannel:
    """A gRPC channel to a proxy, which accepts this client's settings, and whose service it calls. Thread-safe.
    `endpoints`: the proxy's address, as its protocol has it.
    """

    def __init__(self, servers: ProxyServers, host: str, port: int, *, clock: Clock) -> None:
        """Does no I/O."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.channel = (
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if servers.credentials is None
            else grpc.secure_channel(address, servers.credentials, options=CHANNEL_OPTIONS)
        )
        scheme = definition.IPv6 if ":" in host else definition.DOMAIN_NAME
        self.endpoints = definition.Endpoints(scheme=scheme, addresses=[definition.Address(host=host, port=port)])
        self._login = servers.login
        self._clock = clock
        self._client_id = f"{socket.gethostname()}@{os.getpid()}@outbox-mq@{new_token()[:12]}"

    def greet(self, *, timeout_s: float) -> definition.Status:
        """Send this client's settings to the proxy and wait for the proxy's, as the protocol requires.

        The stream ends with that: on it a proxy asks about transactions and consumers, and here are none.
        """
        answered = threading.Event()
        exchange = self.channel.stream_stream(
            f"{SERVICE}/Telemetry",
            request_serializer=service.TelemetryCommand.SerializeToString,
            response_deserializer=service.TelemetryCommand.FromString,
        )
        commands = _once(service.TelemetryCommand(settings=self._settings()), answered)
        answers = exchange(commands, timeout=timeout_s, metadata=self.metadata())
        try:
            first: service.TelemetryCommand = next(answers, service.TelemetryCommand())
        finally:
            answered.set()
            answers.cancel()
        return first.status

    def method(self, name: str, kind: Any) -> Any:
        """A method of the service, whose answers are of this kind: call it, or call its `future`."""
        return self.channel.unary_unary(
            f"{SERVICE}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=kind.FromString,
        )

    def metadata(self) -> list[tuple[str, str]]:
        """Returns the metadata of each call."""
        return request_metadata(self._login, client_id=self._client_id, now_ms=self._clock.now_ms())

    def _settings(self) -> definition.Settings:
        agent = definition.UA(language=definition.PYTHON, version=CLIENT_VERSION, hostname=socket.gethostname())
        return definition.Settings(
            client_type=definition.PRODUCER,
            access_point=self.endpoints,
            publishing=definition.Publishing(),
            user_agent=agent,
        )


def connect(servers: ProxyServers, *, clock: Clock, deadline_ms: int) -> ProxyChannel:
    """A channel to the first proxy that answers until the deadline. Raises BrokerUnavailable and NotAuthenticated."""
    reason: Refusal | None = None
    for host, port in itertools.cycle(servers.hosts):
        left_s = max(1, deadline_ms - clock.monotonic_ms()) / 1000
        channel = ProxyChannel(servers, host, port, clock=clock)
        try:
            status = channel.greet(timeout_s=left_s / len(servers.hosts))
        except grpc.RpcError as error:
            channel.channel.close()
            # The last try has little time, and says that this is over: what one before it met says more.
            if reason is None or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                reason = Refusal.of_call(error)
            ends_ms = clock.monotonic_ms() + 1000 * REPEAT_SECONDS
            if error.code() not in _NO_CONNECTION or ends_ms >= deadline_ms:
                raise exception_for(reason, addresses=servers.addresses) from error
            threading.Event().wait(REPEAT_SECONDS)
            continue
        if status.code == definition.OK:
            return channel
        channel.channel.close()
        raise exception_for(Refusal.of_status(status), addresses=servers.addresses)
    raise AssertionError("a URL has a host")


def _once(command: service.TelemetryCommand, answered: threading.Event) -> Iterator[service.TelemetryCommand]:
    """A stream of one command that stays open until it is answered: a proxy does not answer one that has ended."""
    yield command
    answered.wait()


class TopicRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The types of messages that a topic takes, as a proxy describes its queues, and whether one of them can be written
    to.
    """

    takes_normal: bool
    takes_fifo: bool
    is_writable: bool
    type_names: str

    @classmethod
    def of_queues(cls, queues: Collection[definition.MessageQueue]) -> TopicRoute:
        """Returns the common types of all queues of the topic, on all its brokers."""
        types = {kind for queue in queues for kind in queue.accept_message_types}
        return cls(
            takes_normal=definition.NORMAL in types,
            takes_fifo=definition.FIFO in types,
            is_writable=any(queue.permission in _WRITABLE for queue in queues),
            type_names=", ".join(sorted(definition.MessageType.Name(kind) for kind in types)),
        )

    @property
    def refusal(self) -> Refusal | None:
        """Why nothing of ours can be sent to it."""
        if not self.is_writable:
            return Refusal("FORBIDDEN", "it has no writable queue")
        if not (self.takes_normal or self.takes_fifo):
            return Refusal("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", f"it takes {self.type_names} messages alone")
        return None


def route_weaknesses(routes: Mapping[str, TopicRoute | Refusal]) -> Iterator[Weakness]:
    """Topics to which nothing can be published."""
    for topic, route in routes.items():
        refusal = route if isinstance(route, Refusal) else route.refusal
        if refusal is not None:
            yield Weakness(
                subject=topic, topic=topic, problem=f"nothing can be published: {refusal.words}", cure=refusal.cure
            )
