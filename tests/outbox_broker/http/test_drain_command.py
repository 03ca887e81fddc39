"""`outbox broker cordon | uncordon | drain | status` on a server that runs: publishers are told to come back, readiness
keeps its meaning, and what is left is said.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from broker_adapter.http.admin_client import AdminClient
from outbox_core import Broker, Message, connect
from outbox_core.common.errors import BrokerCordoned
from outbox_core.runtime.command import main
from tests.broker_adapter.servers import served

TOPIC, GROUP = "orders", "billing"
TIMEOUT_S = 60


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server of the test's own."""
    with served(tmp_path / "data") as server:
        yield server.url


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    """A client of it."""
    made = connect(url)
    yield made
    made.close()


@pytest.fixture
def held(broker: Broker) -> str:
    """The receipt of a message that a consumer holds."""
    broker.publish([Message(id="a", topic=TOPIC, body=b"")])
    [delivery] = broker.pull(TOPIC, GROUP, max_messages=1, invisible_ms=600_000)
    return delivery.receipt


def outbox(*arguments: str, url: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", *arguments, "--url", url])
    return int(ended.value.code or 0)


def test_publishers_are_told_to_come_back_and_consumers_are_served(
    url: str, broker: Broker, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outbox("cordon", "--reason", "moving", url=url) == 0

    with pytest.raises(BrokerCordoned, match="moving") as refused:
        broker.publish([Message(id="b", topic=TOPIC, body=b"")])
    body = {"messages": [{"id": "b", "topic": TOPIC, "body": ""}]}
    answer = requests.post(f"{url}/v1/publish", json=body, timeout=TIMEOUT_S)

    assert refused.value.retryable
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:outbox-mq:problem:cordoned")
    assert int(answer.headers["retry-after"]) * 1000 == answer.json()["retry_after_ms"] == refused.value.retry_after_ms
    assert broker.pull(TOPIC, "audit") != []
    assert outbox("uncordon", url=url) == 0
    assert broker.publish([Message(id="b", topic=TOPIC, body=b"")])[0].status == "stored"


def test_a_cordoned_broker_is_ready_and_says_that_it_is_cordoned(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("cordon", "--json", url=url) == 0
    assert json.loads(capsys.readouterr().out)["cordoned"] is True

    ready = requests.get(f"{url}/readyz", timeout=TIMEOUT_S)
    metrics = requests.get(f"{url}/metrics", timeout=TIMEOUT_S).text

    assert ready.status_code == 200
    assert [(check["name"], check["status"]) for check in ready.json()["checks"]][-1] == ("cordoned", "ok")
    assert "\nbroker_cordoned 1.0" in metrics
    outbox("uncordon", url=url)
    assert "cordoned" not in requests.get(f"{url}/readyz", timeout=TIMEOUT_S).text
    assert "\nbroker_cordoned 0.0" in requests.get(f"{url}/metrics", timeout=TIMEOUT_S).text


def test_the_status_says_what_is_left_by_topic_and_group(
    url: str, broker: Broker, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    broker.publish([Message(id="later", topic="reports", body=b"", deliver_at_ms=due_ms)])

    assert outbox("status", "--json", url=url) == 0
    answer = json.loads(capsys.readouterr().out)
    assert outbox("status", url=url) == 0
    lines = capsys.readouterr().out.splitlines()

    assert (answer["cordon"], answer["drained"]) == (None, False)
    assert (answer["ready"], answer["in_flight"], answer["scheduled"], answer["dead"]) == (0, 1, 1, 0)
    assert [topic["topic"] for topic in answer["topics"]] == [TOPIC, "reports"]
    assert 0 <= answer["oldest_unacked_age_ms"] < TIMEOUT_S * 1_000
    assert lines[:2] == ["takes new messages", "left: 0 ready, 1 in flight, 1 scheduled; 0 dead letters"]
    assert [line.split() for line in lines[3:]] == [[TOPIC, GROUP, "0", "1", "0"], ["reports", "1"]]


def test_the_status_is_read_page_by_page(url: str, broker: Broker, held: str) -> None:
    for topic in ("a", "b", "c"):
        broker.publish([Message(id="m", topic=topic, body=b"")])
        broker.pull(topic, GROUP)
    client = AdminClient(url)

    first = client.status(limit=2)
    second = client.status(limit=2, after=first.next)

    assert [topic.topic for topic in first.topics] == ["a", "b"]
    assert ([topic.topic for topic in second.topics], second.next) == (["c", TOPIC], None)
    assert AdminClient(url).health().status == "ok"
    assert first.in_flight == second.in_flight == 4


def test_a_drain_that_is_not_done_in_time_fails_and_stays_cordoned(
    url: str, broker: Broker, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outbox("drain", "--wait", "--timeout", "100ms", "--json", url=url) == 1

    said = capsys.readouterr()
    assert json.loads(said.out) == {"drained": False, "ready": 0, "in_flight": 1, "scheduled": 0, "dead": 0}
    assert "left: 0 ready, 1 in flight, 0 scheduled; 0 dead letters" in said.err
    assert AdminClient(url).status().cordon is not None


def test_a_drain_ends_when_the_last_message_is_settled(
    url: str, broker: Broker, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.publish([Message(id="b", topic=TOPIC, body=b"")])

    def consume() -> None:
        while AdminClient(url).status().cordon is None:
            threading.Event().wait(0.01)
        [delivery] = broker.pull(TOPIC, GROUP)
        broker.ack([delivery.receipt, held])

    consumer = threading.Thread(target=consume)
    consumer.start()
    status = outbox("drain", "--wait", "--timeout", "2m", url=url)
    consumer.join()

    assert status == 0
    assert capsys.readouterr().out == "drained; 0 dead letters stay\n"


def test_a_drain_tells_a_program_what_is_left(
    url: str, broker: Broker, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outbox("drain", "--wait", "--timeout", "100ms", "--progress", "json", url=url) == 1

    objects = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    left = {"ready": 0, "in_flight": 1, "scheduled": 0, "dead": 0}
    assert objects[0] == {"operation": "drain", "done": 0, "total": 1, "left_ms": None, **left}


def test_a_drain_without_waiting_says_what_is_left(
    url: str, broker: Broker, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outbox("drain", url=url) == 1
    assert capsys.readouterr().out == "not drained: 0 ready, 1 in flight, 0 scheduled; 0 dead letters\n"
    assert outbox("drain", "--timeout", "soon", url=url) == 2
    assert "a duration is a number and a unit" in capsys.readouterr().err
