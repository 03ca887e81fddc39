"""Connections that answer publishes, pulls and settlements themselves, without ASGI. Whatever is odd goes on by it.

A request of one message costs uvicorn's cycle and Starlette more than its own work. A POST on one of the five paths
whose head is allowed, with a length that is, is read here as the parser brings it, and its answer written as one piece.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final

from starlette.responses import Response

from broker.http.bounded_http import BoundedHttpProtocol
from broker.http.call import Services
from broker.http.direct import DIRECT, path_names
from broker.http.problems import Problem
from broker.http.routes import ROUTES, Route, Work
from broker.http.serving import Head, admitted, answered, read_head, serve, too_slow

_ROUTES: Final[dict[str, Route]] = {
    last: route for route in ROUTES if (last := route.path.rpartition("/")[2]) in DIRECT and route.method == "POST"
}
_STATUS_LINES: Final = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus}


class _Nothing:
    """In place of the event that a cycle waits for."""

    def set(self) -> None:
        """Nobody waits."""


@dataclass(eq=False, slots=True)
class ShortRequest:
    """A request that goes the short way. To uvicorn's protocol it looks like one of its cycles."""

    head: Head
    size_bytes: int
    gate: AbstractContextManager[None]
    keep_alive: bool
    started: float
    gone: asyncio.Future[None] | None
    pieces: list[bytes] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    more_body: bool = True
    disconnected: bool = False
    response_complete: bool = False
    message_event: _Nothing = field(default_factory=_Nothing)

    def leave(self) -> None:
        """Let others in; stop waiting for the body."""
        if self.timer is not None:
            self.timer.cancel()
        self.gate.__exit__(None, None, None)


class ShortHttpProtocol(BoundedHttpProtocol):
    """One connection of a server of `services`."""

    services: Services

    def on_headers_complete(self) -> None:
        """The head ends: the request goes the short way, or uvicorn's."""
        short = None if self._refused else self._short()
        if short is None:
            super().on_headers_complete()
            return
        self._in_head = False
        self.cycle: Any = short

    def on_body(self, body: bytes) -> None:
        """A piece of a body. All of it fits: its length was looked at. That of a refused request is no one's."""
        if isinstance(self.cycle, ShortRequest) and not self._refused:
            self.cycle.pieces.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        short = self.cycle
        if self._refused or not isinstance(short, ShortRequest):  # the refused one came behind it
            super().on_message_complete()
            return
        if short.response_complete:  # given up
            return
        short.more_body = False
        task = self.loop.create_task(self._answer(short))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def data_received(self, data: bytes) -> None:
        """Bytes of the connection. A body that is not whole with its head is waited for, but not for ever."""
        super().data_received(data)
        short = self.cycle
        if isinstance(short, ShortRequest) and short.more_body and short.timer is None and not short.response_complete:
            settings = self.services.settings
            short.timer = self.loop.call_later(settings.request_read_ms_max / 1000, self._give_up, short)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        short = self.cycle
        if isinstance(short, ShortRequest) and not short.response_complete:
            if short.gone is not None and not short.gone.done():
                short.gone.set_result(None)
            if short.more_body:
                short.response_complete = True
                short.leave()

    def _short(self) -> ShortRequest | None:
        """The request that has just told its head, if it is of the usual kind, and let in."""
        if (
            self.parser.get_method() != b"POST"
            or self._head_bytes > self.head_bytes_max
            or self.parser.get_http_version() != "1.1"
            or self.expect_100_continue
            or self.parser.should_upgrade()
            or not (self.cycle is None or self.cycle.response_complete)
        ):
            return None
        last, names = path_names(self.url)
        route = _ROUTES.get(last)
        if route is None or names is None:
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.headers)}
        length = headers.get("content-length", "")
        digits = length.isascii() and length.isdigit() and len(length) < 18
        if not digits or int(length) > self.services.settings.request_bytes_max or "transfer-encoding" in headers:
            return None
        try:
            head = read_head(self.services, route, headers, names=names)
            gate = admitted(self.services, route, size_bytes=int(length))
            gate.__enter__()
        except Problem:
            return None  # told by the long way
        return ShortRequest(
            head=head, size_bytes=int(length), gate=gate, keep_alive=self.parser.should_keep_alive(),
            started=perf_counter(), gone=self.loop.create_future() if route.work is Work.PULL else None,
        )  # fmt: skip

    async def _answer(self, short: ShortRequest) -> None:
        services, route = self.services, short.head.route
        try:
            body = short.pieces[0] if len(short.pieces) == 1 else b"".join(short.pieces)
            short.pieces.clear()
            response = await answered(
                services, route, serve(services, short.head, body, query={}, gone=short.gone)
            )  # fmt: skip
        finally:
            short.leave()
        if self.flow.write_paused and not short.disconnected:  # outside: who does not read must not keep a place
            await self.flow.drain()
        self._finish(short, response)

    def _give_up(self, short: ShortRequest) -> None:
        if short.more_body and not short.response_complete:
            short.leave()
            self._finish(short, too_slow(self.services.settings).response())

    def _finish(self, short: ShortRequest, response: Response) -> None:
        short.response_complete = True
        seconds = None if short.gone is not None else perf_counter() - short.started
        route = short.head.route
        self.services.metrics.count_request(route.method, route.path, status=response.status_code, seconds=seconds)
        if short.disconnected:
            return
        self._write(response, keep_alive=short.keep_alive)
        self.on_response_complete()

    def _write(self, response: Response, *, keep_alive: bool) -> None:
        headers = [*self.server_state.default_headers, *response.raw_headers]
        if not keep_alive and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        head = b"".join([b"%b: %b\r\n" % one for one in headers])
        self.transport.write(b"".join((_STATUS_LINES[response.status_code], head, b"\r\n", response.body)))
        if (b"connection", b"close") in headers:
            self.transport.close()


def short_protocol(services: Services) -> type[ShortHttpProtocol]:
    """The protocol class of one server; uvicorn makes an instance for each connection."""
    bound = {"services": services, "head_bytes_max": services.settings.request_head_bytes_max}
    return type("ShortHttpProtocol", (ShortHttpProtocol,), bound)
