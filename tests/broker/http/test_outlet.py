"""Answers that go past the transport: all of each, in order, however slowly they are read; by it where there is TLS."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest
import uvloop

from broker.http.outlet import Outlet

WAIT_S = 20.0
LARGE = bytes(range(256)) * 32_768


class Watched:
    """A transport that counts what is written by it."""

    def __init__(self, transport: asyncio.Transport, *, tls: bool = False) -> None:
        self._transport = transport
        self._tls = tls
        self.calls = 0

    def get_extra_info(self, name: str) -> object:
        return object() if self._tls and name == "sslcontext" else self._transport.get_extra_info(name)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        self.calls += 1
        self._transport.write(data)

    def writelines(self, data: tuple[bytes, ...]) -> None:
        self.calls += 1
        self._transport.writelines(data)


Say = Callable[[Outlet], None]


def said(
    say: Say, *, tls: bool = False, reads: threading.Event | None = None, read: threading.Event | None = None,
    expected: int,
) -> tuple[bytes, int]:  # fmt: skip
    """What a client reads of what is said to it, and how often the transport was asked. It begins when it may, `reads`,
    and says when it has `read` something.
    """
    ours, theirs = socket.socketpair()
    got: list[bytes] = []

    def receive() -> None:
        assert reads is None or reads.wait(WAIT_S)
        while sum(map(len, got)) < expected and (piece := theirs.recv(1 << 16)):
            got.append(piece)
            if read is not None:
                read.set()

    async def serve() -> int:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
        watched = Watched(transport, tls=tls)
        say(Outlet(watched))  # type: ignore[arg-type]
        if reads is not None:
            reads.set()
        await loop.run_in_executor(None, reader.join, WAIT_S)
        transport.close()
        return watched.calls

    reader = threading.Thread(target=receive)
    reader.start()
    with theirs, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        calls = runner.run(serve())
    return b"".join(got), calls


def test_a_small_answer_goes_past_the_transport() -> None:
    found, calls = said(lambda outlet: outlet.write(b"head", b"body"), expected=8)

    assert (found, calls) == (b"headbody", 0)


def test_with_tls_all_goes_by_the_transport() -> None:
    found, calls = said(lambda outlet: outlet.write(b"head", b"body"), tls=True, expected=8)

    assert (found, calls) == (b"headbody", 1)


@pytest.mark.parametrize("head", [b"head", LARGE], ids=["cut in the body", "cut in the head"])
def test_what_does_not_go_at_once_follows_and_so_does_what_is_written_behind_it(head: bytes) -> None:
    def say(outlet: Outlet) -> None:
        outlet.write(head, LARGE)
        outlet.write(b"behind", b"it")

    found, calls = said(say, reads=threading.Event(), expected=len(head) + len(LARGE) + 8)

    assert found == head + LARGE + b"behindit"
    assert calls == 2


def test_nothing_goes_before_what_waits_in_the_transport_though_there_is_room_again() -> None:
    reads, read = threading.Event(), threading.Event()

    def say(outlet: Outlet) -> None:
        outlet.write(b"head", LARGE)
        reads.set()
        assert read.wait(WAIT_S)  # the loop stands still, so the transport sends nothing of what waits
        outlet.write(b"behind", b"it")

    found, _ = said(say, reads=reads, read=read, expected=len(LARGE) + 12)

    assert found == b"head" + LARGE + b"behindit"


def test_to_a_client_that_has_gone_nothing_is_written_and_nothing_raised() -> None:
    ours, theirs = socket.socketpair()

    async def serve() -> int:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, ours)
        watched = Watched(transport)
        outlet = Outlet(watched)  # type: ignore[arg-type]
        theirs.close()
        outlet.write(b"head", b"body")
        by_transport = watched.calls
        transport.close()
        outlet.write(b"head", b"body")
        return by_transport

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(serve()) == 1
