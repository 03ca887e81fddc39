"""Opens a gRPC channel to a RocketMQ proxy, which accepts this client's settings, and calls its service."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from broker_adapter.rocketmq.errors import Refusal, exception_for
from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.protocol import service_pb2 as service
from broker_adapter.rocketmq.signature import CLIENT_VERSION, Credentials, request_metadata
from outbox_core.common.clock import Clock
from outbox_core.messages.ids import new_token

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyServers:
    """The proxies' addresses and the login. `credentials`: TLS; None: plain text."""

    hosts: Sequence[tuple[str, int]]
    addresses: str
    login: Credentials | None
    credentials: grpc.ChannelCredentials | None


class ProxyChannel:
    """Thread-safe. `endpoints`: the proxy's address, as its protocol has it."""

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
