"""`outbox delay serve` as a process in front of a broker process: killed, restarted, wrongly started."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from broker_adapter.http import HttpBroker
from outbox_core import Message
from outbox_core.common.errors import NotSupported
from outbox_core.messages.message import DUE_HEADER
from tests.broker_adapter.servers import ServerProcess, delay_process
from tests.fixtures.fork_server import fork_server

COMMAND = ("outbox", "delay", "serve")
DEADLINE_S = 120.0


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ServerProcess]:
    """A broker process that runs."""
    process = ServerProcess(tmp_path / "target")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def delay(tmp_path: Path, target: ServerProcess) -> Iterator[ServerProcess]:
    """A delay service in front of it that runs."""
    process = delay_process(tmp_path / "delay", target_url=target.url)
    process.start()
    yield process
    process.end(signal.SIGKILL)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def pulled(broker: HttpBroker, count: int) -> list[tuple[str, int]]:
    """(id, when it was handed out) of this many messages, waiting for them."""
    found: list[tuple[str, int]] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count and time.monotonic() < deadline:
        deliveries = broker.pull("trips", "reminders", wait_ms=1_000)
        at_ms = now_ms()
        assert all(int(one.headers[DUE_HEADER]) <= at_ms for one in deliveries), "never early"
        found += [(one.id, at_ms) for one in deliveries]
        broker.ack([one.receipt for one in deliveries])
    return found


def delivered(url: str, count: int) -> float:
    """How many deliveries the lateness of /metrics is of, waiting for so many: they are counted behind the target."""
    found = -1.0
    deadline = time.monotonic() + DEADLINE_S
    while found < count and time.monotonic() < deadline:
        response = requests.get(f"{url}/metrics", timeout=DEADLINE_S)
        assert response.status_code == 200, response.text
        [found] = [
            float(line.split()[1])
            for line in response.text.splitlines()
            if line.startswith("broker_delay_lateness_seconds_count")
        ]
    return found


@pytest.mark.slow
def test_what_was_accepted_reaches_the_target_when_due_although_both_are_killed(
    delay: ServerProcess, target: ServerProcess
) -> None:
    def message(message_id: str, due_ms: int) -> Message:
        return Message(id=message_id, topic="trips", body=b"x", deliver_at_ms=due_ms)

    start_ms = now_ms()
    producer = HttpBroker(delay.url)
    due = {f"m{number}": start_ms + number * 100 for number in range(30)}
    results = producer.publish([message(one, due_ms) for one, due_ms in due.items()])
    assert {result.status for result in results} == {"stored"}
    producer.publish([message("gone", start_ms + 600_000), message("far", start_ms + 700 * 86_400_000)])
    assert producer.cancel(["gone", "nobody"]) == ["canceled", "unknown"]
    soon = dict(zip(["m29", "m28"], producer.cancel(["m29", "m28"]), strict=True))  # they may be due by now
    assert set(soon.values()) <= {"canceled", "too_late"}
    with pytest.raises(NotSupported):
        producer.pull("trips", "reminders")
    due["behind-the-kill"] = now_ms() + 5_000
    producer.publish([message("behind-the-kill", due["behind-the-kill"])])
    producer.close()

    delay.end(signal.SIGKILL)
    target.kill()
    target.start()
    delay.start()
    consumer = HttpBroker(target.url)
    wanted = sorted(one for one in due if soon.get(one) != "canceled")
    came = pulled(consumer, len(wanted))

    assert sorted(one for one, _ in came) == wanted
    assert all(at_ms >= due[one] for one, at_ms in came), "never early"
    producer = HttpBroker(delay.url)
    assert producer.cancel(["far", "m0"]) == ["canceled", "too_late"]
    producer.close()
    consumer.close()
    assert delivered(delay.url, 1) >= 1, "since its last start"
    assert delay.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "nothing://x", "--data", "d"], "no broker adapter"),
        (["--target", "http://127.0.0.1:1", "--data", "d", "--host", "0.0.0.0"], "--tokens"),
        (["--target", "http://127.0.0.1:1"], "--data is needed"),
        (["--target", "http://127.0.0.1:1", "--data", "d", "--target-token-file", "none"], "cannot read the token"),
    ],
)
def test_a_wrong_start_says_the_cure(tmp_path: Path, options: list[str], said: str) -> None:
    done = fork_server().run(*COMMAND, *options, cwd=tmp_path)

    assert done.returncode != 0
    assert said in done.stderr


def test_a_folder_of_a_later_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "format").write_text('{"format": 1000, "opened_by": 1000, "release": "9.0"}')

    done = fork_server().run(*COMMAND, "--target", "http://127.0.0.1:1", "--data", "d", cwd=tmp_path)

    assert done.returncode != 0
    assert "restore the backup" in done.stderr
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["format"]
