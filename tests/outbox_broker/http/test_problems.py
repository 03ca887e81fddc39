"""What is wrong with a request is said by a problem with a stable type, and nothing of the request is stored."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from urllib.parse import urlsplit

import msgspec
import pytest
import requests

from outbox_broker.http import responses
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer
from outbox_core.common import errors
from outbox_core.protocol.problem import ProblemKind
from tests.outbox_broker.http.publish_bodies import of_topic

Client = Callable[..., requests.Response]
JSON = {"content-type": "application/json"}
PUBLISH = "/v1/publish"
GROUP = "/v1/topics/TOPIC/groups/g"
TOO_MANY_IDS = b'{"ids": [' + b'"a",' * 1_000 + b'"a"]}'


def kind_of(response: requests.Response) -> str:
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["title"]
    assert problem["detail"]
    return str(problem["type"].removeprefix("urn:outbox-mq:problem:"))


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "where"),
    [
        (PUBLISH, b"", 400, "malformed-body", None),
        (PUBLISH, b"{", 400, "malformed-body", None),
        (PUBLISH, b'{"messages": []}}', 400, "malformed-body", None),
        (PUBLISH, b'{"messages": [{TO, "body": "\xff"}]}', 400, "malformed-body", None),
        (PUBLISH, b"[" * 100_000, 422, "wrong-shape", "$"),
        (PUBLISH, b"{}", 422, "wrong-shape", "$"),
        (PUBLISH, b"[]", 422, "wrong-shape", "$"),
        (PUBLISH, b'{"messages": {}}', 422, "wrong-shape", "$.messages"),
        (PUBLISH, b'{"messages": [{}]}', 422, "wrong-shape", "$.messages[0]"),
        (PUBLISH, b'{"messages": [{TO, "body": {"a": 1}}]}', 422, "wrong-shape", "$.messages[0].body"),
        (PUBLISH, b'{"messages": [{TO, "body": "", "ky": "k"}]}', 422, "wrong-shape", "$.messages[0]"),
        (PUBLISH, b'{"messages": [{TO, "body": "", "delay_ms": -1}]}', 422, "wrong-shape", "$.messages[0].delay_ms"),
        (
            PUBLISH, b'{"messages": [{TO, "body": "", "headers": {"a": 1}}]}', 422, "wrong-shape",
            "$.messages[0].headers[...]",
        ),
        (
            PUBLISH, b'{"messages": [{TO, "body": ""}, {TO, "body": "", "id": "a b"}]}', 422, "invalid-message",
            "$.messages[1]",
        ),
        (PUBLISH, b'{"messages": [{TO, "body": "", "key": ""}]}', 422, "invalid-message", "$.messages[0]"),
        (PUBLISH, b'{"messages": [{TO, "body": "", "headers": {"a b": ""}}]}', 422, "invalid-message", "$.messages[0]"),
        (PUBLISH, b'{"messages": [{TO, "body": "%", "encoding": "base64"}]}', 422, "invalid-message", "$.messages[0]"),
        (
            PUBLISH, b'{"messages": [{TO, "body": "", "encoding": "binary"}]}', 422, "wrong-shape",
            "$.messages[0].encoding",
        ),
        (
            PUBLISH, b'{"messages": [{TO, "body": "", "encoding": "gzip"}]}', 422, "wrong-shape",
            "$.messages[0].encoding",
        ),
        (
            PUBLISH, b'{"messages": [{TO, "body": "", "delay_ms": 1, "deliver_at_ms": 1}]}', 422, "invalid-message",
            "$.messages[0]",
        ),
        (
            PUBLISH, b'{"messages":[' + b'{TO, "body":""},' * 1_000 + b'{TO, "body":""}]}', 422, "batch-too-large",
            "$.messages",
        ),
        (GROUP + "/pull", b'{"wait_ms": 60001}', 422, "wrong-shape", "$.wait_ms"),
        (GROUP + "/pull", b'{"max_messages": 0}', 422, "wrong-shape", "$.max_messages"),
        (GROUP + "/pull", b'{"invisible_ms": 0}', 422, "wrong-shape", "$.invisible_ms"),
        (GROUP + "/ack", b'{"receipts": [1]}', 422, "wrong-shape", "$.receipts[0]"),
        (GROUP + "/ack", b'{"receipts": [' + b'"a",' * 1_000 + b'"a"]}', 422, "batch-too-large", "$.receipts"),
        (GROUP + "/nack", b'{"receipts": [], "delay_ms": -1}', 422, "wrong-shape", "$.delay_ms"),
        (GROUP + "/extend", b'{"receipts": []}', 422, "wrong-shape", "$"),
        (GROUP + "/seek", b'{"to_ms": 1}', 404, "not-found", None),
        (GROUP + "/pause", b"", 404, "not-found", None),
        (GROUP + "/dead/redrive", b"{}", 422, "wrong-shape", "$"),
        (GROUP + "/dead/redrive", b'{"ids": [], "all": true}', 422, "wrong-shape", "$"),
        (GROUP + "/dead/redrive", TOO_MANY_IDS, 422, "batch-too-large", "$.ids"),
        ("/v1/refused/retry", TOO_MANY_IDS, 422, "batch-too-large", "$.ids"),
        ("/v1/scheduled/cancel", TOO_MANY_IDS, 422, "batch-too-large", "$.ids"),
        ("/v1/scheduled/cancel", b'{"ids": ["a b"]}', 422, "invalid-message", "$.ids[0]"),
        ("/v1/topics/..%2Fx/read", b"{}", 422, "invalid-name", "path.topic"),
        ("/v1/topics/%2e%2e/read", b"{}", 422, "invalid-name", "path.topic"),
        ("/v1/topics/a%00b/read", b"{}", 422, "invalid-name", "path.topic"),
        ("/v1/topics/a%20b/read", b"{}", 422, "invalid-name", "path.topic"),
        ("/v1/topics/%F0%9F%9A%80/read", b"{}", 422, "invalid-name", "path.topic"),
        ("/v1/topics/" + "a" * 256 + "/read", b"{}", 422, "invalid-name", "path.topic"),
        ("/v1/topics/TOPIC/groups/..%2F..%2Fetc/pull", b"{}", 422, "invalid-name", "path.group"),
        ("/v1/topics/a/b/read", b"{}", 404, "unknown-route", None),
        ("/v1/topics//read", b"{}", 404, "unknown-route", None),
        ("/v1", b"{}", 404, "unknown-route", None),
        ("/livez", b"{}", 405, "method-not-allowed", None),
        ("/v1/topics", b"{}", 405, "method-not-allowed", None),
    ],
)  # fmt: skip
def test_a_wrong_request_is_answered_with_what_is_wrong_and_where(
    client: Client, shared_url: str, topic: str, path: str, body: bytes, status: int, kind: str, where: str | None
) -> None:
    sent = body.replace(b"TO,", b'"topic": "%b",' % topic.encode())
    response = client("POST", shared_url + path.replace("TOPIC", topic), data=sent, headers=JSON)

    assert (response.status_code, kind_of(response)) == (status, kind), response.text
    assert response.json().get("where") == where
    assert client("GET", f"{shared_url}/v1/topics/{topic}").status_code == 404, "nothing was stored"


def test_a_body_needs_a_media_type_that_is_spoken_here(client: Client, shared_url: str, topic: str) -> None:
    url = shared_url + PUBLISH

    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        response = client("POST", url, data=b'{"messages": []}', headers=headers)

        assert (response.status_code, kind_of(response)) == (415, "unsupported-media-type")
        assert "application/json" in response.headers["accept"]


def test_an_answer_that_the_client_does_not_accept_is_refused(client: Client, shared_url: str, topic: str) -> None:
    url = shared_url + PUBLISH

    response = client("POST", url, json=of_topic(topic, {"body": ""}), headers={"accept": "text/html"})

    assert (response.status_code, kind_of(response)) == (406, "not-acceptable")
    assert client("GET", f"{shared_url}/v1/topics/{topic}").status_code == 404, "nothing was stored"


def test_a_method_that_is_not_there_says_which_are(client: Client, shared_url: str, topic: str) -> None:
    response = client("PATCH", shared_url + GROUP.replace("TOPIC", topic))

    assert (response.status_code, kind_of(response)) == (405, "method-not-allowed")
    assert {part.strip() for part in response.headers["allow"].split(",")} == {"DELETE", "GET", "HEAD", "PUT"}


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x81\xa8messages\x90", b"\x91\x90", b"\x91\x01"]
)
def test_wrong_messagepack_is_a_problem_too(client: Client, shared_url: str, body: bytes) -> None:
    response = client(
        "POST",
        shared_url + PUBLISH,
        data=body,
        headers={"content-type": "application/msgpack", "accept": "application/msgpack"},
    )

    assert kind_of(response) in {"malformed-body", "wrong-shape", "batch-too-large"}


@pytest.mark.parametrize(
    ("value", "status", "kind"),
    [
        (b"\x90", 422, "wrong-shape"),
        (b"\x80", 422, "wrong-shape"),
        (b"\xc0", 422, "wrong-shape"),
        (b"\xa1b", 422, "wrong-shape"),
        (b"\xdd\x00\x0f\xff\xff" + b"\xc0" * 0xFFFFF, 422, "wrong-shape"),
    ],
    ids=["list", "map", "nothing", "text", "a long list"],
)
def test_what_is_no_body_in_messagepack_is_refused_with_its_place(
    client: Client, shared_url: str, topic: str, value: bytes, status: int, kind: str
) -> None:
    sound = msgspec.msgpack.encode(["m", topic, None, {}, b"b"])
    wrong = msgspec.msgpack.encode(["n", topic, None, {}, b"b"])[:-3] + value

    response = client(
        "POST", shared_url + PUBLISH, data=b"\x92" + sound + wrong, headers={"content-type": "application/msgpack"}
    )

    assert (response.status_code, kind_of(response)) == (status, kind)
    assert response.json()["where"] == "$[1][4]"
    assert client("GET", f"{shared_url}/v1/topics/{topic}").status_code == 404


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "lmit=1", "after=" + "a" * 2_000])
def test_a_wrong_query_is_a_problem(client: Client, shared_url: str, query: str) -> None:
    response = client("GET", f"{shared_url}/v1/topics?{query}")

    assert (response.status_code, kind_of(response)) == (422, "wrong-shape")


def test_a_filter_that_cannot_be_read_is_refused_with_its_place_and_cure(
    client: Client, shared_url: str, topic: str
) -> None:
    response = client("PUT", shared_url + GROUP.replace("TOPIC", topic), json={"filter": "type == 'a'"})

    assert (response.status_code, kind_of(response)) == (422, "invalid-filter")
    answer = response.json()
    assert (answer["where"], answer["position"]) == ("$.filter", 7)
    assert "write = for equal" in answer["detail"]
    assert client("GET", shared_url + GROUP.replace("TOPIC", topic)).status_code == 404


def test_a_body_over_the_bound_is_refused_by_its_length_alone(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    url = serve(HttpSettings(request_bytes_max=1_000, body_bytes_max=100)).url

    with raw(url) as connection:
        connection.sendall(
            b"POST /v1/publish HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 999999999999\r\n\r\n"
        )
        answer = connection.recv(65_536)

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_bytes_max" in answer
    assert client("GET", f"{url}/v1/topics/{topic}").status_code == 404


def test_a_body_without_a_length_is_read_up_to_the_bound(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    url = serve(HttpSettings(request_bytes_max=1_000, body_bytes_max=100)).url

    def chunks() -> Iterator[bytes]:
        yield b'{"messages": [{"body": "'
        for _ in range(100):
            yield b"x" * 100
        yield b'"}]}'

    response = client("POST", f"{url}/v1/publish", data=chunks(), headers=JSON)

    assert (response.status_code, kind_of(response)) == (413, "body-too-large")
    assert (response.json()["bound"], response.json()["limit"]) == ("request_bytes_max", 1_000)
    assert client("GET", f"{url}/v1/topics/{topic}").status_code == 404


def test_a_message_over_the_bound_is_named_and_its_batch_not_stored(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    url = serve(HttpSettings(body_bytes_max=100)).url

    response = client("POST", f"{url}/v1/publish", json=of_topic(topic, {"body": "a"}, {"body": "x" * 101}))

    assert (response.status_code, kind_of(response)) == (413, "message-too-large")
    assert (response.json()["where"], response.json()["bound"]) == ("$.messages[1].body", "body_bytes_max")
    assert client("GET", f"{url}/v1/topics/{topic}").status_code == 404


def test_a_body_that_does_not_come_is_not_waited_for(serve: Callable[..., HttpServer], topic: str) -> None:
    url = serve(HttpSettings(request_read_ms_max=100)).url

    with raw(url) as connection:
        connection.sendall(
            b"POST /v1/publish HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b'content-length: 100\r\n\r\n{"mess'
        )
        answer = connection.recv(65_536)

    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: a\r\n" * 5_000 + b"\r\n",
        b"GET /livez?" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-never-ends: " + b"a" * 300_000,
    ],
)
def test_a_head_over_the_bound_is_refused(serve: Callable[..., HttpServer], head: bytes) -> None:
    url = serve(HttpSettings(request_head_bytes_max=10_000)).url

    with raw(url) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # the server does not listen to the end
            connection.sendall(head)
        answer = connection.recv(65_536)

    assert answer.startswith(b"HTTP/1.1 431 ")


def test_what_is_no_http_at_all_ends_the_connection_and_not_the_server(client: Client, shared_url: str) -> None:
    with raw(shared_url) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")

    assert client("GET", f"{shared_url}/livez").status_code == 200


def test_every_kind_of_problem_has_its_status_and_title() -> None:
    assert set(responses.TITLES) == set(ProblemKind)
    assert all(400 <= status < 600 and title for status, title in responses.TITLES.values())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidMessage("x"), 422),
        (errors.ConfigurationError("x"), 422),
        (errors.NotSupported("x"), 422),
        (errors.NotAuthorized("x"), 403),
        (errors.BrokerRefused("x"), 422),
        (errors.BrokerThrottled("x", retry_after_ms=1), 429),
        (errors.BrokerCordoned("x", retry_after_ms=1), 503),
        (errors.StorageFailed("x"), 503),
        (errors.BrokerUnavailable("x"), 503),
        (errors.DatabaseUnavailable("x"), 500),
    ],
)
def test_every_error_of_the_engine_is_a_problem(error: errors.OutboxError, status: int) -> None:
    assert responses.of_error(error, storage_retry_after_ms=1).answer.status == status


def raw(url: str) -> closing[socket.socket]:
    """A bare connection, for what no client library would send."""
    parts = urlsplit(url)
    return closing(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=120))
