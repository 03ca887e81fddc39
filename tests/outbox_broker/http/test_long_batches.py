"""Long publishes, of which MessagePack is decoded record by record, and JSON has one message: they come to the same as
short ones, and are refused alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.http.content_negotiation import LONG_BYTES
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.received_records import array_length
from outbox_broker.http.server import HttpServer
from outbox_core.protocol.wire import JSON_BYTES_MAX
from tests.outbox_broker.http.publish_bodies import of_topic, packed

JSON, PACKED = "application/json", "application/msgpack"
LONG = "x" * (2 * LONG_BYTES)
type_of_client = Callable[..., requests.Response]


def send(client: type_of_client, url: str, data: bytes, kind: str = PACKED) -> requests.Response:
    return client("POST", f"{url}/v1/publish", data=data, headers={"content-type": kind, "accept": JSON})


def messages(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"m{number}", "body": f"{number}", **more} for number in range(count)]


def long_batch(topic: str, batch: list[dict[str, Any]]) -> bytes:
    """A long publish; its last message has a long body."""
    return packed(topic, [*batch, {**batch[-1], "id": "long", "body": LONG}])


def pulled(client: type_of_client, url: str, topic: str) -> list[tuple[str, str]]:
    answer = client("POST", f"{url}/v1/topics/{topic}/groups/g/pull", json={"max_messages": 1_000})
    return [(delivery["id"], delivery["body"]) for delivery in answer.json()["deliveries"]]


@pytest.mark.parametrize("is_new", [True, False], ids=["new topic", "known topic"])
def test_a_long_batch_is_stored_in_order_with_all_that_its_messages_say(
    client: type_of_client, shared_url: str, topic: str, is_new: bool
) -> None:
    if not is_new:
        assert send(client, shared_url, packed(topic, [{"id": "first", "body": "x"}])).ok
    batch = messages(998, key="k", headers={"type": "placed"}, created_at_ms=7)

    answer = send(client, shared_url, long_batch(topic, batch))

    assert answer.status_code == 200
    assert [result["status"] for result in answer.json()["results"]] == ["stored"] * 999
    before = [] if is_new else [("first", "x")]
    sent = [(message["id"], message["body"]) for message in batch]
    assert pulled(client, shared_url, topic) == [*before, *sent, ("long", LONG)]
    again = send(client, shared_url, long_batch(topic, batch))
    assert [result["status"] for result in again.json()["results"]] == ["duplicate"] * 999


def test_what_a_message_of_a_long_batch_says_comes_back(client: type_of_client, shared_url: str, topic: str) -> None:
    batch = messages(2, key="k", headers={"type": "placed"}, created_at_ms=7)

    assert send(client, shared_url, long_batch(topic, batch)).ok

    found = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/pull", json={}).json()["deliveries"][1]
    assert (found["key"], found["headers"], found["created_at_ms"]) == ("k", {"type": "placed"}, 7)


def test_a_long_batch_may_name_many_topics(client: type_of_client, shared_url: str, topic: str) -> None:
    batch = [{**message, "topic": f"{topic}.{number % 2}"} for number, message in enumerate(messages(10))]

    assert send(client, shared_url, long_batch(topic, batch)).ok

    even, odd = (pulled(client, shared_url, f"{topic}.{number}") for number in range(2))
    assert [message_id for message_id, _ in even] == ["m0", "m2", "m4", "m6", "m8"]
    assert [message_id for message_id, _ in odd] == ["m1", "m3", "m5", "m7", "m9", "long"]


@pytest.mark.parametrize(
    ("wrong", "problem", "where"),
    [
        ({"id": 7}, "wrong-shape", "$[2][0]"),
        ({"topic": "no topic"}, "invalid-name", "$[2].topic"),
        ({"id": "not an id"}, "invalid-message", "$[2]"),
        ({"key": ""}, "invalid-message", "$[2]"),
        ({"created_at_ms": -1}, "invalid-message", "$[2]"),
        ({"created_at_ms": 2**53}, "invalid-message", "$[2]"),
        ({"deliver_at_ms": -1}, "invalid-message", "$[2]"),
        ({"headers": {"a": 1}}, "wrong-shape", "$[2][3][...]"),
        ({"headers": []}, "wrong-shape", "$[2][3]"),
        ({"headers": {"a b": ""}}, "invalid-message", "$[2]"),
        ({"headers": {f"h{number}": "" for number in range(65)}}, "invalid-message", "$[2]"),
        ({"headers": {"a": "x" * 2 * LONG_BYTES}}, "invalid-message", "$[2]"),
        ({"key": "x" * 2 * LONG_BYTES}, "invalid-message", "$[2]"),
    ],
)
def test_a_wrong_message_in_a_long_batch_is_named_and_nothing_is_stored(
    client: type_of_client, shared_url: str, topic: str, wrong: dict[str, Any], problem: str, where: str
) -> None:
    batch = messages(4)
    batch[2] |= wrong

    answer = send(client, shared_url, long_batch(topic, batch))

    assert answer.json() == send(client, shared_url, packed(topic, batch)).json()
    assert (answer.json()["type"].rpartition(":")[2], answer.json()["where"]) == (problem, where)
    assert pulled(client, shared_url, topic) == []


def test_a_long_batch_of_too_many_messages_is_refused(client: type_of_client, shared_url: str, topic: str) -> None:
    answer = send(client, shared_url, long_batch(topic, messages(1_000)))

    assert (answer.status_code, answer.json()["where"]) == (422, "$")
    assert (answer.json()["bound"], answer.json()["limit"]) == ("batch_messages_max", 1_000)
    assert pulled(client, shared_url, topic) == []


def test_the_bound_that_an_operator_lowered_holds_for_long_batches(
    serve: Callable[..., HttpServer], client: type_of_client
) -> None:
    url = serve(HttpSettings(batch_messages_max=3)).url

    assert send(client, url, long_batch("orders", messages(2))).status_code == 200
    answer = send(client, url, long_batch("orders", messages(3)))

    assert (answer.status_code, answer.json()["limit"]) == (422, 3)


@pytest.mark.parametrize(
    ("part", "value"),
    [(0, "i" * 65), (1, "t" * 256), (2, "\N{PARTY POPPER}" * 10_000), (3, {f"h{number}": "" for number in range(65)})],
    ids=["id", "topic", "key", "headers"],
)
def test_a_long_batch_is_decoded_up_to_the_first_record_that_is_too_large_beside_its_body(
    client: type_of_client, shared_url: str, topic: str, part: int, value: object
) -> None:
    records: list[Any] = [["m", topic, None, {}, b"x" * LONG_BYTES], ["n", topic, None, {}, b""], "no record"]
    records[1][part] = value

    answer = send(client, shared_url, msgspec.msgpack.encode(records))

    assert (answer.status_code, answer.json()["where"].partition(".")[0]) == (422, "$[1]")
    assert pulled(client, shared_url, topic) == []


def test_a_long_batch_in_json_is_refused_where_its_messages_stand_twice(
    client: type_of_client, shared_url: str, topic: str
) -> None:
    message = json.dumps(of_topic(topic, {"id": "a", "body": "x" * JSON_BYTES_MAX})).encode()
    twice = message[:-1] + b"," + message[1:]

    answer = send(client, shared_url, twice, JSON)

    assert (answer.status_code, answer.json()["bound"]) == (413, "JSON_BYTES_MAX")
    assert pulled(client, shared_url, topic) == []


@pytest.mark.parametrize("count", [2, 500], ids=["short", "long"])
def test_a_record_of_a_later_version_is_refused_with_what_this_broker_takes(
    client: type_of_client, shared_url: str, topic: str, count: int
) -> None:
    records = [[f"m{number}", topic, None, {}, b"x" * 2_000, 0, None] for number in range(count)]
    records[1].append("of a later version")

    answer = send(client, shared_url, msgspec.msgpack.encode(records))

    assert (answer.status_code, answer.json()["where"]) == (415, "$[1]")
    assert answer.headers["accept"] == "application/msgpack;record-parts=7"
    assert "up to 7 parts, and this one has 8" in answer.json()["detail"]
    assert pulled(client, shared_url, topic) == []


@pytest.mark.parametrize("count", [2, 500], ids=["short", "long"])
def test_a_record_of_an_earlier_version_lacks_its_last_parts(
    client: type_of_client, shared_url: str, topic: str, count: int
) -> None:
    records = [[f"m{number}", topic, None, {}, b"x" * 2_000] for number in range(count)]

    assert send(client, shared_url, msgspec.msgpack.encode(records)).status_code == 200

    assert len(pulled(client, shared_url, topic)) == count


@pytest.mark.parametrize("torn", [b"\xdd\x7f\xff\xff\xff", b"\xdc\x04\x00", b"\xdd\x00\x00", b"\x92\x90", b"\x81"])
def test_what_is_no_whole_batch_is_refused_by_its_head(client: type_of_client, shared_url: str, torn: bytes) -> None:
    answer = send(client, shared_url, torn)

    assert answer.status_code in {400, 422}


@given(count=st.integers(0, 70_000))
def test_the_length_of_an_array_is_what_its_head_says(count: int) -> None:
    encoded = msgspec.msgpack.encode([None] * count)

    assert array_length(encoded) == array_length(bytearray(encoded)) == array_length(memoryview(encoded)) == count


def test_json_has_one_message_beyond_its_bound_and_any_number_up_to_it(
    client: type_of_client, shared_url: str, topic: str
) -> None:
    one = {"id": "long", "body": "x" * JSON_BYTES_MAX}
    room = JSON_BYTES_MAX - len(json.dumps(of_topic(topic, {"id": "a", "body": ""}, {"id": "b", "body": "b"})))
    two = of_topic(topic, {"id": "a", "body": "x" * room}, {"id": "b", "body": "b"})

    assert send(client, shared_url, json.dumps(two).encode(), JSON).status_code == 200
    assert send(client, shared_url, json.dumps(of_topic(topic, one)).encode(), JSON).status_code == 200
    refused = send(client, shared_url, json.dumps(of_topic(topic, one, {"id": "c", "body": ""})).encode(), JSON)

    assert (refused.status_code, refused.json()["where"]) == (413, "$.messages")
    assert "MessagePack" in refused.json()["detail"]
    assert [message_id for message_id, _ in pulled(client, shared_url, topic)] == ["a", "b", "long"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b'{"messages":[{"topic":"TOPIC","body":"LONG"}', 400),
        (b'{"messages":[{"topic":"TOPIC","body":"LONG"}]}}', 400),
        (b'{"messages":[{"topic":"TOPIC","body":"LONG\x01"}]}', 400),
        (b'{"messages":[{"topic":"TOPIC","body":"LONG"}],"more":1}', 422),
        (b'[{"topic":"TOPIC","body":"LONG"}]', 422),
        (b'{"messages":[{"topic":"TOPIC","body":"LONG","headers":' + b"[" * 1_000_000, 400),
    ],
)
def test_a_long_body_that_is_no_batch_is_refused(
    client: type_of_client, shared_url: str, topic: str, text: bytes, status: int
) -> None:
    data = text.replace(b"TOPIC", topic.encode()).replace(b"LONG", b"x" * JSON_BYTES_MAX)

    assert send(client, shared_url, data, JSON).status_code == status
    assert pulled(client, shared_url, topic) == []
