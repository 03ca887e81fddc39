"""What the server says when the disk is slow, or fails: come back later, and nothing was stored."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from outbox_broker.http.admission_limits import ByteBudget
from outbox_broker.http.content_negotiation import LONG_BYTES
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.responses import Problem
from outbox_broker.http.server import HttpServer
from outbox_broker.log.storage import DiskStorage
from outbox_core.messages.message import Message, PublishResult
from tests.outbox_broker.http.raw_exchange import RawConnection, barrier
from tests.outbox_broker.http.raw_requests.raw_request import HOST, JSON, livez, request

Client = Callable[..., requests.Response]


class StuckDisk(DiskStorage):
    """A disk whose syncs wait for `free`, and then fail if told so."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.syncing = threading.Event()
        self.failure: OSError | None = None

    def sync(self, descriptor: int) -> None:
        self.syncing.set()
        assert self.free.wait(120)
        if self.failure is not None:
            raise self.failure
        super().sync(descriptor)


def publish(url: str, topic: str, body: str = "b") -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        message = {"messages": [{"topic": topic, "body": body}]}
        return session.post(f"{url}/v1/publish", json=message, timeout=120)


def test_publishes_beyond_the_bound_are_told_to_come_back_and_then_succeed(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    disk = StuckDisk()
    server = serve(HttpSettings(publishes_max=1, publish_threads=1), storage=disk)
    disk.syncing.clear()
    disk.free.clear()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(publish, server.url, topic)
        assert disk.syncing.wait(120)
        refused = publish(server.url, topic)
        disk.free.set()
        accepted = first.result(120)

    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["bound"] == "publishes_max"
    assert accepted.json()["results"][0]["status"] == "stored"
    assert publish(server.url, topic).status_code == 200
    assert client("GET", f"{server.url}/v1/topics/{topic}").json()["figures"]["stored"] == 2


def test_a_head_request_whose_body_comes_when_there_is_too_much_to_do_is_answered_without_a_body(
    serve: Callable[..., HttpServer], topic: str
) -> None:
    disk = StuckDisk()
    url = serve(HttpSettings(requests_max=1), storage=disk).url
    declare = request(f"PUT /v1/topics/{topic}/groups/g HTTP/1.1", HOST, JSON, "Content-Length: 2", body=b"{}")
    with RawConnection(url) as client, RawConnection(url) as operator, barrier(url) as waits:
        client.send(request(f"HEAD /v1/topics/{topic} HTTP/1.1", HOST, "Content-Length: 1"))
        waits.wait()
        disk.syncing.clear()
        disk.free.clear()
        operator.send(declare)
        assert disk.syncing.wait(120)

        client.send(b"x" + livez())
        refused, following = client.read_answer(is_head=True), client.read_answer()

        disk.free.set()
        declared = operator.read_answer()
    assert [answer and answer.status for answer in (refused, following, declared)] == [429, 200, 200]


def test_long_publishes_hold_no_short_ones_up(
    serve: Callable[..., HttpServer], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(HttpSettings(publish_threads=1))
    publisher, begun, free = server.services.served.producers, threading.Event(), threading.Event()

    def store(messages: Sequence[Message], **more: Any) -> list[PublishResult]:
        if len(messages[0].body) > LONG_BYTES:
            begun.set()
            assert free.wait(120)
        return plain(messages, **more)

    plain = publisher.publish
    monkeypatch.setattr(publisher, "publish", store)
    with ThreadPoolExecutor(3) as pool:
        long = [pool.submit(publish, server.url, topic, "b" * (LONG_BYTES + 1)) for _ in range(3)]
        try:
            assert begun.wait(120)
            assert publish(server.url, topic).status_code == 200
        finally:
            free.set()
        assert [one.result(120).status_code for one in long] == [200] * 3


def test_a_disk_that_fails_is_said_and_nothing_is_acknowledged(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    disk = StuckDisk()
    server = serve(storage=disk)
    assert publish(server.url, topic).status_code == 200
    disk.failure = OSError(errno.EIO, "Input/output error")

    response = publish(server.url, topic)

    assert response.status_code == 503
    assert response.json()["type"] == "urn:outbox-mq:problem:storage-failed"
    assert int(response.headers["retry-after"]) >= 1
    assert "results" not in response.json()
    assert client("GET", f"{server.url}/readyz").status_code == 503
    assert client("GET", f"{server.url}/livez").status_code == 200
    disk.failure = None  # so that the engine can be closed


def test_a_budget_lends_its_bytes_once_and_takes_them_back() -> None:
    budget = ByteBudget(100, retry_after_ms=250)
    first, second = budget.lease(60), budget.lease(40)

    with pytest.raises(Problem) as refused:
        second.resize(41)

    assert refused.value.answer.status == 503
    assert (refused.value.answer.bound, refused.value.answer.retry_after_ms) == ("work_bytes_max", 250)
    assert (second.size_bytes, budget.leased_bytes) == (40, 100)
    first.release()
    first.release()
    second.resize(100)
    assert budget.leased_bytes == 100


def test_a_budget_lends_more_than_all_of_it_to_one_that_is_alone() -> None:
    budget = ByteBudget(100, retry_after_ms=250)
    first = budget.lease(1_000)

    with pytest.raises(Problem):
        budget.lease(1)

    first.release()
    assert budget.lease(1).size_bytes == 1


def test_a_response_to_what_was_done_is_counted_though_there_is_no_room() -> None:
    budget = ByteBudget(100, retry_after_ms=250)
    lease = budget.lease(90)
    budget.lease(10)

    lease.settle(200)

    assert budget.leased_bytes == 210
