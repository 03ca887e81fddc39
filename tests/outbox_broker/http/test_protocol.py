"""The protocol as a client in any language meets it: shapes, codecs and encodings."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import requests
from typer.testing import CliRunner

from broker_adapter.http.broker_cli import app
from outbox_core.protocol.wire import TIME_MS_MAX
from tests.outbox_broker.http import publish_bodies
from tests.outbox_broker.http.publish_bodies import of_topic

Client = Callable[..., requests.Response]
MSGPACK = "application/msgpack"


def test_a_message_goes_through_in_json(client: Client, shared_url: str, topic: str) -> None:
    message = {"id": "order-1", "key": "k", "headers": {"a": "b"}, "body": "Grüße 🚀", "created_at_ms": 1}

    published = client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, message))
    pulled = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/pull", json={})

    assert published.json() == {"results": [{"id": "order-1", "status": "stored", "error": None}]}
    [delivery] = pulled.json()["deliveries"]
    receipt = delivery.pop("receipt")
    assert delivery == {
        "id": "order-1", "topic": topic, "key": "k", "headers": {"a": "b"}, "body": "Grüße 🚀", "encoding": "utf8",
        "attempt": 1, "created_at_ms": 1, "deliver_at_ms": None,
    }  # fmt: skip
    acked = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/ack", json={"receipts": [receipt]})
    assert acked.json() == {"results": [{"receipt": receipt, "status": "acked"}]}
    assert acked.headers["content-type"] == "application/json"
    assert acked.headers["x-content-type-options"] == "nosniff"


def test_a_message_goes_through_in_messagepack_with_its_body_as_it_is(
    client: Client, shared_url: str, topic: str
) -> None:
    body = msgspec.msgpack.encode([["m", topic, None, {}, b"\x00\xff", 0, None]])

    published = client("POST", f"{shared_url}/v1/publish", data=body, headers={"content-type": MSGPACK})
    pulled = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/pull", json={}, headers={"accept": MSGPACK})

    assert published.headers["content-type"] == pulled.headers["content-type"] == MSGPACK
    assert msgspec.msgpack.decode(published.content) == {"results": [{"id": "m", "status": "stored", "error": None}]}
    [[receipt, attempt, record, expired]] = msgspec.msgpack.decode(pulled.content)
    assert (receipt.split("/")[:2], attempt, expired) == ([topic, "g"], 1, False)
    assert (record[:5], record[6]) == (["m", topic, None, {}, b"\x00\xff"], None)


@pytest.mark.parametrize("packed", [False, True], ids=["json", "msgpack"])
def test_one_request_publishes_to_many_topics(client: Client, shared_url: str, topic: str, packed: bool) -> None:
    messages = [{"id": f"{topic}-{n}", "topic": f"{topic}.{n % 2}", "body": str(n), "key": "k"} for n in range(4)]
    batch = [*messages, messages[0]]
    data = publish_bodies.packed(topic, batch) if packed else msgspec.json.encode({"messages": batch})
    kind = MSGPACK if packed else "application/json"

    published = client(
        "POST", f"{shared_url}/v1/publish", data=data,
        headers={"content-type": kind, "accept": "application/json"},
    )  # fmt: skip

    assert [one["id"] for one in published.json()["results"]] == [f"{topic}-{n}" for n in (0, 1, 2, 3, 0)]
    assert [one["status"] for one in published.json()["results"]] == ["stored"] * 4 + ["duplicate"]
    for place in range(2):
        pulled = client("POST", f"{shared_url}/v1/topics/{topic}.{place}/groups/g/pull", json={}).json()["deliveries"]
        assert [(one["id"], one["body"], one["key"]) for one in pulled] == [
            (f"{topic}-{n}", str(n), "k") for n in (place, place + 2)
        ]


@pytest.mark.parametrize(
    ("message", "kind", "where"),
    [
        ({"topic": "..", "body": "b"}, "invalid-name", "$.messages[1].topic"),
        ({"topic": "a/b", "body": "b"}, "invalid-name", "$.messages[1].topic"),
        ({"body": "b"}, "wrong-shape", "$.messages[1]"),
        ({"topic": "t", "body": "b", "id": "no id"}, "invalid-message", "$.messages[1]"),
    ],
)
def test_what_is_wrong_with_one_message_of_many_topics_is_told_with_its_place_and_nothing_is_stored(
    client: Client, shared_url: str, topic: str, message: dict[str, str], kind: str, where: str
) -> None:
    refused = client("POST", f"{shared_url}/v1/publish", json={"messages": [{"topic": topic, "body": "b"}, message]})

    assert refused.status_code == 422
    assert refused.json()["type"] == f"urn:outbox-mq:problem:{kind}"
    assert refused.json()["where"] == where
    assert client("GET", f"{shared_url}/v1/topics/{topic}").status_code == 404


def test_a_body_that_is_not_text_comes_as_base64_in_json(client: Client, shared_url: str, topic: str) -> None:
    sent = base64.b64encode(b"\xff\x00").decode()
    client(
        "POST",
        f"{shared_url}/v1/publish",
        json=of_topic(topic, {"body": sent, "encoding": "base64"}, {"body": "aGk=", "encoding": "base64"}),
    )

    pulled = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/pull", json={}).json()["deliveries"]

    assert [(one["body"], one["encoding"]) for one in pulled] == [(sent, "base64"), ("hi", "utf8")]


def test_a_message_without_an_id_is_given_one(client: Client, shared_url: str, topic: str) -> None:
    url = f"{shared_url}/v1/publish"

    results = client("POST", url, json=of_topic(topic, {"body": "a"}, {"body": "a"})).json()["results"]

    assert len({one["id"] for one in results}) == 2
    assert [one["status"] for one in results] == ["stored", "stored"]


def test_of_a_batch_only_the_message_is_rejected_whose_delay_no_clock_reaches(
    client: Client, shared_url: str, topic: str
) -> None:
    bodies = [{"body": "now"}, {"body": "never", "delay_ms": TIME_MS_MAX}, {"body": "now"}]

    answer = client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, *bodies))

    assert [one["status"] for one in answer.json()["results"]] == ["stored", "rejected", "stored"]


def test_a_delay_counts_from_the_brokers_clock(client: Client, shared_url: str, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, {"body": "a", "delay_ms": 150}))
    after_ms = time.time_ns() // 1_000_000

    pulled = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/pull", json={"wait_ms": 60_000}).json()

    [delivery] = pulled["deliveries"]
    due_ms = delivery["deliver_at_ms"]
    assert before_ms + 150 <= due_ms <= after_ms + 150
    assert time.time_ns() // 1_000_000 >= due_ms


@pytest.mark.parametrize(
    ("accept", "answered"),
    [
        (None, "application/json"),
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("application/msgpack", MSGPACK),
        ("application/x-msgpack", MSGPACK),
        ("application/json;q=0.5, application/msgpack", MSGPACK),
        ("text/html, application/json;q=0.1", "application/json"),
    ],
)
def test_the_answer_is_in_what_the_client_accepts(
    client: Client, shared_url: str, accept: str | None, answered: str
) -> None:
    response = client("GET", f"{shared_url}/v1/topics", headers={"accept": accept})

    assert response.headers["content-type"] == answered


def test_a_group_is_declared_and_described(client: Client, shared_url: str, topic: str) -> None:
    url = f"{shared_url}/v1/topics/{topic}/groups/g"
    settings = {"start": {"at_ms": 5}, "max_attempts": 3, "backoff": {"initial_ms": 10, "max_ms": 20}}

    assert client("PUT", url, json=settings).json() == {}

    described = client("GET", url).json()
    assert described["settings"] == {
        "start": {"at_ms": 5}, "filter": None, "max_attempts": 3, "ordered": False,
        "backoff": {"initial_ms": 10, "multiplier": 2.0, "max_ms": 20},
    }  # fmt: skip
    assert described["figures"]["backlog"] == 0
    assert client("GET", f"{shared_url}/v1/topics/{topic}").json()["groups"] == ["g"]


def test_topics_come_by_the_page(client: Client, shared_url: str, topic: str) -> None:
    names = [f"{topic}.{letter}" for letter in "abc"]
    for name in names:
        client("POST", f"{shared_url}/v1/publish", json=of_topic(name, {"body": ""}))

    first = client("GET", f"{shared_url}/v1/topics", params={"after": topic, "limit": 2}).json()
    second = client("GET", f"{shared_url}/v1/topics", params={"after": first["next"], "limit": 1}).json()

    assert first["topics"] + second["topics"] == names


def test_the_schedule_is_told_by_bucket_and_by_message(client: Client, shared_url: str, topic: str) -> None:
    day_ms = 86_400_000
    at_ms = (time.time_ns() // 1_000_000 // day_ms + 3) * day_ms
    messages = [{"id": f"{topic}-{number}", "body": "", "deliver_at_ms": at_ms + number} for number in range(2)]
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, *messages))

    counts = client("GET", f"{shared_url}/v1/scheduled", params={"topic": topic, "bucket": "day"}).json()
    one = client("GET", f"{shared_url}/v1/scheduled/{topic}-1").json()

    assert counts == {"bucket": "day", "counts": [{"at_ms": at_ms, "messages": 2}], "next_from_ms": None}
    assert one == {"id": f"{topic}-1", "topic": topic, "deliver_at_ms": at_ms + 1, "refused": None}
    assert client("GET", f"{shared_url}/v1/scheduled/never").status_code == 404
    by_command = CliRunner().invoke(app, ["schedule", "list", "--url", shared_url, "--topic", topic, "--bucket", "day"])
    one_by_command = CliRunner().invoke(app, ["schedule", "show", f"{topic}-1", "--url", shared_url])
    assert by_command.output.split("\t")[1:] == ["2\n"]
    assert one_by_command.output.split("\t")[1:] == [topic, f"{topic}-1\n"]
    none_by_command = CliRunner().invoke(app, ["schedule", "list", "--broker", shared_url, "--topic", f"{topic}.other"])
    assert (none_by_command.stdout, none_by_command.stderr) == ("", "nothing is scheduled\n")
    canceled = client("POST", f"{shared_url}/v1/scheduled/cancel", json={"ids": [f"{topic}-1", "never"]}).json()
    assert [one["status"] for one in canceled["results"]] == ["canceled", "unknown"]


def test_a_receipt_is_settled_under_its_own_group_only(client: Client, shared_url: str, topic: str) -> None:
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, {"body": ""}))
    pulled = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/pull", json={}).json()
    receipts = {"receipts": [pulled["deliveries"][0]["receipt"]]}

    elsewhere = client("POST", f"{shared_url}/v1/topics/{topic}/groups/other/ack", json=receipts).json()
    here = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/ack", json=receipts).json()

    assert [elsewhere["results"][0]["status"], here["results"][0]["status"]] == ["unknown", "acked"]


def test_dead_letters_are_listed_and_redriven(client: Client, shared_url: str, topic: str) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    client("PUT", group, json={"max_attempts": 1})
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, {"id": topic, "body": "b"}))
    pulled = client("POST", f"{group}/pull", json={}).json()
    nacked = client(
        "POST", f"{group}/nack", json={"receipts": [pulled["deliveries"][0]["receipt"]], "reason": "no"}
    ).json()

    [letter] = client("GET", f"{group}/dead").json()["dead"]
    redriven = client("POST", f"{group}/dead/redrive", json={"all": True}).json()

    assert nacked["results"][0]["status"] == "dead"
    assert (letter["id"], letter["reason"], letter["attempts"], letter["body"]) == (topic, "no", 1, "b")
    assert redriven == {"redriven": 1}
    assert client("GET", f"{group}/dead").json() == {"dead": [], "next": None}


def test_a_redrive_is_stopped_and_what_waited_for_its_rate_is_dead_as_before(
    client: Client, shared_url: str, topic: str
) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    client("PUT", group, json={"max_attempts": 1})
    messages = [{"id": f"{topic}-{number}", "body": "b"} for number in range(600)]  # more than the seconds of a test
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, *messages))
    pulled = client("POST", f"{group}/pull", json={"max_messages": 600}).json()
    receipts = [delivery["receipt"] for delivery in pulled["deliveries"]]
    client("POST", f"{group}/nack", json={"receipts": receipts, "reason": "no"})
    before = client("GET", f"{group}/dead?limit=1000").json()["dead"]
    client("POST", f"{group}/dead/redrive", json={"all": True, "per_second": 1})
    waiting = client("GET", group).json()["figures"]

    stopped = client("POST", f"{group}/dead/redrive/stop").json()["stopped"]

    assert 0 < stopped <= waiting["redriving"]
    assert 0 < waiting["redrive_left_ms"] <= 1_000 * waiting["redriving"]
    assert client("GET", f"{group}/dead?limit=1000").json()["dead"] == before[-stopped:]
    assert client("POST", f"{group}/dead/redrive/stop", json={}).json() == {"stopped": 0}
    after = client("GET", group).json()["figures"]
    assert (after["redriving"], after["redrive_left_ms"], after["dead"]) == (0, 0, stopped)
    assert client("POST", f"{group}-unknown/dead/redrive/stop").status_code == 404


def test_dead_letters_are_counted_and_discarded(client: Client, shared_url: str, topic: str) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    client("PUT", group, json={"max_attempts": 1})
    messages = [{"id": f"{topic}-{number}", "key": f"k{number % 2}", "body": "b"} for number in range(4)]
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, *messages))
    pulled = client("POST", f"{group}/pull", json={}).json()
    receipts = [delivery["receipt"] for delivery in pulled["deliveries"]]
    client("POST", f"{group}/nack", json={"receipts": receipts, "reason": "no such customer"})
    chosen = {"where": {"reason": "customer", "key": "k1"}}

    counted = client("POST", f"{group}/dead/count", json=chosen).json()
    discarded = client(
        "POST", f"{group}/dead/discard",
        json={**chosen, "why": "deleted customers", "dead_before_ms": counted["dead_before_ms"]},
    ).json()  # fmt: skip
    by_id = client("POST", f"{group}/dead/discard", json={"ids": [messages[0]["id"]], "why": "wrong"}).json()

    assert (counted["count"], discarded, by_id) == (2, {"discarded": 2}, {"discarded": 1})
    assert [letter["id"] for letter in client("GET", f"{group}/dead").json()["dead"]] == [messages[2]["id"]]


def test_dead_letters_are_edited(client: Client, shared_url: str, topic: str) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    client("PUT", group, json={"max_attempts": 1})
    messages = [{"id": f"{topic}-{number}", "key": "k", "body": "b"} for number in range(4)]
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, *messages))
    pulled = client("POST", f"{group}/pull", json={}).json()
    receipts = [delivery["receipt"] for delivery in pulled["deliveries"]]
    client("POST", f"{group}/nack", json={"receipts": receipts, "reason": "no such customer"})
    by_id = {
        "operation": "op-1", "why": "typo",
        "edits": [{"id": messages[1]["id"], "body": "aGk=", "encoding": "base64"}, {"id": "x", "headers": {"a": "b"}}],
    }  # fmt: skip
    chosen = {"operation": "op-2", "why": "typo", "where": {"key": "k"}, "edit": {"headers": {"a": "b"}}}

    [edited, unknown] = client("POST", f"{group}/dead/edit", json=by_id).json()["results"]
    others = client("POST", f"{group}/dead/edit", json=chosen).json()

    assert (edited["status"], unknown["status"], unknown["new_id"]) == ("edited", "not_dead", None)
    assert client("POST", f"{group}/dead/edit", json=by_id).json()["results"] == [edited, unknown]
    assert [one["id"] for one in others["results"]] == [messages[number]["id"] for number in (0, 2, 3)]
    assert others["next"] is None
    came = {one["id"]: one for one in client("POST", f"{group}/pull", json={}).json()["deliveries"]}
    assert came.keys() == {edited["new_id"], *(one["new_id"] for one in others["results"])}
    of_edited = came[edited["new_id"]]
    assert (of_edited["body"], of_edited["key"], of_edited["headers"]) == (
        "hi", "k", {"outbox-edited-from": messages[1]["id"]},
    )  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {"operation": "op", "why": "typo"},
        {"operation": "op", "why": "typo", "edits": [{"id": "x"}]},
        {"operation": "op", "why": "typo", "edits": [{"id": "x", "body": "b"}], "all": True},
        {"operation": "op", "why": "typo", "edits": [{"id": "x", "body": "b"}], "edit": {"headers": {"a": "b"}}},
        {"operation": "op", "why": "typo", "edit": {"headers": {"a": "b"}}},
        {"operation": "op", "why": "typo", "all": True, "edit": {"body": "b"}},
        {"operation": "op", "why": "typo", "where": {"to_ms": 1}, "edit": {"headers": {"a": "b"}}},
        {"operation": "an op", "why": "typo", "all": True, "edit": {"headers": {"a": "b"}}},
        {"operation": "op", "why": "", "all": True, "edit": {"headers": {"a": "b"}}},
        {"why": "typo", "all": True, "edit": {"headers": {"a": "b"}}},
    ],
)
def test_an_edit_that_does_not_say_what_or_why_is_refused(
    client: Client, shared_url: str, topic: str, body: dict[str, Any]
) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    client("PUT", group, json={})

    assert client("POST", f"{group}/dead/edit", json=body).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        {"why": "wrong"},
        {"ids": [], "all": True, "why": "wrong"},
        {"where": {"reason": "x"}, "all": True, "why": "wrong"},
        {"where": {}, "why": "wrong"},
        {"where": {"to_ms": 1}, "why": "wrong"},
        {"where": {"headers": {}}, "why": "wrong"},
        {"where": {"reason": "x", "age": 1}, "why": "wrong"},
        {"all": True},
        {"all": True, "why": ""},
    ],
)
def test_a_discard_that_does_not_say_which_or_why_is_refused(
    client: Client, shared_url: str, topic: str, body: dict[str, Any]
) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    client("PUT", group, json={})

    assert client("POST", f"{group}/dead/discard", json=body).status_code == 422


@pytest.mark.parametrize("after", ["x", "\u00b2", "-1", "1" * 19, "\u0661"])
def test_a_cursor_of_dead_letters_that_is_none_is_refused(
    client: Client, shared_url: str, topic: str, after: str
) -> None:
    group = f"{shared_url}/v1/topics/{topic}/groups/g"
    client("PUT", group, json={})

    response = client("GET", f"{group}/dead", params={"after": after})

    assert response.status_code == 422, response.text
    assert response.json()["where"] == "query.after"


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/topics?limit=0", "query.limit"),
        ("/v1/topics?limit=x", "query.limit"),
        ("/v1/topics?limit=1&lmit=1", "query.lmit"),
        ("/v1/scheduled?bucket=week", "query.bucket"),
        ("/v1/scheduled?from_ms=-1", "query.from_ms"),
    ],
)
def test_a_wrong_query_parameter_is_told_by_its_name(client: Client, shared_url: str, path: str, where: str) -> None:
    response = client("GET", shared_url + path)

    assert (response.status_code, response.json()["where"]) == (422, where)
    assert "$" not in response.json()["detail"]


def test_probes_answer_without_a_word_about_the_inside(client: Client, shared_url: str) -> None:
    assert client("GET", f"{shared_url}/livez").json()["status"] == "ok"
    assert client("GET", f"{shared_url}/readyz").json()["status"] == "ok"
    assert client("GET", f"{shared_url}/healthz").status_code == 200
    assert client("HEAD", f"{shared_url}/readyz").status_code == 200


def test_metrics_count_what_was_published_delivered_and_acknowledged(
    client: Client, shared_url: str, topic: str
) -> None:
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, {"body": ""}, {"body": ""}))
    pulled = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/pull", json={}).json()
    client(
        "POST", f"{shared_url}/v1/topics/{topic}/groups/g/ack",
        json={"receipts": [pulled["deliveries"][0]["receipt"]]},
    )  # fmt: skip

    text = client("GET", f"{shared_url}/metrics").text

    assert f'broker_messages_received_total{{topic="{topic}"}} 2.0' in text
    assert f'broker_messages_delivered_total{{group="g",topic="{topic}"}} 2.0' in text
    assert f'broker_messages_acknowledged_total{{group="g",topic="{topic}"}} 1.0' in text
    assert f'broker_inflight_messages{{group="g",topic="{topic}"}} 1.0' in text
    assert f'broker_delivery_latency_seconds_count{{group="g",topic="{topic}"}} 1.0' in text
    assert 'broker_http_requests_total{method="POST",route="/v1/publish",status="200"}' in text
    assert "outbox_build_info{" in text
