"""Connections that answer publishes, pulls and settlements themselves, without ASGI. Whatever is odd goes on by it.

A request of one message costs uvicorn's cycle and Starlette more than its own work. A POST on one of the six paths
whose head is allowed, with a length that is, is read here as the parser brings it, and its answer written as one piece.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from time import perf_counter
from typing import ClassVar, Final

from starlette.responses import Response

from broker.http.bounded_http import BoundedHttpProtocol
from broker.http.call import Call, Services
from broker.http.direct import DIRECT, path_names
from broker.http.known_head import HEADS_KNOWN_MAX, KnownHead, known_head
from broker.http.outlet import Outlet
from broker.http.problems import Problem
from broker.http.routes import ROUTES, Route, Work
from broker.http.serving import HEADERS, Head, admitted, call_of, failed, pool_of, pull, read_head, too_slow, work

_ROUTES: Final[dict[str, Route]] = {
    last: route for route in ROUTES if (last := route.path.rpartition("/")[2]) in DIRECT and route.method == "POST"
}
_STATUS_LINES: Final = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus}
BEHIND_A_PULL_MAX: Final = 16
"""So many requests behind a pull are read while it waits. Beyond, nothing is: nor is it seen that the client goes."""
_HEADERS: Final = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items()).encode()


class _Nothing:
    """In place of the event that a cycle waits for."""

    def set(self) -> None:
        """Nobody waits."""


@dataclass(eq=False, slots=True)
class ShortRequest:
    """A request that goes the short way. To uvicorn's protocol it looks like one of its cycles."""

    response_started: ClassVar[bool] = False
    """An answer is one piece."""

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client has come."""
        super().connection_made(transport)
        self._known: dict[bytes, KnownHead] = {}
        self._in_work: ShortRequest | None = None
        self._outlet = Outlet(transport)

    def on_headers_complete(self) -> None:
        """The head ends: the request goes the short way, or uvicorn's."""
        short = None if self._refused else self._short()
        if short is None:
            super().on_headers_complete()
            self._go_on_reading()
            return
        self._in_head = False
        self._take_up(short)

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
        self._in_message = False
        if short.response_complete:  # given up
            return
        body = short.pieces[0] if len(short.pieces) == 1 else b"".join(short.pieces)
        short.pieces.clear()
        self._begin(short, body)

    def data_received(self, data: bytes) -> None:
        """Bytes of the connection. A body that is not whole with its head is waited for, but not for ever."""
        is_first = not (self._in_message or self._refused or self._unanswered)
        if is_first and self._begin_known(data):
            return
        super().data_received(data)
        short = self.cycle
        if not isinstance(short, ShortRequest) or short.response_complete:
            return
        if short.more_body:
            if short.timer is None:
                settings = self.services.settings
                short.timer = self.loop.call_later(settings.request_read_ms_max / 1000, self._give_up, short)
        elif is_first and short.keep_alive:
            self._remember(data, short)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        short = self._in_work
        if short is not None:
            short.disconnected = True
            if short.gone is not None and not short.gone.done():
                short.gone.set_result(None)
            if short.more_body:
                short.response_complete = True
                short.leave()

    def _go_on_reading(self) -> None:
        """uvicorn reads nothing more behind a request that waits in line; so it would not see that its client goes."""
        short = self._in_work
        if short is not None and short.gone is not None and len(self.pipeline) <= BEHIND_A_PULL_MAX:
            self.flow.resume_reading()

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _begin_known(self, data: bytes) -> bool:
        """Begin a request that came in one piece, with a head that was read and allowed before. The parser never sees
        it; False where it has to.
        """
        known = self._known.get(data[: data.find(b"\r\n")])
        body = None if known is None else known.body_of(data)
        if known is None or body is None or len(body) > self.services.settings.request_bytes_max:
            return False
        short = self._let_in(known.head, size_bytes=len(body), keep_alive=True)
        if short is None:
            return False
        self._unset_keepalive_if_required()
        self._take_up(short)
        self._begin(short, body)
        return True

    def _take_up(self, short: ShortRequest) -> None:
        self.cycle = self._in_work = short
        self._unanswered += 1

    def _remember(self, data: bytes, short: ShortRequest) -> None:
        if len(self._known) >= HEADS_KNOWN_MAX:
            self._known.clear()
        found = known_head(data, short.head, size_bytes=short.size_bytes)
        if found is not None:
            self._known[data[: data.find(b"\r\n")]] = found

    def _short(self) -> ShortRequest | None:
        """The request that has just told its head, if it is of the usual kind, and let in."""
        if (
            self.parser.get_method() != b"POST"
            or self._head_bytes > self.head_bytes_max
            or self.parser.get_http_version() != "1.1"
            or self.expect_100_continue
            or self.parser.should_upgrade()
            or self._unanswered
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
        except Problem:
            return None  # told by the long way
        return self._let_in(head, size_bytes=int(length), keep_alive=self.parser.should_keep_alive())

    def _let_in(self, head: Head, *, size_bytes: int, keep_alive: bool) -> ShortRequest | None:
        """A request inside its bound; None where that is full, which the long way tells."""
        try:
            gate = admitted(self.services, head.route, size_bytes=size_bytes)
            gate.__enter__()
        except Problem:
            return None
        gone = self.loop.create_future() if head.route.work is Work.PULL else None
        return ShortRequest(head, size_bytes, gate, keep_alive, perf_counter(), gone)

    def _begin(self, short: ShortRequest, body: bytes) -> None:
        """The request is whole: have it worked on."""
        short.more_body = False
        call = call_of(self.services, short.head, body, query={})
        if short.gone is None:
            pool_of(self.services, short.head.route).submit(self._work, short, call)
            return
        task = self.loop.create_task(self._pull(short, call, short.gone))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    # -- answering ---------------------------------------------------------------------------------------------------

    def _work(self, short: ShortRequest, call: Call) -> None:
        """In a worker's thread: the one boundary of a request; every error becomes its answer here."""
        answer: bytes | Response
        try:
            answer = work(call, short.head.route)
        except Exception as error:  # noqa: BLE001  (failed() logs and counts it)
            answer = failed(self.services, short.head.route, error)
        try:
            self.loop.call_soon_threadsafe(self._done, short, answer)
        except RuntimeError:  # the loop has ended: so has whoever asked
            return

    async def _pull(self, short: ShortRequest, call: Call, gone: asyncio.Future[None]) -> None:
        answer: bytes | Response
        try:
            answer = await pull(call, gone)
        except Exception as error:  # noqa: BLE001  (failed() logs and counts it)
            answer = failed(self.services, short.head.route, error)
        except BaseException:
            short.leave()
            raise
        self._done(short, answer)

    def _done(self, short: ShortRequest, answer: bytes | Response) -> None:
        """Who does not read must not keep a place: it is left before the answer is written."""
        short.leave()
        if self.flow.write_paused and not short.disconnected:
            task = self.loop.create_task(self._finish_once_read(short, answer))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        else:
            self._finish(short, answer)

    async def _finish_once_read(self, short: ShortRequest, answer: bytes | Response) -> None:
        await self.flow.drain()
        self._finish(short, answer)

    def _give_up(self, short: ShortRequest) -> None:
        if short.more_body and not short.response_complete:
            short.leave()
            self._finish(short, too_slow(self.services.settings).response())

    def _finish(self, short: ShortRequest, answer: bytes | Response) -> None:
        short.response_complete, self._in_work = True, None
        seconds = None if short.gone is not None else perf_counter() - short.started
        route, status = short.head.route, 200 if isinstance(answer, bytes) else answer.status_code
        self.services.metrics.count_request(route.method, route.path, status=status, seconds=seconds)
        if short.disconnected:
            return
        defaults = tuple(self.server_state.default_headers)
        if isinstance(answer, bytes) and short.keep_alive:
            head = _head_of_success(defaults, short.head.answer_codec.value)
            self._outlet.write(b"%bcontent-length: %d\r\n\r\n" % (head, len(answer)), answer)
        else:
            if isinstance(answer, bytes):
                answer = Response(answer, 200, HEADERS, media_type=short.head.answer_codec.value)
            self._write(answer, keep_alive=short.keep_alive)
        self.on_response_complete()

    def _write(self, response: Response, *, keep_alive: bool) -> None:
        headers = [*self.server_state.default_headers, *response.raw_headers]
        if not keep_alive and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        head = b"".join([b"%b: %b\r\n" % one for one in headers])
        self.transport.write(b"".join((_STATUS_LINES[response.status_code], head, b"\r\n", response.body)))
        if (b"connection", b"close") in headers:
            self.transport.close()


@lru_cache(maxsize=64)
def _head_of_success(defaults: tuple[tuple[bytes, bytes], ...], media_type: str) -> bytes:
    """What an answer begins with, up to its length. `defaults` have the date: it is another one every second."""
    lines = b"".join([b"%b: %b\r\n" % one for one in defaults])
    return b"".join((_STATUS_LINES[200], lines, _HEADERS, b"content-type: %b\r\n" % media_type.encode("ascii")))


def short_protocol(services: Services) -> type[ShortHttpProtocol]:
    """The protocol class of one server; uvicorn makes an instance for each connection."""
    bound = {"services": services, "head_bytes_max": services.settings.request_head_bytes_max}
    return type("ShortHttpProtocol", (ShortHttpProtocol,), bound)
