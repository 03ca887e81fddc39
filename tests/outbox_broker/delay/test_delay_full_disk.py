"""`outbox delay serve` on a disk that is completely full: it starts, says that it takes nothing, and delivers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import requests

from broker_adapter.http import HttpBroker
from outbox_core import Message
from tests.broker_adapter.servers import ServerProcess, delay_process
from tests.outbox_broker.delay.test_delay_process import pulled
from tests.outbox_broker.mounts import small_disk
from tests.outbox_broker.polling import until
from tests.outbox_broker.test_full_disk import fill


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, size_mb=64) as place:
        yield place


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "target")
    process.start()
    yield process
    process.kill()


@pytest.mark.slow
def test_a_delay_service_starts_on_a_full_disk_says_so_and_delivers_what_it_has(
    disk: Path, target: ServerProcess
) -> None:
    delay = delay_process(disk / "delay", target_url=target.url)
    delay.start()
    try:
        due_ms = time.time_ns() // 1_000_000 + 1_000
        with closing(HttpBroker(delay.url)) as producer:
            producer.publish([Message(id="due", topic="trips", body=b"x", deliver_at_ms=due_ms)])
        assert requests.get(f"{delay.url}/readyz", timeout=120).status_code == 200
        delay.end(signal.SIGKILL)
        ballast = fill(disk)

        delay.start()

        answer = requests.get(f"{delay.url}/readyz", timeout=120)
        assert (answer.status_code, "free some disk space" in answer.text) == (503, True)
        with closing(HttpBroker(target.url)) as consumer:
            assert [one for one, _ in pulled(consumer, 1)] == ["due"]
        ballast.unlink()
        until(lambda: requests.get(f"{delay.url}/readyz", timeout=120).status_code == 200)
    finally:
        delay.end(signal.SIGKILL)
