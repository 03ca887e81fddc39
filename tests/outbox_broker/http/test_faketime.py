"""A broker process whose wall clock really steps, by libfaketime; its monotonic clock does not. Skipped without it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker
from outbox_core import Message
from outbox_core.common.clock import SystemClock
from tests.broker_adapter.servers import ServerProcess

TOPIC, GROUP = "trips", "reminders"
HOUR_MS = 3_600_000
WAIT_MS = 60_000


class FakeTime:
    """What the process's wall clock shows, told by a file that libfaketime reads at each look at the clock."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.step_to(0)

    def step_to(self, hours: float) -> None:
        """From now on, so many hours from the real time."""
        unfinished = self.file.with_suffix(".new")
        unfinished.write_text(f"{hours * 3600:+.0f}\n")
        unfinished.replace(self.file)


def _library() -> Path:
    """The library of the libfaketime package; Debian's own (0.9.10) hangs the waits of Python 3.11."""
    spec = find_spec("libfaketime")
    found = sorted(Path(spec.origin).parent.rglob("libfaketime.so.1")) if spec and spec.origin else []
    if not found:
        pytest.skip("there is no libfaketime to step a clock with: pip install libfaketime")
    return found[0]


@pytest.fixture
def fake_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Processes that are started in this test have the time that it tells."""
    one = FakeTime(tmp_path / "faketime")
    monkeypatch.setenv("LD_PRELOAD", str(_library()))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(one.file))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    return one


@pytest.fixture
def process(tmp_path: Path, fake_time: FakeTime) -> Iterator[ServerProcess]:
    """A broker that runs by it."""
    assert fake_time.file.exists()
    one = ServerProcess(tmp_path / "data", is_fresh=True)  # the library comes in as an interpreter starts
    one.start()
    yield one
    one.kill()


@pytest.fixture
def client(process: ServerProcess) -> Iterator[HttpBroker]:
    """A client of it, by real time."""
    one = HttpBroker(process.url)
    yield one
    one.close()


def pulled(client: HttpBroker, count: int) -> list[str]:
    """The next so many ids, waiting for each a while."""
    ids: list[str] = []
    while len(ids) < count:
        deliveries = client.pull(TOPIC, GROUP, wait_ms=WAIT_MS)
        assert deliveries, f"only {ids} came"
        client.ack([one.receipt for one in deliveries])
        ids += [one.id for one in deliveries]
    return ids


@pytest.mark.processes
@pytest.mark.slow
def test_when_the_clock_of_a_process_steps_by_hours_each_message_comes_by_the_new_clock_once(
    process: ServerProcess, client: HttpBroker, fake_time: FakeTime
) -> None:
    now_ms = SystemClock().now_ms()

    def publish(message_id: str, *, hours: float) -> None:
        client.publish([Message(id=message_id, topic=TOPIC, body=b"x", deliver_at_ms=now_ms + int(hours * HOUR_MS))])

    for hours in (6, 1, 3, 20):
        publish(f"in-{hours}h", hours=hours)
    assert client.pull(TOPIC, GROUP) == []

    fake_time.step_to(2)
    assert pulled(client, 1) == ["in-1h"]

    fake_time.step_to(-3)
    publish("back", hours=-2.9999)
    assert pulled(client, 1) == ["back"], "what is due by the new clock does not wait for the old one"

    os.kill(process.pid, signal.SIGSTOP)
    fake_time.step_to(7)
    os.kill(process.pid, signal.SIGCONT)
    assert pulled(client, 2) == ["in-3h", "in-6h"]
    assert client.pull(TOPIC, GROUP, wait_ms=1_500) == []
    assert client.cancel(["in-20h", "in-3h"]) == ["canceled", "too_late"]
