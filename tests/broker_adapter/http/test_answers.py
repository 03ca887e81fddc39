"""An answer is whole, in time and of a sensible size, or it is none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from broker_adapter.http import HttpBroker, answers
from messaging.errors import BrokerUnavailable

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\ncontent-length: %d\r\n\r\n"
BODY_BYTES = 100_000


@contextmanager
def answering(head: bytes, *, trickles: bool) -> Iterator[tuple[str, list[int]]]:
    """A server that answers one request, whole or a byte every few milliseconds; and how many bytes of it went out."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[int] = []
    gone = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(65_536)
            connection.sendall(head)
            for _ in range(BODY_BYTES):
                if trickles and gone.wait(0.005):
                    return
                connection.sendall(b"\x00")
                sent.append(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
    finally:
        gone.set()
        thread.join(20)
        listener.close()


def test_an_answer_that_trickles_is_given_up_though_every_byte_comes_in_time() -> None:
    with answering(HEAD % BODY_BYTES, trickles=True) as (url, sent):
        broker = HttpBroker(url, timeout_ms=150)

        with pytest.raises(BrokerUnavailable, match="trickles"):
            broker.pull("t", "g")
        broker.close()

    assert len(sent) < BODY_BYTES // 100


def test_an_answer_that_never_ends_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ANSWER_BYTES_MAX", BODY_BYTES // 2)
    with answering(HEAD % BODY_BYTES, trickles=False) as (url, _):
        broker = HttpBroker(url)

        with pytest.raises(BrokerUnavailable, match="more than"):
            broker.pull("t", "g")
        broker.close()


def test_an_answer_without_a_length_is_none_since_its_head_may_have_broken_off() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\n\r\n"
    with answering(head, trickles=False) as (url, _):
        broker = HttpBroker(url)

        with pytest.raises(BrokerUnavailable, match="no length"):
            broker.pull("t", "g")
        broker.close()
