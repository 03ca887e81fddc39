"""What a peer sends or takes a byte at a time is over by the deadline, by any door of a socket, plain or TLS."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from outbox_core.common.deadline_socket import BYTES_A_SECOND_MIN, DeadlineSocket
from tests.broker_adapter.http.test_tls import certificate

DEADLINE_S = 50
"""By a clock that goes on by a second each time it is asked: so many acts are within it, whatever the machine does."""
WAIT_SECONDS = 120


def ticking() -> Callable[[], float]:
    seconds = itertools.count()
    return lambda: float(next(seconds))


@contextmanager
def pair(folder: Path | None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection, the second one a server's; with a folder by TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), WAIT_SECONDS)
        far, _ = listener.accept()
    far.settimeout(WAIT_SECONDS)
    if folder is not None:
        tls = certificate(folder, address="127.0.0.1")
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        theirs.load_cert_chain(tls.certificate, tls.key)
        ends: list[socket.socket] = []
        thread = threading.Thread(target=lambda: ends.append(theirs.wrap_socket(far, server_side=True)))
        thread.start()
        ours = ssl.create_default_context(cafile=str(tls.certificate))
        near = ours.wrap_socket(near, server_hostname="127.0.0.1")
        thread.join()
        [far] = ends
    with near, far:
        yield near, far


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of a connection."""
    with pair(tmp_path if request.param == "tls" else None) as made:
        yield made


@contextmanager
def trickled(far: socket.socket, piece: bytes) -> Iterator[None]:
    """Send this again and again."""
    is_over = threading.Event()

    def send() -> None:
        with suppress(OSError):
            while not is_over.wait(0.001):
                far.sendall(piece)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(WAIT_SECONDS)


@pytest.mark.parametrize(
    "read",
    [
        lambda timed: timed.recv(1),
        lambda timed: timed.recv_into(bytearray(1)),
        lambda timed: timed.makefile("rb").read(1_000_000),
        lambda timed: timed.makefile("rb").readline(),
    ],
    ids=["recv", "recv_into", "file", "line"],
)
def test_what_comes_a_byte_at_a_time_is_read_until_the_deadline(
    ends: tuple[socket.socket, socket.socket], read: Callable[[DeadlineSocket], object]
) -> None:
    near, far = ends
    timed = DeadlineSocket(near, deadline_s=DEADLINE_S, monotonic_s=ticking())

    def read_on() -> None:
        for _ in range(10 * DEADLINE_S):
            read(timed)

    with trickled(far, b"x"), pytest.raises(TimeoutError):
        read_on()


def test_what_is_taken_a_little_at_a_time_is_sent_until_the_deadline(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    timed = DeadlineSocket(near, deadline_s=DEADLINE_S, monotonic_s=ticking())
    is_over = threading.Event()

    def take() -> None:
        with suppress(OSError):
            while not is_over.is_set():
                far.recv(16_384)

    def send_on() -> None:
        for _ in range(10 * DEADLINE_S):
            timed.sendall(b"x" * 100_000)

    taker = threading.Thread(target=take)
    taker.start()
    try:
        with pytest.raises(TimeoutError):
            send_on()
    finally:
        is_over.set()
        near.shutdown(socket.SHUT_RDWR)
        taker.join(WAIT_SECONDS)


def test_a_time_out_that_is_set_anew_is_a_deadline_of_all_that_follows(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    timed = DeadlineSocket(near, deadline_s=-1, monotonic_s=ticking())
    far.sendall(b"x" * 100)

    with pytest.raises(TimeoutError):
        timed.recv(1)
    timed.settimeout(10)
    read = [timed.recv(1) for _ in range(9)]
    with pytest.raises(TimeoutError):
        timed.recv(1)
    timed.extend(5)
    read.append(timed.recv(1))
    timed.settimeout(None)
    read += [timed.recv(1) for _ in range(90)]

    assert b"".join(read) == b"x" * 100


@pytest.mark.parametrize("paying_bytes_max", [0, BYTES_A_SECOND_MIN // 4, BYTES_A_SECOND_MIN])
def test_what_comes_buys_a_second_a_mib_up_to_its_bound(
    ends: tuple[socket.socket, socket.socket], paying_bytes_max: int
) -> None:
    near, far = ends
    now_s = [0.0]
    timed = DeadlineSocket(near, deadline_s=1, paying_bytes_max=paying_bytes_max, monotonic_s=lambda: now_s[0])
    size = BYTES_A_SECOND_MIN // 2
    sending = threading.Thread(target=far.sendall, args=(b"x" * (size + 2),))
    sending.start()

    with timed.makefile("rb", buffering=1) as file:
        assert len(file.read(size)) == size
        sending.join(WAIT_SECONDS)  # what is left is there, and need not be waited for
        now_s[0] = 1 + min(size, paying_bytes_max) / BYTES_A_SECOND_MIN - 0.2
        assert file.read(1) == b"x"
        now_s[0] += 0.21
        with pytest.raises(TimeoutError):
            file.read(1)


def test_all_that_is_sent_arrives_and_a_file_reads_on_behind_the_close(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    timed = DeadlineSocket(near, deadline_s=WAIT_SECONDS * 1_000, monotonic_s=lambda: 0)
    sent = bytes(range(256)) * 4_000
    came = bytearray()

    def echo() -> None:
        while len(came) < len(sent):
            came.extend(far.recv(65_536))
        far.sendall(came)

    echoing = threading.Thread(target=echo)
    echoing.start()
    timed.sendall(sent)
    with timed.makefile("rb") as file:
        timed.close()
        returned = file.read(len(sent))
    echoing.join(WAIT_SECONDS)

    assert (bytes(came) == sent, returned == sent) == (True, True)
    assert near.fileno() == -1


def test_a_peer_that_does_nothing_is_waited_for_until_the_deadline_and_no_longer(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = ends

    with pytest.raises(TimeoutError):
        DeadlineSocket(near, deadline_s=0.2, monotonic_s=lambda: 0).recv(1)
