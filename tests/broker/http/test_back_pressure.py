"""What the server says when the disk is slow, or fails: come back later, and nothing was stored."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from broker.http.gate import Gate
from broker.http.problems import Problem
from broker.http.server import HttpServer
from broker.http.settings import HttpSettings
from broker.log.storage import DiskStorage

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
        assert self.free.wait(20)
        if self.failure is not None:
            raise self.failure
        super().sync(descriptor)


def publish(url: str, topic: str, body: str = "b") -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        message: dict[str, Any] = {"messages": [{"body": body}]}
        return session.post(f"{url}/v1/topics/{topic}/messages", json=message, timeout=20)


def test_publishes_beyond_the_bound_are_told_to_come_back_and_then_succeed(
    serve: Callable[..., HttpServer], client: Client, topic: str
) -> None:
    disk = StuckDisk()
    server = serve(HttpSettings(publishes_max=1, publish_threads=1), storage=disk)
    disk.syncing.clear()
    disk.free.clear()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(publish, server.url, topic)
        assert disk.syncing.wait(10)
        refused = publish(server.url, topic)
        disk.free.set()
        accepted = first.result(20)

    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["bound"] == "publishes_max"
    assert accepted.json()["results"][0]["status"] == "stored"
    assert publish(server.url, topic).status_code == 200
    assert client("GET", f"{server.url}/v1/topics/{topic}").json()["figures"]["stored"] == 2


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


def test_a_gate_lets_a_request_larger_than_the_whole_bound_in_when_it_is_alone() -> None:
    gate = Gate(name="publishes", requests_max=10, bytes_max=100, retry_after_ms=250)

    with gate.entered(1_000), pytest.raises(Problem) as refused, gate.entered(1):
        pass

    assert refused.value.answer.bound == "publishes_bytes_max"
    assert (gate.requests, gate.bytes) == (0, 0)
    with gate.entered(1):
        assert (gate.requests, gate.bytes) == (1, 1)
