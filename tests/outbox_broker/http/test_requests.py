"""Requests over raw sockets: the same answers, whatever pieces, order and end they come with."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import msgspec
import pytest
import requests

from outbox_broker.http.admission_limits import ConcurrencyLimit
from outbox_broker.http.connection import AHEAD_BYTES_MAX
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer
from outbox_core.messages.message import Message
from tests.outbox_broker.http.publish_bodies import of_topic
from tests.outbox_broker.http.raw_exchange import barrier
from tests.outbox_broker.polling import until

Client = Callable[..., requests.Response]
DEADLINE_S = 120.0


class WatchedGate(ConcurrencyLimit):
    """A gate that tells when somebody has left it."""

    def __init__(self) -> None:
        super().__init__(name="watched", requests_max=1, retry_after_ms=1)
        self.left = threading.Event()
        self.came = 0

    def enter(self) -> None:
        """As every gate, and counted."""
        self.came += 1
        super().enter()

    def leave(self) -> None:
        """As every gate, and `left` behind it."""
        super().leave()
        self.left.set()


@contextmanager
def connected(url: str) -> Iterator[tuple[socket.socket, BinaryIO]]:
    """A connection, and what comes over it."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as made, made.makefile("rb") as reader:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield made, reader


def request(path: str, body: object, *headers: str, version: str = "1.1") -> bytes:
    data = msgspec.json.encode(body)
    lines = [
        f"POST {path} HTTP/{version}", "host: localhost", "content-type: application/json",
        f"content-length: {len(data)}", *headers,
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + data


def answer(reader: BinaryIO) -> tuple[int, dict[str, str], Any]:
    status = int(reader.readline().split()[1])
    headers = {}
    while (line := reader.readline().decode().strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = reader.read(int(headers["content-length"]))
    return status, headers, msgspec.json.decode(body) if body else None


def publish(topic: str, *ids: str, headers: tuple[str, ...] = (), version: str = "1.1") -> bytes:
    body = of_topic(topic, *({"id": one + topic, "body": "b"} for one in ids))
    return request("/v1/publish", body, *headers, version=version)


def test_a_request_that_comes_byte_by_byte_is_the_same_request(shared_url: str, topic: str) -> None:
    with connected(shared_url) as (made, reader):
        for one in publish(topic, "m"):
            made.sendall(bytes([one]))

        status, headers, found = answer(reader)

    assert status == 200
    assert found == {"results": [{"id": f"m{topic}", "status": "stored", "error": None}]}
    assert headers["content-type"] == "application/json"
    assert headers["cache-control"] == "no-store"
    assert "date" in headers


def test_requests_behind_each_other_are_answered_in_their_order(shared_url: str, topic: str) -> None:
    ids = [f"m{number}" for number in range(20)]
    with connected(shared_url) as (made, reader):
        made.sendall(b"".join(publish(topic, one) for one in ids))

        found = [answer(reader)[2]["results"][0]["id"] for _ in ids]

    assert found == [one + topic for one in ids]


def test_a_connection_carries_requests_of_either_way_in_turn(shared_url: str, topic: str) -> None:
    with connected(shared_url) as (made, reader):
        for number in range(3):
            made.sendall(publish(topic, f"m{number}"))
            assert answer(reader)[0] == 200
            made.sendall(request(f"/v1/topics/{topic}/groups/g/seek", {"to_offset": 0}))
            assert answer(reader)[0] == (404 if number == 0 else 200)
            made.sendall(request(f"/v1/topics/{topic}/groups/g/pull", {}))
            assert len(answer(reader)[2]["deliveries"]) == number + 1


@pytest.mark.parametrize(("headers", "version"), [(("connection: close",), "1.1"), ((), "1.0")])
def test_a_client_that_wants_one_answer_gets_one_and_the_end(
    shared_url: str, topic: str, headers: tuple[str, ...], version: str
) -> None:
    with connected(shared_url) as (made, reader):
        made.sendall(publish(topic, "m", headers=headers, version=version))

        status, told, _ = answer(reader)

        assert (status, told["connection"]) == (200, "close")
        assert reader.read() == b""


def test_a_client_that_goes_before_its_body_is_whole_leaves_its_place(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    url = serve(HttpSettings(publishes_max=1)).url
    for _ in range(3):
        with connected(url) as (made, reader):
            made.sendall(publish(topic, "never")[:-3])
            made.sendall(b"")
            made.shutdown(socket.SHUT_WR)
            reader.read()  # until the server has seen it

    response = client("POST", f"{url}/v1/publish", json=of_topic(topic, {"id": "m", "body": "b"}))

    assert response.json()["results"][0]["status"] == "stored"
    assert client("GET", f"{url}/v1/topics/{topic}").json()["figures"]["stored"] == 1


@pytest.mark.slow
def test_a_body_that_does_not_come_is_given_up_and_its_place_free(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    url = serve(HttpSettings(publishes_max=1, request_read_ms_max=3_000)).url
    with connected(url) as (made, reader):
        made.sendall(publish(topic, "never")[:-3])

        status, headers, problem = answer(reader)

        assert (status, headers["connection"]) == (408, "close")
        assert problem["type"].endswith("body-too-slow")
        assert reader.read() == b""
    assert client("POST", f"{url}/v1/publish", json=of_topic(topic, {"body": "b"})).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("authorization: Bearer x",), 200),
        (("sec-fetch-site: cross-site",), 403),
        (("accept: text/html",), 406),
        (("expect: 100-continue",), 200),
    ],
)
def test_heads_that_are_odd_are_answered_as_ever(
    shared_url: str, topic: str, headers: tuple[str, ...], status: int
) -> None:
    with connected(shared_url) as (made, reader):
        made.sendall(publish(topic, "m", headers=headers))

        found = answer_behind_continue(reader)

    assert found == status


def test_a_pull_whose_client_has_gone_holds_nothing_up(shared_url: str, client: Client, topic: str) -> None:
    base = f"{shared_url}/v1/topics/{topic}"
    with connected(shared_url) as (made, _):
        made.sendall(request(f"/v1/topics/{topic}/groups/g/pull", {"wait_ms": 60_000, "invisible_ms": 60_000}))
        made.shutdown(socket.SHUT_WR)
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, {"body": "b"}))

    response = client("POST", f"{base}/groups/g/pull", json={"wait_ms": 10_000})

    assert len(response.json()["deliveries"]) == 1


def test_a_pull_whose_client_has_gone_holds_nothing_up_though_requests_came_behind_it(
    shared_url: str, client: Client, topic: str
) -> None:
    base = f"{shared_url}/v1/topics/{topic}"
    with connected(shared_url) as (made, _):
        pull = request(f"/v1/topics/{topic}/groups/g/pull", {"wait_ms": 60_000, "invisible_ms": 60_000})
        made.sendall(pull + request(f"/v1/topics/{topic}/groups/g/ack", {"receipts": []}) * 3)
        made.shutdown(socket.SHUT_WR)
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, {"body": "b"}))

    response = client("POST", f"{base}/groups/g/pull", json={"wait_ms": 10_000})

    assert len(response.json()["deliveries"]) == 1


def test_no_more_than_so_many_requests_are_read_behind_a_pull_and_all_are_answered(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    url, behind = (
        serve().url,
        2 * AHEAD_BYTES_MAX // len(request(f"/v1/topics/{topic}/groups/g/seek", {"to_offset": 0})),
    )
    group = f"/v1/topics/{topic}/groups/g"
    with connected(url) as (made, reader):
        made.sendall(request(f"{group}/pull", {"wait_ms": 60_000}))
        for _ in range(behind):
            made.sendall(request(f"{group}/seek", {"to_offset": 0}))
        client("POST", f"{url}/v1/publish", json=of_topic(topic, {"body": "b"}))

        found = [answer(reader)[0] for _ in range(1 + behind)]

    assert found == [200] * (1 + behind)


def test_a_body_that_begins_behind_a_pull_is_read_to_its_end(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    url, large = serve().url, request("/v1/publish", of_topic(topic, {"body": "b" * 100_000}))
    with connected(url) as (made, reader), barrier(url) as wait:
        made.sendall(request(f"/v1/topics/{topic}/groups/g/pull", {"wait_ms": 60_000}))
        made.sendall(large[: 2 * AHEAD_BYTES_MAX])
        wait.wait()
        client("POST", f"{url}/v1/publish", json=of_topic(topic, {"body": "b"}))
        assert answer(reader)[0] == 200
        made.sendall(large[2 * AHEAD_BYTES_MAX :])

        assert answer(reader)[0] == 200


def test_requests_behind_one_that_is_refused_with_its_body_whole_are_answered(
    serve: Callable[..., HttpServer], topic: str
) -> None:
    url = serve(HttpSettings(waiting_pulls_max=1)).url
    pull = request(f"/v1/topics/{topic}/groups/g/pull", {"wait_ms": 60_000})
    with connected(url) as (made, reader), connected(url) as (waiting, _), barrier(url) as wait:
        made.sendall(pull[:-1])
        wait.wait()
        waiting.sendall(pull)
        wait.wait()
        made.sendall(pull[-1:] + publish(topic, "behind"))

        assert [answer(reader)[0] for _ in range(2)] == [429, 200]


def test_a_defect_is_an_answer_and_the_place_is_free(
    serve: Callable[..., HttpServer], client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(HttpSettings(requests_max=1))
    broker = server.services.served.broker
    assert broker is not None
    with monkeypatch.context() as broken:
        broken.setattr(broker.settler, "ack", lambda _receipts: 1 // 0)
        path = f"{server.url}/v1/topics/{topic}/groups/g/ack"
        statuses = [client("POST", path, json={"receipts": [f"{topic}/g/0.1.0"]}).status_code for _ in range(2)]

    assert statuses == [500, 500]
    assert client("POST", path, json={"receipts": [f"{topic}/g/0.1.0"]}).status_code == 200


def test_a_client_that_does_not_read_its_answers_holds_no_place_among_requests(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    server, gate = serve(), WatchedGate()
    server.services.requests = gate
    server.services.served.producers.publish([Message(id="large", topic=topic, body=b"x" * 12_000_000)])
    group = f"/v1/topics/{topic}/groups/g"
    with connected(server.url) as (deaf, _):
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        deaf.sendall(request(f"{group}/pull", {}))
        assert deaf.recv(1) == b"H"  # so much has been written that nothing more fits
        deaf.sendall(request(f"{group}/ack", {"receipts": [f"{topic}/g/0.1.0"]}))

        response = client("POST", f"{server.url}{group}/ack", json={"receipts": []})

        assert response.status_code == 200
        assert (gate.came, gate.requests) == (1, 0)


def test_a_request_refused_for_its_head_leaves_the_one_before_it_as_it_was(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    server, gate = serve(HttpSettings(request_head_bytes_max=2_000)), WatchedGate()
    server.services.publishes = gate
    with connected(server.url) as (made, reader):
        made.sendall(publish(topic, "first") + publish(topic, "refused", headers=("x-pad: " + "a" * 3_000,)))
        reader.read()  # until the server has closed it

    assert gate.left.wait(DEADLINE_S)
    pulled = client("POST", f"{server.url}/v1/topics/{topic}/groups/g/pull", json={}).json()["deliveries"]
    assert [one["id"] for one in pulled] == [f"first{topic}"]
    until(lambda: server.services.budget.leased_bytes == 0)  # given back once the answer is on its way
    assert gate.requests == 0


def test_what_comes_behind_a_request_refused_for_its_head_is_not_begun(
    serve: Callable[..., HttpServer], topic: str
) -> None:
    server, gate = serve(HttpSettings(request_head_bytes_max=2_000)), WatchedGate()
    server.services.publishes = gate
    with connected(server.url) as (made, reader):
        made.sendall(publish(topic, "refused", headers=("x-pad: " + "a" * 3_000,)) + publish(topic, "behind"))

        told = reader.read()

    assert told.startswith(b"HTTP/1.1 431 ")
    assert told.count(b"HTTP/1.1 ") == 1
    assert gate.came == 0


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"POST /v1/publish HTTP/1.1\r\nx-pad: " + b"a" * 3_000 + b"\r\n\r\n", 431),
        (b"no request at all\r\n\r\n", 400),
        (b"POST /v1/publish HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nno length\r\n", 400),
    ],
)
def test_a_request_that_is_refused_for_what_it_is_is_told_so_behind_the_answers_before_it(
    serve: Callable[..., HttpServer], topic: str, behind: bytes, status: int
) -> None:
    url = serve(HttpSettings(request_head_bytes_max=2_000)).url
    seek = request(f"/v1/topics/{topic}/groups/g/seek", {"to_offset": 0})
    with connected(url) as (made, reader):
        made.sendall(publish(topic, "first") + seek + behind[:40])
        made.sendall(behind[40:])

        found = [answer(reader)[0] for _ in range(2)]
        last, _, rest = reader.read().partition(b"\r\n")

    assert found == [200, 404]
    assert last.split()[1] == str(status).encode()
    assert b"HTTP/1.1 " not in rest


def test_a_head_that_never_ends_is_refused_even_where_it_comes_in_one_piece_behind_a_request(
    serve: Callable[..., HttpServer], topic: str
) -> None:
    url = serve(HttpSettings(request_head_bytes_max=2_000)).url
    with connected(url) as (made, reader):
        made.sendall(publish(topic, "first") + b"GET /livez HTTP/1.1\r\nx-never-ends: " + b"a" * 20_000)

        assert answer(reader)[0] == 200
        assert reader.readline().startswith(b"HTTP/1.1 431 ")


def test_the_bytes_before_a_head_are_not_counted_as_its_own(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    url = serve(HttpSettings(request_head_bytes_max=2_000)).url
    large = publish(topic, *(f"m{number:04}" for number in range(500)))
    with connected(url) as (made, reader):
        made.sendall(large[:30])
        client("GET", f"{url}/livez")  # so that the server has read what came
        made.sendall(large[30:] + publish(topic, "behind")[:30])
        assert answer(reader)[0] == 200
        made.sendall(publish(topic, "behind")[30:])

        assert answer(reader)[0] == 200


def test_a_request_that_breaks_in_its_body_is_refused_at_once(shared_url: str) -> None:
    with connected(shared_url) as (made, reader):
        made.sendall(b"POST /v1/publish HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nno length\r\n")

        assert reader.read().startswith(b"HTTP/1.1 400 ")


def test_requests_are_read_alike_whole_torn_and_behind_each_other(serve: Callable[..., HttpServer], topic: str) -> None:
    with connected(serve(HttpSettings(request_bytes_max=5_000, publishes_max=1)).url) as (made, reader):

        def told(data: bytes, *, answers: int = 1) -> list[int]:
            made.sendall(data)
            return [answer(reader)[0] for _ in range(answers)]

        assert told(publish(topic, "known")) == [200]
        assert told(publish(topic, "a") + publish(topic, "b"), answers=2) == [200, 200]
        whole = publish(topic, "c")
        made.sendall(whole[:-5])
        assert told(whole[-5:]) == [200]
        made.sendall(whole[:70])
        assert told(whole[70:] + publish(topic, "d")[:50]) == [200]
        assert told(publish(topic, "d")[50:]) == [200]
        assert told(publish(topic, "e", headers=("sec-fetch-site: cross-site",))) == [403]
        assert told(request(f"/v1/topics/{topic}/groups/g/pull", {})) == [200]
        assert told(publish(topic, "f")) == [200]
        assert told(publish(topic, *(f"too many {number}" for number in range(200)))) == [413]


def test_a_later_request_of_a_connection_is_let_in_no_further_than_its_bound(
    serve: Callable[..., HttpServer], topic: str
) -> None:
    server = serve()
    with connected(server.url) as (made, reader):
        made.sendall(publish(topic, "a"))
        assert answer(reader)[0] == 200
        server.services.publishes.requests_max = 0

        made.sendall(publish(topic, "b"))
        status, headers, problem = answer(reader)

    assert (status, problem["bound"]) == (429, "publishes_max")
    assert "retry-after" in headers


def answer_behind_continue(reader: BinaryIO) -> int:
    status = answer_or_continue(reader)
    return answer_or_continue(reader) if status == 100 else status


def answer_or_continue(reader: BinaryIO) -> int:
    status = int(reader.readline().split()[1])
    while reader.readline().strip():
        pass
    return status
