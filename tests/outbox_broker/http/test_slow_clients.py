"""Clients that send slowly, or not at all, or do not read: each is let go in time, and what it held is free again."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from itertools import chain, repeat
from pathlib import Path

import msgspec
import pytest

from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer, Tls
from outbox_core.protocol.problem import ProblemKind
from tests.outbox_broker.http.raw_exchange import Answer, RawConnection, ask, barrier
from tests.outbox_broker.http.raw_requests.raw_request import (
    BODY,
    CHUNKED,
    GOOD,
    HOST,
    JSON,
    LENGTH,
    PUBLISH,
    livez,
    publish,
    request,
)

MIB = 1024 * 1024
SHORT_MS = 200
"""For what no client of these tests does at all, such as to read."""
PATIENCE_MS = 3_000
"""For what a client does in several steps, or begins: longer than a machine may stop it between two of them."""
LONG_MS = 600_000
SMALL_BUFFER = 4 * 1024
WITNESSES = 5
DROP_S = 0.02
"""Between two pieces: so many as come in the time for a request are below all bounds on their number and bytes."""
REFUSED = 200
ROUNDS = 50

_ALL = b'{"invisible_ms":600000,"max_messages":10}'
PULL_ALL = request("POST /v1/topics/corpus/groups/g/pull HTTP/1.1", HOST, JSON, f"Content-Length: {len(_ALL)}",
                   body=_ALL)  # fmt: skip

_READ = b'{"max_messages":10,"offset":0}'
READ_ALL = request("POST /v1/topics/corpus/read HTTP/1.1", HOST, JSON, f"Content-Length: {len(_READ)}", body=_READ)

Serve = Callable[..., HttpServer]


def kind_of(answer: Answer | None) -> str:
    assert answer is not None
    return str(json.loads(answer.body)["type"].rpartition(":")[2])


def long_publish(size: int, *lines: str) -> bytes:
    """A publish of two messages in MessagePack, whose body has so many bytes."""
    records = [["m", "corpus", None, {}, b"b" * (size // 2)], ["n", "corpus", None, {}, b""]]
    records[1][4] = b"b" * (size - len(msgspec.msgpack.encode(records)) - 3)
    body = msgspec.msgpack.encode(records)
    return request(PUBLISH, HOST, "Content-Type: application/msgpack", f"Content-Length: {size}", *lines, body=body)


def drip(connection: RawConnection, pieces: Iterator[bytes], url: str) -> None:
    """Send piece after piece, each when the server has read the one before, until it answers or closes.

    The witnesses are silent: each has its time for a head, one after the other, and none of them may outlive it.
    """
    pause = threading.Event()
    with barrier(url) as waits, ExitStack() as stack:
        for _ in range(WITNESSES):
            witness = stack.enter_context(RawConnection(url))
            while not witness.has_news():
                connection.send(next(pieces))
                waits.wait()
                if connection.has_news():
                    return
                pause.wait(DROP_S)
    raise AssertionError("the server waits on and on")


@pytest.fixture
def impatient(serve: Serve) -> HttpServer:
    """A server that waits for requests for a short time only, but long for all else."""
    return serve(
        HttpSettings(
            request_head_ms_max=PATIENCE_MS,
            request_read_ms_max=PATIENCE_MS,
            request_head_bytes_max=MIB,
            response_write_ms_max=LONG_MS,
            keep_alive_ms=LONG_MS,
        )
    )


@pytest.mark.slow
def test_a_client_that_says_nothing_is_let_go_without_a_word(impatient: HttpServer) -> None:
    with RawConnection(impatient.url) as connection:
        assert connection.read_to_end() == b""


@pytest.mark.slow
@pytest.mark.parametrize("begun", [b"G", b"GET /livez HTTP/1.1\r\n", livez()[:-2], b"POST / HTTP/1.1\r\nHost: lo"])
def test_a_head_that_stops_is_answered_408_and_its_connection_closed(impatient: HttpServer, begun: bytes) -> None:
    with RawConnection(impatient.url) as connection:
        connection.send(begun)

        answer = connection.read_answer()

        assert (answer and answer.status, kind_of(answer)) == (408, ProblemKind.HEAD_TOO_SLOW)
        assert answer is not None
        assert answer.header("connection") == "close"
        assert connection.read_to_end() == b""


@pytest.mark.slow
def test_empty_lines_do_not_keep_a_connection(impatient: HttpServer) -> None:
    with RawConnection(impatient.url) as connection:
        drip(connection, repeat(b"\r\n"), impatient.url)

        answer = connection.read_answer()

        assert answer is None or answer.status in {400, 408}
        assert connection.read_to_end() == b""


@pytest.mark.slow
def test_a_head_in_drips_is_given_up_however_steadily_it_comes(impatient: HttpServer) -> None:
    head = chain([b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-A: "], repeat(b"a"))
    with RawConnection(impatient.url) as connection:
        drip(connection, head, impatient.url)

        assert kind_of(connection.read_answer()) == ProblemKind.HEAD_TOO_SLOW
        assert connection.read_to_end() == b""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framing", "drops"),
    [
        ("Content-Length: 1000000", b" "),
        (CHUNKED, b"1\r\n \r\n"),
        (CHUNKED, b"1;a=" + b"a" * 20 + b"\r\n \r\n"),
    ],
    ids=["length", "chunks", "extensions"],
)
def test_a_body_in_drips_is_given_up_however_steadily_it_comes(
    impatient: HttpServer, framing: str, drops: bytes
) -> None:
    with RawConnection(impatient.url) as connection:
        drip(connection, chain([publish(framing, body=b"")], repeat(drops)), impatient.url)

        answer = connection.read_answer()

        assert (answer and answer.status, kind_of(answer)) == (408, ProblemKind.BODY_TOO_SLOW)
        assert connection.read_to_end() == b""


@pytest.mark.slow
def test_trailers_in_drips_are_given_up_too(impatient: HttpServer) -> None:
    begun = publish(CHUNKED, body=b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY))
    with RawConnection(impatient.url) as connection:
        drip(connection, chain([begun, b"X-A: "], repeat(b"a")), impatient.url)

        answer = connection.read_answer()

        assert answer is not None
        assert answer.status in {400, 408}
        assert connection.read_to_end() == b""


@pytest.mark.slow
def test_a_client_that_waits_for_100_and_then_sends_nothing_is_given_up(impatient: HttpServer) -> None:
    with RawConnection(impatient.url) as connection:
        connection.send(publish(LENGTH, "Expect: 100-continue", body=b""))

        interim, answer = connection.read_answer(), connection.read_answer()

        assert interim is not None
        assert interim.status == 100
        assert kind_of(answer) == ProblemKind.BODY_TOO_SLOW
        assert connection.read_to_end() == b""


@pytest.mark.slow
def test_a_request_behind_an_answered_one_is_bounded_in_time_as_well(impatient: HttpServer) -> None:
    with RawConnection(impatient.url) as connection:
        connection.send(GOOD + livez()[:20])

        answers = [connection.read_answer(), connection.read_answer()]

        assert [answer and answer.status for answer in answers] == [200, 408]
        assert connection.read_to_end() == b""


@pytest.mark.slow
def test_a_refused_body_that_does_not_come_is_not_waited_for(impatient: HttpServer) -> None:
    with RawConnection(impatient.url) as connection:
        connection.send(request("POST /nowhere HTTP/1.1", HOST, JSON, LENGTH))

        answer = connection.read_answer()

        assert answer is not None
        assert answer.status == 404
        assert connection.read_to_end() == b""


@pytest.mark.slow
def test_a_slow_body_frees_its_place_and_its_bytes(serve: Serve) -> None:
    length = MIB
    url = serve(HttpSettings(publishes_max=1, request_read_ms_max=PATIENCE_MS, work_bytes_max=3 * length)).url
    for _ in range(3):
        with RawConnection(url) as connection:
            connection.send(publish(f"Content-Length: {length}", body=b"{"))
            assert kind_of(connection.read_answer()) == ProblemKind.BODY_TOO_SLOW

    answer = ask(url, long_publish(length, "Connection: close"))

    assert answer is not None
    assert answer.status == 200


def test_an_idle_connection_ends_after_its_keep_alive_without_a_word(serve: Serve) -> None:
    url = serve(HttpSettings(keep_alive_ms=SHORT_MS, request_head_ms_max=LONG_MS)).url
    with RawConnection(url) as connection:
        connection.send(GOOD)
        answer = connection.read_answer()

        assert answer is not None
        assert answer.status == 200
        assert connection.read_to_end() == b""


def test_a_server_that_stops_ends_an_idle_connection_and_does_not_wait_to_reset_it(serve: Serve) -> None:
    server = serve(HttpSettings(keep_alive_ms=LONG_MS, request_head_ms_max=LONG_MS))
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=LONG_MS / 1000)) as client:
        client.request("GET", "/livez")
        client.getresponse().read()
        server.stop()

        assert client.sock.recv(1) == b""


@pytest.mark.slow
def test_the_time_for_a_head_begins_with_its_first_byte_and_not_with_the_connection(serve: Serve) -> None:
    url = serve(HttpSettings(keep_alive_ms=LONG_MS, request_head_ms_max=PATIENCE_MS)).url
    with RawConnection(url) as idle, RawConnection(url) as silent:
        idle.send(livez())
        assert idle.read_answer() is not None
        assert silent.read_to_end() == b"", "longer than a head may take"

        idle.send(livez())
        answer = idle.read_answer()

    assert answer is not None
    assert answer.status == 200


def test_a_refused_body_that_comes_while_the_answer_is_not_read_is_no_request(serve: Serve) -> None:
    url = serve(HttpSettings(response_write_ms_max=LONG_MS), send_bytes=SMALL_BUFFER).url
    body = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500
    refused = request("POST /nowhere HTTP/1.1", HOST, JSON, f"Content-Length: {len(body)}", body=body)
    with RawConnection(url, receive_bytes=SMALL_BUFFER) as deaf, barrier(url) as waits:
        sending = threading.Thread(target=deaf.send, args=(refused * REFUSED + livez(),))
        sending.start()
        for _ in range(ROUNDS):  # the server's buffer is full, and what has come behind the head is read
            waits.wait()

        answers = [deaf.read_answer() for _ in range(REFUSED + 1)]

        sending.join()
    assert [answer and answer.status for answer in answers] == [404] * REFUSED + [200]


def test_a_client_that_closes_behind_its_request_may_send_a_refused_body_to_its_end(shared_url: str) -> None:
    piece = b" " * (MIB // 8)
    with RawConnection(shared_url) as client:
        client.send(request("POST /nowhere HTTP/1.1", HOST, JSON, f"Content-Length: {6 * len(piece)}",
                            "Connection: close") + piece)  # fmt: skip

        answer = client.read_answer()
        assert client.read_to_end() == b""
        taken = [client.send(piece) for _ in range(5)]

    assert answer is not None
    assert (answer.status, answer.header("connection")) == (404, "close")
    assert taken == [True] * 5, "a reset could have destroyed the answer"


@pytest.fixture
def stored_24_mib() -> Callable[[str], None]:
    """Store messages whose pull is far more than the kernel's buffers take."""

    def store(url: str) -> None:
        large = b'{"messages":[{"topic":"corpus","body":"%b"}]}' % (b"x" * 8 * MIB)
        for _ in range(3):
            stored = ask(url, publish(f"Content-Length: {len(large)}", "Connection: close", body=large))
            assert stored is not None
            assert stored.status == 200

    return store


def test_a_client_that_does_not_read_its_answer_is_reset(serve: Serve, stored_24_mib: Callable[[str], None]) -> None:
    url = serve(HttpSettings(response_write_ms_max=SHORT_MS)).url
    stored_24_mib(url)

    with RawConnection(url, receive_bytes=SMALL_BUFFER) as deaf:
        deaf.send(PULL_ALL)

        deaf.wait_for_reset()


@pytest.mark.slow
def test_an_answer_that_nobody_reads_counts_against_the_budget_until_its_time_is_up(
    serve: Serve, stored_24_mib: Callable[[str], None]
) -> None:
    url = serve(HttpSettings(response_write_ms_max=3 * PATIENCE_MS, work_bytes_max=40 * MIB)).url
    stored_24_mib(url)
    room = 19 * MIB
    one_more = long_publish(room, "Connection: close")

    with RawConnection(url, receive_bytes=SMALL_BUFFER) as deaf:
        deaf.send(PULL_ALL)
        deaf.read_some()
        answers = [ask(url, one_more)]
        while answers[-1] is not None and answers[-1].status == 503:
            answers.append(ask(url, one_more))

    *refused, accepted = answers
    assert accepted is not None
    assert accepted.status == 200
    assert refused, "the answer that is not read was counted"
    for answer in refused:
        assert kind_of(answer) == ProblemKind.OVERLOADED
        assert answer is not None
        assert int(answer.header("retry-after") or 0) >= 1


def test_an_answer_whose_reader_has_gone_is_counted_no_more(serve: Serve, stored_24_mib: Callable[[str], None]) -> None:
    url = serve(HttpSettings(response_write_ms_max=LONG_MS, work_bytes_max=40 * MIB)).url
    stored_24_mib(url)
    room = 19 * MIB
    one_more = long_publish(room, "Connection: close")

    with RawConnection(url, receive_bytes=SMALL_BUFFER) as deaf:
        deaf.send(PULL_ALL)
        deaf.read_some()
        refused = ask(url, one_more)
    answer = ask(url, one_more)
    while answer is not None and answer.status == 503:  # until the server has seen that the reader is gone
        answer = ask(url, one_more)

    assert kind_of(refused) == ProblemKind.OVERLOADED
    assert answer is not None
    assert answer.status == 200


def test_a_client_that_asks_on_and_on_without_reading_is_not_read_from_and_reset(serve: Serve) -> None:
    url = serve(HttpSettings(response_write_ms_max=SHORT_MS)).url
    schema = request("GET /openapi.json HTTP/1.1", HOST) * 100
    sent = 0
    with RawConnection(url, receive_bytes=SMALL_BUFFER) as deaf:
        while deaf.send(schema):  # blocks when the server reads no more, and fails when it resets
            sent += len(schema)
            assert sent < 64 * MIB, "the server read on and on"

    assert ask(url, livez("Connection: close")) is not None


@pytest.mark.slow
def test_over_tls_a_large_answer_comes_whole_and_a_client_that_does_not_read_is_let_go(
    serve: Serve, certificate: tuple[Path, Path]
) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    url = serve(HttpSettings(response_write_ms_max=3 * PATIENCE_MS, work_bytes_max=40 * MIB), tls=Tls(*certificate)).url
    large = b'{"messages":[{"topic":"corpus","body":"%b"}]}' % (b"x" * 8 * MIB)
    with RawConnection(url, tls=context) as client:
        for _ in range(3):
            client.send(publish(f"Content-Length: {len(large)}", body=large))
            stored = client.read_answer()
            assert stored is not None
            assert stored.status == 200

        client.send(READ_ALL)
        read = client.read_answer()
        with RawConnection(url, tls=context, receive_bytes=SMALL_BUFFER) as deaf:
            deaf.send(READ_ALL)
            deaf.read_some()
            room = 19 * MIB
            client.send(long_publish(room))
            refused = client.read_answer()
            accepted = ask_until_stored(url, room, context)

    assert read is not None
    assert len(read.body) > 24 * MIB
    assert kind_of(refused) == ProblemKind.OVERLOADED
    assert accepted.status == 200


def ask_until_stored(url: str, room: int, context: ssl.SSLContext) -> Answer:
    """Publish so many bytes again and again until there is room for them."""
    while True:
        with RawConnection(url, tls=context) as connection:
            connection.send(long_publish(room))
            answer = connection.read_final()
        assert answer is not None
        if answer.status != 503:
            return answer


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x00", b"\x16\x03\x01\x00\xa1\x01\x00"])
def test_a_client_that_does_not_shake_hands_is_let_go(
    serve: Serve, certificate: tuple[Path, Path], begun: bytes
) -> None:
    server = serve(HttpSettings(request_head_ms_max=SHORT_MS), tls=Tls(*certificate))
    with RawConnection(server.url) as connection:
        connection.send(begun)

        connection.read_to_end()  # nothing, or an alert


def test_a_head_over_a_finished_request_does_not_inherit_its_lateness(impatient: HttpServer) -> None:
    with RawConnection(impatient.url) as connection:
        for _ in range(3):
            connection.send(request(PUBLISH, HOST, JSON, LENGTH)[:-2])
            connection.send(b"\r\n" + BODY)
            answer = connection.read_answer()
            assert answer is not None
            assert answer.status == 200
