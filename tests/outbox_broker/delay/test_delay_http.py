"""A delay service over HTTP, in front of a real broker: every route of the protocol, its metrics, both codecs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import requests

from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.http import HttpBroker
from outbox_broker.delay_service.delay_proxy import DelayProxy
from outbox_broker.http.routes import GROUP, RECURRING, ROUTES, TOPIC
from outbox_core import Message
from outbox_core.common.clock import ManualClock
from tests.broker_adapter.servers import serving
from tests.outbox_broker.delay.conftest import NOW_MS, Opened

ANSWERED: Final[dict[tuple[str, str], Any]] = {
    ("POST", "/v1/publish"): {"messages": [{"id": "n", "topic": "orders", "body": "x"}]},
    ("POST", "/v1/scheduled/cancel"): {"ids": ["later"]},
    ("GET", "/v1/scheduled"): None,
    ("GET", "/v1/scheduled/{id}"): None,
    ("GET", "/v1/refused"): None,
    ("POST", "/v1/refused/retry"): {"ids": ["later"]},
    ("POST", "/v1/cordon"): {"reason": "moving"},
    ("POST", "/v1/uncordon"): {},
    ("GET", "/v1/status"): None,
    ("GET", "/v1/topics"): None,
    ("GET", TOPIC): None,
}
"""What a delay service does, with a body that it takes."""
REFUSED: Final[dict[tuple[str, str], list[Any]]] = {
    ("POST", TOPIC + "/read"): [{}, {"wait_ms": 50}, {"offset": 0}, {"offset": 0, "wait_ms": 50}],
    ("POST", GROUP + "/pull"): [{}, {"wait_ms": 50}],
    ("POST", GROUP + "/ack"): [{"receipts": ["orders/g/1"]}],
    ("POST", GROUP + "/nack"): [{"receipts": ["orders/g/1"]}],
    ("POST", GROUP + "/extend"): [{"receipts": ["orders/g/1"], "invisible_ms": 1_000}],
    ("PUT", GROUP): [{}],
    ("GET", GROUP): [None],
    ("DELETE", GROUP): [None],
    ("DELETE", TOPIC): [None],
    ("POST", TOPIC + "/purge"): [None, {}],
    ("POST", GROUP + "/seek"): [{"to_offset": 0}],
    ("POST", GROUP + "/pause"): [None, {}],
    ("POST", GROUP + "/resume"): [None, {}],
    ("GET", GROUP + "/dead"): [None],
    ("POST", GROUP + "/dead/redrive"): [{"all": True}],
    ("POST", GROUP + "/dead/redrive/stop"): [None, {}],
    ("POST", GROUP + "/dead/count"): [{"all": True}],
    ("POST", GROUP + "/dead/discard"): [{"all": True, "why": "not wanted"}],
    ("POST", GROUP + "/dead/edit"): [
        {"operation": "op", "why": "typo", "edits": [{"id": "m", "headers": {"a": "b"}}]},
        {"operation": "op", "why": "typo", "all": True, "edit": {"remove_headers": ["a"]}},
    ],
    ("GET", RECURRING): [None],
    ("PUT", RECURRING + "/{name}"): [{"topic": "orders", "cron": "0 6 * * *"}],
    ("GET", RECURRING + "/{name}"): [None],
    ("DELETE", RECURRING + "/{name}"): [None],
    ("POST", RECURRING + "/{name}/pause"): [None, {}],
    ("POST", RECURRING + "/{name}/resume"): [None, {}],
}
"""What its target is there for, with bodies."""
OF_BACKUPS = ("POST", "/v1/snapshot")
"""Answered while somebody takes a backup, and refused else: see ../http/test_online_backup.py."""


@dataclass(frozen=True)
class Delay:
    """A front that is served, not started: it delivers when told to."""

    front: DelayProxy
    url: str
    target: EmbeddedBroker

    def ask(self, method: str, path: str, body: object = None) -> requests.Response:
        url = self.url + path.format(topic="orders", group="g", id="later", name="daily")
        return requests.request(method, url, json=body, timeout=120)

    def shown(self) -> dict[str, float]:
        """The samples of /metrics by name and labels."""
        response = self.ask("GET", "/metrics")
        assert response.status_code == 200, response.text
        lines = [line.rpartition(" ") for line in response.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def deliver(self) -> None:
        """All that is due."""
        while self.front.service.turn() == 0:
            pass


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def delay(tmp_path: Path, opened: Opened, clock: ManualClock) -> Iterator[Delay]:
    """A delay service in front of a broker, and one message for later in it."""
    target = EmbeddedBroker(f"embedded:{tmp_path / 'target'}", clock=clock)
    front = opened.front(target, clock=clock)
    front.publish([Message(id="later", topic="orders", body=b"x", deliver_at_ms=NOW_MS + 1_500)])
    with serving(front.served()) as server:
        yield Delay(front, server.url, target)
    front.close()
    target.close()


def test_every_route_of_the_protocol_is_answered_or_refused_by_name_never_failed(delay: Delay) -> None:
    assert {*ANSWERED, *REFUSED, OF_BACKUPS} == {(route.method, route.path) for route in ROUTES}

    refusals = {
        (place, str(body)): delay.ask(*place, body)
        for place, bodies in REFUSED.items()
        for body in bodies
    }  # fmt: skip
    answers = {place: delay.ask(*place, body) for place, body in ANSWERED.items() if "cancel" not in place[1]}
    answers["cancel", ""] = delay.ask("POST", "/v1/scheduled/cancel", {"ids": ["later"]})

    assert {place: one.status_code for place, one in answers.items() if one.status_code != 200} == {}
    for place, one in refusals.items():
        assert one.status_code == 422, (place, one.text)
        assert one.json()["type"].endswith("not-supported"), place
        assert "target broker" in one.json()["detail"], place
    for path in ("/livez", "/readyz", "/healthz", "/openapi.json"):
        assert delay.ask("GET", path).status_code == 200


def test_a_scrape_tells_how_late_messages_were_what_is_scheduled_and_how_long_the_disk_took(
    delay: Delay, clock: ManualClock
) -> None:
    assert delay.shown()['broker_scheduled_messages{horizon="inf"}'] == 1

    clock.advance(1_500 + 300)
    delay.deliver()

    found = delay.shown()
    assert found['broker_delay_lateness_seconds_bucket{le="0.25"}'] == 0
    assert found['broker_delay_lateness_seconds_bucket{le="0.5"}'] == 1
    assert found["broker_delay_lateness_seconds_sum"] == 0.3
    assert found['broker_messages_dispatched_total{topic="orders"}'] == 1
    assert found['broker_scheduled_messages{horizon="inf"}'] == 0
    assert found["broker_fsync_duration_seconds_count"] == found["broker_fsyncs_total"] > 0


def test_a_scrape_shows_for_how_long_the_target_has_not_taken_what_is_due(delay: Delay, clock: ManualClock) -> None:
    waiting = delay.shown()["broker_delay_overdue_seconds"]

    delay.target.close()
    clock.advance(1_500 + 300)
    delay.front.service.turn()
    tried = delay.shown()["broker_delay_overdue_seconds"]
    clock.advance(60_000)

    assert (waiting, tried) == (0, 0.3)
    assert delay.shown()["broker_delay_overdue_seconds"] == 60.3


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_what_is_for_now_is_taken_in_either_codec(delay: Delay, codec: str) -> None:
    producer = HttpBroker(delay.url, codec=codec)

    results = producer.publish([Message(id=one, topic="orders", body=b"x") for one in ("a", "b")])
    delay.deliver()
    producer.close()

    assert [one.status for one in results] == ["stored", "stored"]
    assert [one.id for one in delay.target.pull("orders", "billing")] == ["a", "b"]


def test_a_cordoned_delay_service_takes_nothing_new_and_delivers_what_it_has(delay: Delay, clock: ManualClock) -> None:
    assert delay.ask("POST", "/v1/cordon", {"reason": "moving"}).status_code == 200
    refused = delay.ask("POST", "/v1/publish", ANSWERED["POST", "/v1/publish"])
    before = delay.ask("GET", "/v1/status").json()

    clock.advance(1_500)
    delay.deliver()

    after = delay.ask("GET", "/v1/status").json()
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:outbox-mq:problem:cordoned")
    assert (before["scheduled"], before["drained"]) == (1, False)
    assert (before["cordon"]["reason"], before["topics"]) == (
        "moving", [{"topic": "orders", "scheduled": 1, "groups": []}],
    )  # fmt: skip
    assert (after["scheduled"], after["drained"], after["topics"]) == (0, True, [])
    assert [one.id for one in delay.target.pull("orders", "billing")] == ["later"]


def test_what_the_target_has_not_taken_is_not_drained(delay: Delay, clock: ManualClock) -> None:
    delay.target.close()

    clock.advance(1_500)
    delay.front.service.turn()

    assert delay.ask("GET", "/v1/status").json()["drained"] is False


def test_a_node_of_a_cluster_is_not_cordoned_and_says_what_is(
    opened: Opened, tmp_path: Path, clock: ManualClock
) -> None:
    target = EmbeddedBroker(f"embedded:{tmp_path / 'target'}")
    front = opened.front(target, clock=clock, is_shard=True)
    with serving(front.served()) as server:
        answers = [
            requests.request(method, f"{server.url}{path}", timeout=120)
            for method, path in (("POST", "/v1/cordon"), ("POST", "/v1/uncordon"), ("GET", "/v1/status"))
        ]
    front.close()
    target.close()

    assert {(answer.status_code, answer.json()["type"]) for answer in answers} == {
        (422, "urn:outbox-mq:problem:not-supported")
    }
    assert all("outbox delay drain" in answer.json()["detail"] for answer in answers)
