"""Answers of many bytes, which are encoded delivery by delivery: they are what a short answer would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import requests

from outbox_broker.http.content_negotiation import LONG_BYTES, Codec, encode_list
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer
from outbox_core.messages.broadcast_port import TopicRead
from outbox_core.messages.message import Delivery
from outbox_core.protocol.wire import PullAnswer, ReadAnswer
from tests.outbox_broker.http.publish_bodies import packed

type_of_client = Callable[..., requests.Response]
BODIES = [b"x" * LONG_BYTES, b"", b"\xff\x00", '"\\\N{SNOWMAN}'.encode(), b"\x01" * LONG_BYTES, b"[" * LONG_BYTES]
KINDS = {"application/json": msgspec.json, "application/msgpack": msgspec.msgpack}
SHAPES: dict[str, tuple[Any, Any]] = {
    "application/json": (PullAnswer, ReadAnswer),
    "application/msgpack": (list[Delivery], TopicRead),
}


def publish(client: type_of_client, url: str, bodies: list[bytes]) -> None:
    batch = [
        {"id": f"m{number}", "body": body, "key": "k", "headers": {"a": '"'}} for number, body in enumerate(bodies)
    ]
    base, _, topic = url.partition("/v1/topics/")
    data = packed(topic, batch)
    assert client("POST", f"{base}/v1/publish", data=data, headers={"content-type": "application/msgpack"}).ok


def ask(client: type_of_client, url: str, shape: Any, *, kind: str, **request: object) -> Any:
    answer = client("POST", url, json=request, headers={"accept": kind})
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    return KINDS[kind].decode(answer.content, type=shape)


def pulled(client: type_of_client, url: str, *, kind: str, **request: object) -> Any:
    answer = ask(client, url, SHAPES[kind][0], kind=kind, **request)
    return answer.deliveries if isinstance(answer, PullAnswer) else answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_pull_is_what_its_messages_would_be_one_by_one(
    client: type_of_client, shared_url: str, topic: str, kind: str
) -> None:
    url = f"{shared_url}/v1/topics/{topic}"
    publish(client, url, BODIES)

    whole = pulled(client, f"{url}/groups/all/pull", kind=kind)

    single: list[Any] = []
    for _ in BODIES:
        single += pulled(client, f"{url}/groups/one/pull", kind=kind, max_messages=1)
    receipts = [one.receipt.replace("/one/", "/all/") for one in single]
    assert [one.receipt for one in whole] == receipts
    assert whole == [
        msgspec.structs.replace(one, receipt=receipt) for one, receipt in zip(single, receipts, strict=True)
    ]
    answer = client("POST", f"{url}/groups/all/ack", json={"receipts": receipts}).json()
    assert {one["status"] for one in answer["results"]} == {"acked"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_read_says_where_it_goes_on(client: type_of_client, shared_url: str, topic: str, kind: str) -> None:
    url = f"{shared_url}/v1/topics/{topic}"
    publish(client, url, BODIES)
    _, read = SHAPES[kind]

    whole = ask(client, f"{url}/read", read, kind=kind, offset=1)

    assert (whole.offset, whole.next_offset) == (1, len(BODIES))
    assert [one.id for one in whole.messages] == [f"m{number}" for number in range(1, len(BODIES))]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_long_answer_cannot_carry_is_not_in_it(
    serve: Callable[..., HttpServer], client: type_of_client, kind: str
) -> None:
    url = f"{serve(HttpSettings(pull_bytes_max=2 * LONG_BYTES)).url}/v1/topics/orders"
    publish(client, url, [b"x" * (LONG_BYTES - 1)] * 5)

    parts = [pulled(client, f"{url}/groups/g/pull", kind=kind) for _ in range(3)]

    assert [[one.id for one in part] for part in parts] == [["m0", "m1"], ["m2", "m3"], ["m4"]]


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_list_of_any_length_is_what_its_codec_makes_of_it(codec: Codec, count: int) -> None:
    entries = [{"a": number, "b": "\N{SNOWMAN}"} for number in range(count)]

    answer = encode_list("entries", iter(entries), codec, count=count, offset=7)

    whole = {"entries": entries, "offset": 7} if codec is Codec.JSON else [7, entries]
    assert KINDS[codec.value].decode(answer) == whole
