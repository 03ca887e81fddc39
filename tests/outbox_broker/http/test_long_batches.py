"""Publishes of many bytes, which are decoded message by message: they come to the same as short ones, and are refused
alike. One message of each has a body twice as long as what is decoded in one go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.message_handlers import LONG_BYTES, TooManyMessages, packed_messages, text_messages
from outbox_broker.http.responses import Problem
from outbox_broker.http.server import HttpServer
from outbox_core.protocol.wire import NewMessage, PackedMessage

JSON, PACKED = "application/json", "application/msgpack"
LONG = "x" * (2 * LONG_BYTES)
type_of_client = Callable[..., requests.Response]
blanks = st.text(" \t\n\r", max_size=3)
bodies = st.text(max_size=20) | st.just('\\"],}{[,') | st.just('{"messages":[')


def send(client: type_of_client, url: str, data: bytes, kind: str = JSON) -> requests.Response:
    return client("POST", url, data=data, headers={"content-type": kind, "accept": JSON})


def messages(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"m{number}", "body": f"{number}", **more} for number in range(count)]


def encoded(kind: str, batch: list[dict[str, Any]]) -> bytes:
    """A long publish; its last message has a long body."""
    batch = [*batch, {**batch[-1], "id": "long", "body": LONG}]
    data = {"messages": batch}
    return msgspec.msgpack.encode(data) if kind == PACKED else json.dumps(data).encode()


def pulled(client: type_of_client, url: str) -> list[tuple[str, str]]:
    deliveries = client("POST", f"{url}/groups/g/pull", json={"max_messages": 1_000}).json()["deliveries"]
    return [(one["id"], one["body"]) for one in deliveries]


@pytest.fixture
def url(shared_url: str, topic: str) -> str:
    """The messages' URL of a topic of the test's own."""
    return f"{shared_url}/v1/topics/{topic}"


@pytest.mark.parametrize("kind", [JSON, PACKED])
@pytest.mark.parametrize("is_new", [True, False], ids=["new topic", "known topic"])
def test_a_long_batch_is_stored_in_order_with_all_that_its_messages_say(
    client: type_of_client, url: str, kind: str, is_new: bool
) -> None:
    if not is_new:
        assert send(client, f"{url}/messages", b'{"messages":[{"id":"first","body":"x"}]}').ok
    batch = messages(998, key="k", headers={"type": "placed"}, created_at_ms=7)

    answer = send(client, f"{url}/messages", encoded(kind, batch), kind)

    assert answer.status_code == 200
    assert [one["status"] for one in answer.json()["results"]] == ["stored"] * 999
    before = [] if is_new else [("first", "x")]
    assert pulled(client, url) == [*before, *((one["id"], one["body"]) for one in batch), ("long", LONG)]
    again = send(client, f"{url}/messages", encoded(kind, batch), kind)
    assert [one["status"] for one in again.json()["results"]] == ["duplicate"] * 999


@pytest.mark.parametrize("kind", [JSON, PACKED])
def test_what_a_message_of_a_long_batch_says_comes_back(client: type_of_client, url: str, kind: str) -> None:
    batch = messages(2, key="k", headers={"type": "placed"}, created_at_ms=7)

    assert send(client, f"{url}/messages", encoded(kind, batch), kind).ok

    found = client("POST", f"{url}/groups/g/pull", json={}).json()["deliveries"][1]
    assert (found["key"], found["headers"], found["created_at_ms"]) == ("k", {"type": "placed"}, 7)


@pytest.mark.parametrize("kind", [JSON, PACKED])
def test_a_long_batch_may_name_its_topics(client: type_of_client, shared_url: str, topic: str, kind: str) -> None:
    batch = [{**one, "topic": f"{topic}.{number % 2}"} for number, one in enumerate(messages(10))]

    assert send(client, f"{shared_url}/v1/publish", encoded(kind, batch), kind).ok

    even, odd = (pulled(client, f"{shared_url}/v1/topics/{topic}.{number}") for number in range(2))
    assert [one[0] for one in even] == ["m0", "m2", "m4", "m6", "m8"]
    assert [one[0] for one in odd] == ["m1", "m3", "m5", "m7", "m9", "long"]


def test_a_long_batch_for_a_topic_with_a_wrong_name_is_refused_where_it_stands(
    client: type_of_client, shared_url: str, topic: str
) -> None:
    batch = [{**one, "topic": topic} for one in messages(3)]
    batch[2]["topic"] = "no topic"

    answer = send(client, f"{shared_url}/v1/publish", encoded(JSON, batch))

    assert (answer.status_code, answer.json()["where"]) == (422, "$.messages[2].topic")
    assert pulled(client, f"{shared_url}/v1/topics/{topic}") == []


@pytest.mark.parametrize("kind", [JSON, PACKED])
@pytest.mark.parametrize(
    ("wrong", "problem", "where"),
    [
        ({"id": 7}, "wrong-shape", "$.messages[2].id"),
        ({"bdy": "x"}, "wrong-shape", "$.messages[2]"),
        ({"id": "not an id"}, "invalid-message", "$.messages[2]"),
        ({"deliver_at_ms": -1}, "wrong-shape", "$.messages[2].deliver_at_ms"),
        ({"headers": {"a": 1}}, "wrong-shape", "$.messages[2].headers[...]"),
        ({"headers": []}, "wrong-shape", "$.messages[2].headers"),
        ({"headers": {"a b": ""}}, "invalid-message", "$.messages[2]"),
        ({"headers": {f"h{number}": "" for number in range(65)}}, "invalid-message", "$.messages[2]"),
        ({"headers": {"a": "x" * 2 * LONG_BYTES}}, "invalid-message", "$.messages[2]"),
    ],
)
def test_a_wrong_message_in_a_long_batch_is_named_and_nothing_is_stored(
    client: type_of_client, url: str, kind: str, wrong: dict[str, Any], problem: str, where: str
) -> None:
    batch = messages(4)
    batch[2] |= wrong

    answer = send(client, f"{url}/messages", encoded(kind, batch), kind)

    short = {"messages": batch}
    data = msgspec.msgpack.encode(short) if kind == PACKED else json.dumps(short).encode()
    assert answer.json() == send(client, f"{url}/messages", data, kind).json()
    assert (answer.json()["type"].rpartition(":")[2].rpartition("/")[2], answer.json()["where"]) == (problem, where)
    assert pulled(client, url) == []


@pytest.mark.parametrize("kind", [JSON, PACKED])
def test_a_long_batch_of_too_many_messages_is_refused(client: type_of_client, url: str, kind: str) -> None:
    answer = send(client, f"{url}/messages", encoded(kind, messages(1_000)), kind)

    assert (answer.status_code, answer.json()["where"]) == (422, "$.messages")
    assert (answer.json()["bound"], answer.json()["limit"]) == ("batch_messages_max", 1_000)
    assert pulled(client, url) == []


@pytest.mark.parametrize("kind", [JSON, PACKED])
def test_the_bound_that_an_operator_lowered_holds_for_long_batches(
    serve: Callable[..., HttpServer], client: type_of_client, kind: str
) -> None:
    url = f"{serve(HttpSettings(batch_messages_max=3)).url}/v1/topics/orders"

    assert send(client, f"{url}/messages", encoded(kind, messages(2)), kind).status_code == 200
    answer = send(client, f"{url}/messages", encoded(kind, messages(3)), kind)

    assert (answer.status_code, answer.json()["limit"]) == (422, 3)


FIRST = json.dumps({"body": LONG}).encode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"messages":[FIRST,{"body":"b"', "truncated"),
        (b'{"messages":[FIRST,{"body":"b"}]', "nothing before or behind"),
        (b'{"messages":[FIRST,]}', "malformed"),
        (b'{"messages":[FIRST{"body":"b"}]}', "nothing before or behind"),
        (b'{"messages":[FIRST],"more":1}', "nothing before or behind"),
        (b'{"messages":[FIRST]}}', "nothing before or behind"),
        (b'{"messages":[FIRST,{"body":"b"}', "nothing before or behind"),
        (b'{"messages":[FIRST]' + b" " * 5_000 + b"}", "few blanks"),
        (b'{"messages":[FIRST' + b" " * 3_000_000 + b"]}", "few blanks"),
        (b'{"messages":[' + b" " * 3_000_000 + b"FIRST]}", "few blanks"),
        (b'{"more":FIRST,"messages":[]}', "nothing before or behind"),
        (b'{"messages":[FIRST,{"body":"a\x01"}]}', f"(byte {len(FIRST) + 24})"),
        (b"[FIRST]", "nothing before or behind"),
        (FIRST, "nothing before or behind"),
        (b'{"messages":[FIRST,' + b"[" * 1_000_000, "nested too deeply"),
    ],
)
def test_a_long_body_that_is_no_batch_is_malformed(client: type_of_client, url: str, text: bytes, said: str) -> None:
    answer = send(client, f"{url}/messages", text.replace(b"FIRST", FIRST))

    assert (answer.status_code, answer.json()["title"]) == (400, "The body cannot be read")
    assert said in answer.json()["detail"]
    assert pulled(client, url) == []


def test_white_space_may_stand_wherever_json_has_it(client: type_of_client, url: str) -> None:
    text = b'\n { "messages" : [ {"id": "a", "body": "1"} , \t{"id": "b", "body": "%b"}\r\n] } ' % LONG.encode()

    assert send(client, f"{url}/messages", text).status_code == 200
    assert pulled(client, url) == [("a", "1"), ("b", LONG)]


@given(texts=st.lists(bodies, max_size=8), before=blanks, behind=blanks)
def test_messages_one_by_one_are_what_a_decoder_makes_of_all(texts: list[str], before: str, behind: str) -> None:
    entries = [before + json.dumps({"body": one, "headers": {one: "{"}}, ensure_ascii=False) + behind for one in texts]
    text = f'{before}{{"messages"{behind}:[{",".join(entries)}]{before}}}{behind}'.encode()
    packed = msgspec.msgpack.encode({"messages": [{"body": one.encode()} for one in texts]})

    assert [one.body for one in text_messages(bytearray(text), NewMessage)] == texts
    assert [one.body for one in packed_messages(bytearray(packed), PackedMessage)] == [one.encode() for one in texts]


@given(cut=st.integers(0, 60))
def test_a_torn_batch_is_no_batch(cut: int) -> None:
    text = b'{"messages":[{"body":"a\\"]"},{"body":"b","headers":{"a":"}"}}]}'

    with pytest.raises(Problem):
        list(text_messages(text[:cut], NewMessage))


def test_nothing_is_decoded_of_a_packed_batch_that_says_it_is_too_long() -> None:
    entries: Iterator[PackedMessage] = packed_messages(b"\x81\xa8messages\xdd\x7f\xff\xff\xff", PackedMessage)

    with pytest.raises(TooManyMessages):
        next(entries)


def test_a_text_batch_is_decoded_up_to_its_bound_and_no_further() -> None:
    text = b'{"messages":[' + b'{"body":""},' * 1_000 + b"no JSON"

    with pytest.raises(TooManyMessages):
        list(text_messages(text.replace(b"no JSON", b'{"body":""},no JSON'), NewMessage))
