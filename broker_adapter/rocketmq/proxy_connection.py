"""Reads topics' routes from a RocketMQ proxy and sends to topics; every call has a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import grpc

from broker_adapter.rocketmq.errors import Refusal, concerns_one_message, exception_for
from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.protocol import service_pb2 as service
from broker_adapter.rocketmq.proxy_channel import ProxyChannel, ProxyServers, connect
from broker_adapter.rocketmq.topic_route import TopicRoute
from outbox_core.common.clock import Clock

ROUTE_MS: Final = 60_000
FAREWELL_SECONDS: Final = 1.0
IN_FLIGHT_MAX: Final = 64

_SUCCESSES: Final = frozenset({definition.OK, definition.MULTIPLE_RESULTS})
_LEFT_TO_PARENT: Final[list[ProxyChannel]] = []


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
