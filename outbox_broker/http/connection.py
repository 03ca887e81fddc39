"""One HTTP connection: reads requests one at a time and writes responses, all with deadlines.

A connection is in one phase at a time, and each phase but WORK has a deadline. The server checks deadlines periodically
(`ServerContext.sweep`), so that a request sets no timer. Why it is our own: decision 85.

    HEAD -> BODY -> WORK -> WRITE -> HEAD ...
      |       |               |
      +-------+-- refused ----+-> DISCARD (the rest of a refused body) -> HEAD, or LINGER -> closed
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import Enum, auto
from functools import lru_cache
from http import HTTPStatus
from typing import Final, cast

from outbox_broker.http.admission_limits import BudgetLease, ByteBudget, ConnectionSlot, ConnectionTable
from outbox_broker.http.application import AdmittedRequest, Application
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.request_reader import RequestHead, RequestReader
from outbox_broker.http.responses import CLOSE, Problem, Response
from outbox_core.protocol.problem import ProblemKind

READ_BYTES_MAX: Final = 256 * 1024
"""Bytes of a body read at a time."""
AHEAD_BYTES_MAX: Final = 16 * 1024
"""Read limit beyond a body of known length: heads, chunks, and pipelined requests."""
SLICE_BYTES: Final = 256 * 1024
"""Bytes given to the transport at a time; the next slice follows when the client has received this one."""
DISCARD_BYTES_MAX: Final = 1024 * 1024
"""A refused body up to this size is read and dropped, so that its connection can be reused."""
LINGER_MS: Final = 2_000
"""How long incoming data is dropped after a last response: closing at once could destroy the response in transit."""
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}
_COMMON: Final = b"cache-control: no-store\r\nx-content-type-options: nosniff\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET: Final = struct.pack("ii", 1, 0)
"""A linger time of zero: the kernel drops unsent data."""
_NEVER: Final = float("inf")


class Phase(Enum):
    """The state of a connection."""

    HEAD = auto()
    BODY = auto()
    WORK = auto()
    WRITE = auto()
    DISCARD = auto()
    LINGER = auto()
    CLOSED = auto()


class HttpConnection(asyncio.BufferedProtocol):
    """The protocol of one connection."""

    def __init__(self, context: ServerContext, slot: ConnectionSlot) -> None:
        self.deadline = _NEVER
        """By the event loop's clock, when the current phase must end; infinity if it may take any time."""
        self._context = context
        self._slot = slot
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._phase = Phase.HEAD
        self._reader = RequestReader(context.budget, head_bytes_max=context.settings.request_head_bytes_max)
        self._admitted: AdmittedRequest | None = None
        self._gone: asyncio.Future[None] | None = None
        self._unsent = memoryview(b"")
        self._response_lease: BudgetLease | None = None
        self._closes = False
        """Whether the next response, or the one being written, is the last."""
        self._discards = 0
        self._lingers = False
        self._is_ended = False
        """Whether the client has closed its sending side."""
        self._is_write_paused = False
        self._is_read_paused = False
        self._is_advancing = False

    # -- what the event loop calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start a connection."""
        self._transport = cast("asyncio.Transport", transport)
        # Paused until the kernel has everything: what was written has then been acknowledged by the client's side. With
        # 0 asyncio's TLS would pause for ever.
        self._transport.set_write_buffer_limits(high=1)
        self._context.connections.add(self)
        self._set_deadline(self._context.settings.request_head_ms_max)
        if self._context.is_stopping:
            self._close()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - how much is available does not matter
        """Returns the buffer for the next bytes."""
        if self._phase is Phase.BODY:
            missing = self._reader.missing_bytes(cast("AdmittedRequest", self._admitted).head)
            return self._context.scratch[: (missing or 0) + AHEAD_BYTES_MAX]
        return self._context.scratch[:AHEAD_BYTES_MAX]

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes."""
        data = self._context.scratch[:nbytes]
        match self._phase:
            case Phase.WRITE if self._discards:  # the client has not read the refusal, and sends the body all the same
                self._discard(data)
            case Phase.HEAD | Phase.WORK | Phase.WRITE:
                self._take_ahead(data)
            case Phase.BODY:
                self._reader.feed(data)
                self._advance()
            case Phase.DISCARD:
                self._discard(data)
            case Phase.LINGER:
                self._discards -= nbytes
                if self._discards <= 0:
                    self._transport.abort()
            case Phase.CLOSED:
                pass

    def eof_received(self) -> bool:
        """Handle the end of the client's data: requests already received are answered, but nothing is waited for."""
        self._is_ended = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        in_work = self._phase in {Phase.WORK, Phase.WRITE}
        return in_work and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything: the connection is closed."""
        del exc
        phase, self._phase = self._phase, Phase.CLOSED
        self._context.connections.discard(self)
        self._context.table.leave(self._slot)
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        if phase is not Phase.WORK:  # a request in progress is released by its task
            self._release()

    def pause_writing(self) -> None:
        """Note that the client has not received everything."""
        self._is_write_paused = True

    def resume_writing(self) -> None:
        """Note that the client has received everything."""
        self._is_write_paused = False
        if self._phase is Phase.WRITE:
            self._write_on()

    # -- what the server calls ---------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Handle the passed deadline of the phase."""
        settings = self._context.settings
        match self._phase:
            case Phase.HEAD if self._reader.ahead_bytes:
                self._refuse(_too_slow(ProblemKind.HEAD_TOO_SLOW, "request_head_ms_max", settings.request_head_ms_max))
            case Phase.HEAD:  # idle: no response is due
                self._close()
            case Phase.BODY:
                self._refuse(_too_slow(ProblemKind.BODY_TOO_SLOW, "request_read_ms_max", settings.request_read_ms_max))
            case _:
                self.abort()

    def finish(self) -> None:
        """Close after the response to the request in progress; at once if there is none."""
        self._closes = True
        if self._phase is Phase.HEAD:
            self._close()
        elif self._phase in {Phase.DISCARD, Phase.LINGER}:
            self.abort()

    def abort(self) -> None:
        """End the connection at once, by a reset; unsent data is lost, including the kernel's."""
        accepted = self._transport.get_extra_info("socket")
        if accepted is not None:
            with suppress(OSError):  # it is closed already
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _take_ahead(self, data: memoryview) -> None:
        begins = not self._reader.ahead_bytes
        self._reader.feed(data)
        if self._phase is Phase.HEAD:
            self._advance()
            if begins and self._reader.ahead_bytes and self._phase is Phase.HEAD:
                before = self.deadline  # empty lines, which start it again and again, must not extend it
                self._set_deadline(self._context.settings.request_head_ms_max)
                self.deadline = min(before, self.deadline)
        elif self._reader.ahead_bytes >= AHEAD_BYTES_MAX and not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def _advance(self) -> None:
        """Read requests as long as they are complete, and none is in progress."""
        self._is_advancing = True  # an immediate refusal calls _begin_head() recursively
        try:
            while self._reader.ahead_bytes and self._read_some():
                pass
        finally:
            self._is_advancing = False

    def _read_some(self) -> bool:
        """Read a head, or more of a body; returns whether there may be more to read."""
        try:
            if self._phase is Phase.HEAD:
                head = self._reader.read_head()
                if head is not None:
                    self._admit(head)
                return head is not None
            if self._phase is Phase.BODY:
                return self._read_body(cast("AdmittedRequest", self._admitted))
        except Problem as problem:
            self._refuse(problem)
        return False

    def _admit(self, head: RequestHead) -> None:
        """Admit a request whose head is read, and read its body."""
        admitted = self._context.application.admit(head, is_reserved=self._slot.is_reserved)
        self._closes = self._closes or not head.keep_alive
        if isinstance(admitted, Response):
            self._refuse_admission(admitted, head)
            return
        if admitted.is_authorized:
            self._context.table.mark_authorized(self._slot)
        if head.expects_continue and not self._reader.ahead_bytes:
            self._transport.write(CONTINUE)
        self._admitted, self._phase = admitted, Phase.BODY
        self._read_body(admitted)
        if self._phase is Phase.BODY:
            self._set_deadline(self._context.settings.request_read_ms_max)

    def _read_body(self, admitted: AdmittedRequest) -> bool:
        """Read what has arrived of the body; start the work if it is complete. Returns whether there may be more to
        read. Raises Problem.
        """
        body = self._reader.read_body(admitted.head, count=admitted.count_body)
        if body is None:
            return False
        try:
            admitted.enter_gate()
        except Problem as problem:  # it was read completely: its connection goes on
            self._release()
            refusal = self._context.application.refuse(admitted.target, problem)
            self._write(refusal, None, has_body=admitted.head.method != "HEAD")
            return True
        self._begin_work(admitted, body)
        return False

    # -- working -----------------------------------------------------------------------------------------------------

    def _begin_work(self, admitted: AdmittedRequest, body: bytearray) -> None:
        self._phase, self.deadline = Phase.WORK, _NEVER
        pool = self._context.application.pool_of(admitted, body_bytes=len(body))
        if pool is not None:
            pool.submit(self._work, admitted, body)
            return
        self._gone = self._context.loop.create_future()
        if self._is_ended:
            self._gone.set_result(None)
        task = self._context.loop.create_task(self._wait_for(admitted, body, self._gone))
        self._context.tasks.add(task)
        task.add_done_callback(self._context.tasks.discard)

    def _work(self, admitted: AdmittedRequest, body: bytearray) -> None:
        """Runs in a worker thread."""
        response = self._context.application.work(admitted, body)
        try:
            self._context.loop.call_soon_threadsafe(self._end_work, admitted, response)
        except RuntimeError:  # the loop has ended, and with it all connections
            return

    async def _wait_for(self, admitted: AdmittedRequest, body: bytearray, gone: asyncio.Future[None]) -> None:
        self._end_work(admitted, await self._context.application.wait_for(admitted, body, gone))

    def _end_work(self, admitted: AdmittedRequest, response: Response) -> None:
        self._context.application.finish(admitted, response)
        self._gone = self._admitted = None
        if self._phase is Phase.CLOSED:
            admitted.discard()
        else:
            self._write(response, admitted.lease, has_body=admitted.head.method != "HEAD")

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, response: Response, lease: BudgetLease | None, *, has_body: bool = True) -> None:
        self._closes = self._closes or response.closes or self._context.is_stopping
        head = head_of(response, date=self._context.date, keep_alive=not self._closes)
        self._phase, self._response_lease = Phase.WRITE, lease
        body = response.body if has_body else b""
        if len(body) <= SLICE_BYTES:
            self._transport.write(head + body)
        else:
            self._unsent = memoryview(body)
            self._transport.write(head)
        self._write_on()
        if self._phase is Phase.WRITE:
            self._set_deadline(self._context.settings.response_write_ms_max)

    def _write_on(self) -> None:
        """Pass more to the transport as long as it accepts it; after the last slice the response is complete."""
        while self._unsent and not self._is_write_paused and self._phase is Phase.WRITE:
            piece, self._unsent = self._unsent[:SLICE_BYTES], self._unsent[SLICE_BYTES:]
            self._transport.write(piece)
        if not self._unsent and not self._is_write_paused and self._phase is Phase.WRITE:
            self._end_response()

    def _end_response(self) -> None:
        """Continue after the client's side has received the response."""
        self._release()
        if self._closes:
            self._close()
        elif self._discards:
            self._phase = Phase.DISCARD
            self._set_deadline(self._context.settings.request_read_ms_max)
            self._resume_reading()
        else:
            self._begin_head()

    def _begin_head(self) -> None:
        settings = self._context.settings
        self._phase = Phase.HEAD
        self._set_deadline(settings.request_head_ms_max if self._reader.ahead_bytes else settings.keep_alive_ms)
        if self._is_advancing:
            return
        self._advance()
        if self._phase in {Phase.HEAD, Phase.BODY}:
            if self._is_ended:
                self._close()
            else:
                self._resume_reading()

    def _resume_reading(self) -> None:
        if self._is_read_paused:
            self._is_read_paused = False
            self._transport.resume_reading()

    # -- refusing and ending -----------------------------------------------------------------------------------------

    def _refuse(self, problem: Problem) -> None:
        """Answer an invalid or incomplete request; the connection ends with it."""
        has_body = self._admitted is None or self._admitted.head.method != "HEAD"
        self._release()
        self._reader.clear()
        self._closes = self._lingers = True
        self._write(problem.response(), None, has_body=has_body)

    def _refuse_admission(self, response: Response, head: RequestHead) -> None:
        """Answer a refused request. Its body is skipped, or its connection ends."""
        length = head.content_length
        if head.is_chunked or head.expects_continue or length > DISCARD_BYTES_MAX:
            self._reader.clear()
            self._closes = self._lingers = True
        else:
            self._discards = self._reader.skip(length)
        self._write(response, None, has_body=head.method != "HEAD")

    def _discard(self, data: memoryview) -> None:
        rest = data[self._discards :]
        self._discards -= min(self._discards, len(data))
        if not self._discards:
            self._reader.feed(rest)
            if self._phase is Phase.DISCARD:
                self._begin_head()

    def _close(self) -> None:
        """Close after sending what was written."""
        may_send = self._lingers or self._discards or self._reader.ahead_bytes or self._is_read_paused
        if may_send and not self._is_ended and self._transport.can_write_eof():
            self._phase, self._discards = Phase.LINGER, DISCARD_BYTES_MAX
            self._set_deadline(LINGER_MS)
            self._resume_reading()
            self._transport.write_eof()
            return
        self._phase = Phase.CLOSED
        self._set_deadline(LINGER_MS)
        self._transport.close()

    def _release(self) -> None:
        """Release what the current request holds."""
        self._reader.drop_request()
        admitted, self._admitted = self._admitted, None
        if admitted is not None:
            admitted.discard()
        lease, self._response_lease = self._response_lease, None
        if lease is not None:
            lease.release()
        self._unsent = memoryview(b"")

    def _set_deadline(self, after_ms: int) -> None:
        self.deadline = self._context.loop.time() + after_ms / 1000


@dataclass(slots=True, kw_only=True, eq=False)
class ServerContext:
    """State shared by all connections of one server; used on its event loop only."""

    loop: asyncio.AbstractEventLoop
    application: Application
    budget: ByteBudget
    table: ConnectionTable
    settings: HttpSettings
    connections: set[HttpConnection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    is_stopping: bool = False
    date: bytes = b""
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES_MAX)))
    """The receive buffer of all connections: its content is copied or used before the next read."""

    def __post_init__(self) -> None:
        self.sweep()

    def sweep(self) -> None:
        """End connections past their deadlines, and update the date. To be called at least once a second."""
        self.date = formatdate(usegmt=True).encode("ascii")
        now = self.loop.time()
        for connection in [connection for connection in self.connections if connection.deadline <= now]:
            connection.expire()

    def stop(self) -> None:
        """Close idle connections, and each other one after its pending response."""
        self.is_stopping = True
        for connection in list(self.connections):
            connection.finish()


def head_of(response: Response, *, date: bytes, keep_alive: bool) -> bytes:
    """Returns the status line and header fields, with the empty line after them."""
    head = _head_start(response.status, response.media_type)
    fields = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items()).encode("latin-1")
    end = b"" if keep_alive or response.closes else b"connection: close\r\n"
    return b"%bdate: %b\r\n%b%bcontent-length: %d\r\n\r\n" % (head, date, fields, end, len(response.body))


@lru_cache(maxsize=256)
def _head_start(status: int, media_type: str) -> bytes:
    return b"%b%bcontent-type: %b\r\n" % (_STATUS_LINES[status], _COMMON, media_type.encode("ascii"))


def _too_slow(kind: ProblemKind, bound: str, limit_ms: int) -> Problem:
    return Problem(kind, "the request did not arrive in time", bound=(bound, limit_ms), headers=CLOSE)
