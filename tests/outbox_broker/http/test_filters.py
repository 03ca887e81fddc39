"""Filters over HTTP: declared, shown, applied to pulls that wait."""

from __future__ import annotations

from collections.abc import Callable

import requests

from outbox_broker.common.engine_options import EngineOptions
from tests.outbox_broker.http.publish_bodies import of_topic

Client = Callable[..., requests.Response]
WANTED = "type LIKE 'order.%' AND amount > 100"


def test_a_group_pulls_what_its_filter_takes(client: Client, shared_url: str, topic: str) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    assert client("PUT", group, json={"filter": WANTED}).status_code == 200
    amounts = ["99", "100.5", "much", "1e3"]
    messages = [{"id": one, "body": "", "headers": {"type": "order.paid", "amount": one}} for one in amounts]
    messages.append({"id": "no-headers", "body": ""})

    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, *messages)).raise_for_status()

    assert [one["id"] for one in client("POST", f"{group}/pull", json={}).json()["deliveries"]] == ["100.5", "1e3"]
    assert client("POST", f"{group}/pull", json={}).json()["deliveries"] == []
    shown = client("GET", group).json()
    assert shown["settings"]["filter"] == WANTED
    assert (shown["figures"]["backlog"], shown["figures"]["position"]) == (0, 5)


def test_a_pull_that_waits_finds_a_message_far_behind_what_is_not_wanted(
    client: Client, shared_url: str, topic: str
) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    client("PUT", group, json={"filter": "type = 'wanted'"}).raise_for_status()
    batch = of_topic(topic, *[{"body": "", "headers": {"type": "other"}}] * 1_000)
    for _ in range(2 * EngineOptions().filter_scan_max // 1_000 + 1):
        client("POST", f"{shared_url}/v1/publish", json=batch).raise_for_status()
    last = of_topic(topic, {"id": "last", "body": "", "headers": {"type": "wanted"}})
    client("POST", f"{shared_url}/v1/publish", json=last).raise_for_status()

    found = client("POST", f"{group}/pull", json={"wait_ms": 60_000}).json()["deliveries"]

    assert [one["id"] for one in found] == ["last"]
