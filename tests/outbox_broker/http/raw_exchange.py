"""Sends raw bytes over TCP in pieces of a test's choice, and reads every answer that comes back until the end."""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, Self
from urllib.parse import urlsplit

DEADLINE_S: Final = 120.0
RECEIVED_BYTES_MAX: Final = 1 << 16
PROBE: Final = b"GET /v1/topics/probe%20behind HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""Asks for a topic whose name is not allowed: the answer names it, so that it cannot be taken for another one."""
_PROBED: Final = b"'probe behind'"
_ROUND_TRIP: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
_RESET: Final = struct.pack("ii", 1, 0)


class End(StrEnum):
    """How a connection ended, seen from its client."""

    OPEN = "open"
    """The server took a further request."""
    CLOSED = "closed"
    SILENT = "silent"
    """Nothing came within the deadline."""


class Silence(Exception):
    """The server sent nothing within the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response, final or interim (1xx), as it was on the wire."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def is_final(self) -> bool:
        """Whether it is not an interim one."""
        return self.status >= 200

    @property
    def is_stored(self) -> bool:
        """Whether it acknowledges a publish."""
        return self.status == 200 and b'"results"' in self.body

    def header(self, name: str) -> str | None:
        """A header's value, by its name in lower case."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What came back over one connection."""

    answers: tuple[Answer, ...]
    end: End

    @property
    def final(self) -> tuple[Answer, ...]:
        """The answers without interim ones."""
        return tuple(answer for answer in self.answers if answer.is_final)

    @property
    def statuses(self) -> tuple[int, ...]:
        """The statuses of the final answers."""
        return tuple(answer.status for answer in self.final)


class RawConnection:
    """One client's connection. Sending to a server that has closed it is no error: what came before still counts."""

    def __init__(
        self,
        url: str,
        *,
        source: str = "",
        receive_bytes: int | None = None,
        tls: ssl.SSLContext | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`source` is the client's address; `receive_bytes` the kernel's buffer for what it has not read yet."""
        self._socket = socket.socket()
        self._socket.settimeout(deadline_s)
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        if source:
            self._socket.bind((source, 0))
        self._socket.connect(_address(url))
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=_address(url)[0])
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, piece: bytes) -> bool:
        """Send all of it; False where the server takes no more."""
        try:
            self._socket.sendall(piece)
        except TimeoutError:
            raise
        except OSError:
            return False
        return True

    def finish_sending(self) -> None:
        """Half-close: say that nothing follows, and go on reading."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def read_answer(self, *, is_head: bool = False) -> Answer | None:
        """The next answer; None where the connection ends first. Raises Silence after the deadline."""
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if not self._receive():
                assert not self._received, f"the connection ended within an answer's head: {bytes(self._received)!r}"
                return None
        status, headers = _parse_head(bytes(self._received[:end]))
        size = 0 if is_head or status < 200 else int(dict(headers)["content-length"])
        while len(self._received) < end + 4 + size:
            assert self._receive(), f"the connection ended within the body of {status} {headers}"
        body = bytes(self._received[end + 4 : end + 4 + size])
        del self._received[: end + 4 + size]
        return Answer(status=status, headers=headers, body=body)

    def read_final(self) -> Answer | None:
        """The next answer that is not an interim one."""
        answer = self.read_answer()
        while answer is not None and not answer.is_final:
            answer = self.read_answer()
        return answer

    def read_to_end(self) -> bytes:
        """Everything up to the end of the connection. Raises Silence after the deadline."""
        while self._receive():
            pass
        received = bytes(self._received)
        self._received.clear()
        return received

    def close(self) -> None:
        """Close it by a reset, which leaves no port behind in TIME_WAIT."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()

    def read_some(self) -> None:
        """Wait for the first bytes of an answer, and read no more of it."""
        self._receive()

    def has_news(self) -> bool:
        """Whether something has come, or the connection has ended."""
        return bool(self._received) or bool(select.select([self._socket], [], [], 0)[0])

    def wait_for_reset(self) -> None:
        """Return when the server has reset the connection, without reading. Raises Silence after the deadline."""
        poll = select.poll()
        poll.register(self._socket, 0)  # POLLERR and POLLHUP are always told
        if not poll.poll((self._socket.gettimeout() or DEADLINE_S) * 1000):
            raise Silence

    def _receive(self) -> bool:
        if self._has_ended:
            return False
        try:
            piece = self._socket.recv(RECEIVED_BYTES_MAX)
        except TimeoutError as error:
            raise Silence from error
        except OSError:  # a reset: the server closed while something of ours was still on its way
            piece = b""
        self._received += piece
        self._has_ended = not piece
        return bool(piece)


def ask(url: str, raw: bytes, *, source: str = "") -> Answer | None:
    """The final answer to one request that ends its connection; None where the server closed without one."""
    with RawConnection(url, source=source) as connection:
        connection.send(raw)
        answer = connection.read_final()
        if answer is not None:
            connection.read_to_end()
        return answer


class Barrier:
    """Waits until a server has read everything that was sent to it before, on whatever connection.

    Bytes that a client has sent over loopback are in the server's socket at once. A request that is answered
    after that shows that the server's loop has come round; the second one, that it did so after the bytes came.
    """

    def __init__(self, url: str) -> None:
        self._connection = RawConnection(url)

    def wait(self) -> None:
        """Return once all that was sent before has been read."""
        for _ in range(2):
            self._connection.send(_ROUND_TRIP)
            answer = self._connection.read_answer()
            assert answer is not None
            assert answer.status == 200

    def close(self) -> None:
        """Close its connection."""
        self._connection.close()


@contextmanager
def barrier(url: str) -> Iterator[Barrier]:
    """A barrier of one server, closed in the end."""
    made = Barrier(url)
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one client does: send the pieces, await so many answers, then probe the connection or half-close it."""

    pieces: Sequence[bytes]
    answers_min: int
    heads: frozenset[int] = frozenset()
    """Which of the answers are to HEAD requests."""
    half_closes: bool = False


def play(
    url: str, scripts: Sequence[Script], *, barrier: Barrier, deadline_s: float = DEADLINE_S
) -> Iterator[Exchange]:
    """Play scripts side by side, in lockstep: the server reads a piece of each before the next piece of any is sent."""
    with ExitStack() as stack:
        connections = [stack.enter_context(RawConnection(url, deadline_s=deadline_s)) for _ in scripts]
        for step in range(max(len(script.pieces) for script in scripts)):
            if step:
                barrier.wait()
            for connection, script in zip(connections, scripts, strict=True):
                if step < len(script.pieces):
                    connection.send(script.pieces[step])
        for connection, script in zip(connections, scripts, strict=True):
            yield _read(connection, script)


def _read(connection: RawConnection, script: Script) -> Exchange:
    answers: list[Answer] = []
    try:
        while sum(answer.is_final for answer in answers) < script.answers_min:
            answer = _next(connection, script, answers)
            if answer is None:
                return Exchange(answers=tuple(answers), end=End.CLOSED)
            answers.append(answer)
        if script.half_closes:
            connection.finish_sending()
        else:
            connection.send(PROBE)
        while (answer := _next(connection, script, answers)) is not None:
            answers.append(answer)
    except Silence:
        return Exchange(answers=tuple(answers), end=End.SILENT)
    if answers and _PROBED in answers[-1].body:
        return Exchange(answers=tuple(answers[:-1]), end=End.OPEN)
    return Exchange(answers=tuple(answers), end=End.CLOSED)


def _next(connection: RawConnection, script: Script, answers: Sequence[Answer]) -> Answer | None:
    number = sum(answer.is_final for answer in answers)
    return connection.read_answer(is_head=number in script.heads)


@lru_cache(maxsize=64)
def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0


def _parse_head(head: bytes) -> tuple[int, tuple[tuple[str, str], ...]]:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    version, status, *_ = status_line.split(" ")
    assert version == "HTTP/1.1", head
    fields = [line.partition(":") for line in lines]
    return int(status), tuple((name.lower(), value.strip()) for name, _, value in fields)
