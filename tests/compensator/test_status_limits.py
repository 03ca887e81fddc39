"""What clients of the compensator's status page may occupy: so many connections, each for so long."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from outbox_core.runtime.status_server import StatusLimits, StatusServer
from tests.compensator.serving import WAIT_SECONDS, Serve
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop
from tests.outbox_broker.polling import until

NEVER_SECONDS = 100_000
LINE_BYTES_MAX = 65_536
"""Of a header, by http.client."""
Start = Callable[[StatusLimits], StatusServer]


@pytest.fixture
def start(sqlite_shop: Shop, broker: RecordingBroker, serve: Serve) -> Iterator[Start]:
    """Starts a status page with a test's own limits."""
    with ExitStack() as stack:

        def make(limits: StatusLimits) -> StatusServer:
            service = serve(sqlite_shop, broker)
            server = StatusServer(service, registry=CollectorRegistry(), host="127.0.0.1", port=0, limits=limits)
            stack.callback(server.stop)
            server.start()
            return server

        yield make


def connect(server: StatusServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS)


def test_silent_connections_keep_no_probe_out_and_the_oldest_make_room(start: Start) -> None:
    server = start(
        StatusLimits(connections_max=3, room_seconds_max=NEVER_SECONDS, connection_seconds_max=NEVER_SECONDS)
    )
    with ExitStack() as stack:
        silent: list[socket.socket] = []
        ended: list[bytes] = []
        for number in range(10):
            silent.append(stack.enter_context(connect(server)))
            if number >= 3:
                ended.append(silent[number - 3].recv(1))

        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/livez", timeout=WAIT_SECONDS) as answer:
            status = answer.status
        ended.append(silent[7].recv(1))

        assert status == 200
        assert ended == [b""] * 8
        silent[9].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[9].recv(1)


@pytest.mark.slow
def test_a_client_that_sends_its_request_byte_by_byte_is_cut_off(start: Start) -> None:
    server = start(StatusLimits(connection_seconds_max=0.1))
    with connect(server) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\nx: ")

        sent = 0

        def is_cut_off() -> bool:
            nonlocal sent
            try:
                slow.sendall(b"y")
            except OSError:
                return True
            sent += 1
            return False

        until(is_cut_off)

        assert sent < LINE_BYTES_MAX - 100, "what ended it was the length of its line"


def test_the_end_of_the_page_is_the_end_of_its_connections(start: Start) -> None:
    server = start(StatusLimits(connection_seconds_max=NEVER_SECONDS))
    with connect(server) as silent:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/livez", timeout=WAIT_SECONDS) as answer:
            assert answer.status == 200  # the connection before it was accepted, too

        server.stop()

        assert silent.recv(1) == b""
