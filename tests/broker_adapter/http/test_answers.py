"""An answer is whole, in time and of a sensible size, or it is none."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count, repeat
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.http import HttpBroker
from broker_adapter.http.http_transport import read_answer
from broker_adapter.http.request_codec import (
    ANSWER_BYTES_MAX,
    HEAD_BYTES_MAX,
    ExchangeFailed,
    HttpResponse,
    Repeat,
    parse_answer,
)
from outbox_core.common.deadline_socket import DeadlineSocket
from outbox_core.common.errors import BrokerUnavailable

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\ncontent-length: %d\r\n\r\n"
BODY_BYTES = 100_000
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\ncontent-length:  5 \r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\ntrailer: t\r\n\r\n"


@contextmanager
def answering(pieces: Iterable[bytes], *, pause_s: float = 0) -> Iterator[tuple[str, list[int]]]:
    """A server that answers one request with these pieces, each behind a pause; and the sizes of those that it sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[int] = []
    gone = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(65_536)
            for piece in pieces:
                if gone.wait(pause_s):
                    return
                connection.sendall(piece)
                sent.append(len(piece))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
    finally:
        gone.set()
        thread.join(120)
        listener.close()


@pytest.mark.slow
@pytest.mark.parametrize("start", [HEAD % BODY_BYTES, b"HTTP/1.1 200 OK\r\nx: "], ids=["body", "head"])
def test_an_answer_that_trickles_is_given_up_though_every_byte_comes_in_time(start: bytes) -> None:
    with answering(chain([start], repeat(b"x", BODY_BYTES // 2)), pause_s=0.005) as (url, sent):
        broker = HttpBroker(url, timeout_ms=3_000)

        with pytest.raises(BrokerUnavailable, match="in time"):
            broker.pull("t", "g")
        broker.close()

    assert len(sent) < BODY_BYTES // 10


@pytest.mark.slow
def test_the_answer_of_a_long_poll_has_the_time_that_it_was_asked_to_wait() -> None:
    body = b"\x90"
    with answering([HEAD % len(body) + body], pause_s=4) as (url, _):
        broker = HttpBroker(url, timeout_ms=3_000)

        assert broker.pull("t", "g", wait_ms=20_000) == []
        broker.close()


class Pieces:
    """A connection that brings these pieces, then ends."""

    def __init__(self, *pieces: bytes) -> None:
        self.left = deque(pieces)

    def settimeout(self, _timeout_s: float, /) -> None:
        """Does nothing: each piece is there."""

    def recv(self, _size: int, /) -> bytes:
        """The next piece."""
        return self.left.popleft() if self.left else b""


def read(*pieces: bytes, deadline_s: float = 20, piece_s: float = 0) -> HttpResponse:
    """The answer in these pieces, each of which takes some time of a clock of their own."""
    now_s = count(0.0, piece_s)
    connection = cast("socket.socket", Pieces(*pieces))
    timed = DeadlineSocket(
        connection, deadline_s=deadline_s, paying_bytes_max=ANSWER_BYTES_MAX, monotonic_s=lambda: next(now_s)
    )
    return read_answer(timed)


@pytest.mark.parametrize(
    "start",
    [PLAIN[:-5], CHUNKED[:-5], b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 ", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 100 X"],
    ids=["body", "chunks", "head", "status", "interim"],
)
def test_whatever_part_of_an_answer_trickles_ends_at_the_deadline(start: bytes) -> None:
    with pytest.raises(ExchangeFailed, match="trickles") as caught:
        read(start[:-1], *[start[-1:]] * 1_000, deadline_s=50, piece_s=20)

    assert caught.value.repeat is Repeat.NEVER


def test_an_answer_in_chunks_has_a_second_for_each_mib_that_came_however_small_the_next_chunk_is() -> None:
    start = CHUNKED.partition(b"3;x=y")[0] + b"200000\r\n" + b"b" * (2 * 1024 * 1024) + b"\r\n"

    answer = read(start, *[b"1\r\nb\r\n"] * 100, b"0\r\n\r\n", deadline_s=0.5, piece_s=0.01)

    assert len(answer.content) == 2 * 1024 * 1024 + 100


def test_an_answer_that_never_ends_is_not_kept() -> None:
    with answering([HEAD % (ANSWER_BYTES_MAX + 1)]) as (url, _):
        broker = HttpBroker(url)

        with pytest.raises(BrokerUnavailable, match="more than"):
            broker.pull("t", "g")
        broker.close()


def test_an_answer_without_a_length_is_none_since_its_head_may_have_broken_off() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\n\r\n"
    with answering([head]) as (url, _):
        broker = HttpBroker(url)

        with pytest.raises(BrokerUnavailable, match="no length"):
            broker.pull("t", "g")
        broker.close()


@pytest.mark.parametrize(
    "answer", [PLAIN, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\na: b\r\n\r\n" + PLAIN]
)
@given(data=st.data())
def test_an_answer_is_the_same_in_whatever_pieces_it_comes(answer: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True) if end > start]

    found = read(*pieces)

    assert (found.status_code, found.content, found.stays_open) == (200, b"hello", True)


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED])
def test_an_answer_that_is_cut_anywhere_is_none(answer: bytes) -> None:
    for size in range(len(answer)):
        with pytest.raises(ExchangeFailed):
            read(answer[:size])


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: -1", b"content-length: 0x5", b"content-length: 5, 5", b"content-length: ", b"nothing",
        b"content-length: 5\r\ncontent-length: 6", b"transfer-encoding: gzip, chunked", b"content-length: \xb2",
        b"content-length: 9999999999999999",
    ],
)  # fmt: skip
def test_an_answer_whose_end_is_not_certain_is_none(head: bytes) -> None:
    with pytest.raises(ExchangeFailed):
        read(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\nhello")


@pytest.mark.parametrize("size", [b"g", b"-1", b"", b"fffffffffffffffff", b"5" * 10_000])
def test_a_chunk_without_a_sensible_size_ends_the_answer(size: bytes) -> None:
    with pytest.raises(ExchangeFailed):
        read(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + size + b"\r\nhello\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "start", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/2 200 OK\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 200_000]
)
def test_what_is_not_http_is_known_by_its_beginning(start: bytes) -> None:
    with pytest.raises(ExchangeFailed, match="HTTP"):
        read(start)


def test_heads_that_announce_an_answer_without_end_are_given_up() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    endless = Pieces(*[interim] * (10 * HEAD_BYTES_MAX // len(interim)))

    with pytest.raises(ExchangeFailed, match="head"):
        read_answer(DeadlineSocket(cast("socket.socket", endless), deadline_s=1, monotonic_s=lambda: 0))
    assert sum(map(len, endless.left)) > 8 * HEAD_BYTES_MAX


@pytest.mark.parametrize("head_bytes", [HEAD_BYTES_MAX, HEAD_BYTES_MAX + 1])
def test_heads_have_one_bound_in_whatever_pieces_they_come(head_bytes: int) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    start, end = interim + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: ", b"\r\n\r\nok"
    answer = start + b"x" * (head_bytes - len(start + end) + len(b"ok")) + end

    for pieces in [answer], [answer[:50], answer[50:]], [bytes([byte]) for byte in answer]:
        if head_bytes > HEAD_BYTES_MAX:
            with pytest.raises(ExchangeFailed, match="head"):
                read(*pieces)
        else:
            assert read(*pieces).content == b"ok"


def test_a_head_that_does_not_end_is_given_up() -> None:
    with pytest.raises(ExchangeFailed, match="head"):
        read(b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n" * 1_000] * 1_000)


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b"Content-Type: a/b", b"Connection: Close"),
        PLAIN + b"and more",
        CHUNKED.replace(b"chunked\r\n", b"chunked\r\ncontent-length: 5\r\n"),
    ],
)
def test_a_connection_that_may_not_carry_on_is_not_used_again(answer: bytes) -> None:
    found = read(answer)

    assert found.content == b"hello"
    assert not found.stays_open


@pytest.mark.parametrize(
    ("first", "more"),
    [(b"0\r\n", (b"a: " + b"b" * 4_000 + b"\r\n") * 200), (b"", (b"1;" + b"e" * 4_000 + b"\r\nx\r\n") * 200)],
    ids=["trailers", "extensions"],
)
def test_what_frames_a_body_in_chunks_is_bounded_as_the_body_is(first: bytes, more: bytes) -> None:
    parser = parse_answer()
    next(parser)
    parser.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + first)

    def send_for_ever() -> None:
        for _ in range(2 * ANSWER_BYTES_MAX // len(more)):
            parser.send(more)

    with pytest.raises(ExchangeFailed, match="has more than"):
        send_for_ever()
