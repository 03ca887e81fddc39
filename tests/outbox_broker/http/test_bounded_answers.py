"""Answers are bounded in bytes, whatever is in the messages: pages of dead letters, and bodies that JSON escapes."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
import requests

from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer
from outbox_core.messages.limits import REASON_CHARS_MAX
from outbox_core.protocol.wire import Encoding
from outbox_core.protocol.wire_conversion import body_bytes, text_body
from tests.outbox_broker.http.publish_bodies import of_topic

MIB = 1024 * 1024
LETTERS = 12
GROUP = "/v1/topics/orders/groups/billing"
type_of_client = Callable[..., requests.Response]


def bury(client: type_of_client, url: str, *, text: str, reason: str = "no stock") -> None:
    """Make letters that died one by one."""
    assert client("PUT", f"{url}{GROUP}", json={"max_attempts": 1}).ok
    for number in range(LETTERS):
        message = {"id": f"m{number}", "body": text, "headers": {"h": "v" * 100}}
        assert client("POST", f"{url}/v1/publish", json=of_topic("orders", message)).ok
    for delivery in client("POST", f"{url}{GROUP}/pull", json={}).json()["deliveries"]:
        assert client("POST", f"{url}{GROUP}/nack", json={"receipts": [delivery["receipt"]], "reason": reason}).ok


def pages(client: type_of_client, url: str, *, limit: int = 1_000) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        answer = client("GET", f"{url}{GROUP}/dead?limit={limit}{after}")
        assert answer.ok
        found.append({"size": len(answer.content), **answer.json()})
        if found[-1]["next"] is None:
            return found
        after = f"&after={found[-1]['next']}"


@pytest.mark.parametrize("character", ["x", "\x01"], ids=["plain", "escaped"])
def test_a_page_of_dead_letters_ends_at_its_bound_and_the_next_one_goes_on(
    serve: Callable[..., HttpServer], client: type_of_client, character: str
) -> None:
    server = serve(HttpSettings(dead_page_bytes_max=MIB))
    bury(client, server.url, text=character * (MIB // 4))

    found = pages(client, server.url)

    assert [one["id"] for page in found for one in page["dead"]] == [f"m{number}" for number in range(LETTERS)]
    assert len(found) == LETTERS / 3
    assert max(page["size"] for page in found) < 1.5 * MIB


def test_a_letter_larger_than_the_bound_is_a_page_of_its_own(
    serve: Callable[..., HttpServer], client: type_of_client
) -> None:
    server = serve(HttpSettings(dead_page_bytes_max=1_000))
    bury(client, server.url, text="x" * 2_000)

    found = pages(client, server.url)

    assert [[one["id"] for one in page["dead"]] for page in found] == [[f"m{number}"] for number in range(LETTERS)]


def test_reasons_count_in_a_page(serve: Callable[..., HttpServer], client: type_of_client) -> None:
    server = serve(HttpSettings(dead_page_bytes_max=20_000))
    bury(client, server.url, text="", reason="\N{COLLISION SYMBOL}" * REASON_CHARS_MAX)

    found = pages(client, server.url)

    assert [len(page["dead"]) for page in found] == [2] * (LETTERS // 2)


@pytest.mark.parametrize("limit", [1, 5])
def test_the_limit_holds_beside_the_bound(serve: Callable[..., HttpServer], client: type_of_client, limit: int) -> None:
    server = serve(HttpSettings(dead_page_bytes_max=MIB))
    bury(client, server.url, text="x")

    found = pages(client, server.url, limit=limit)

    assert max(len(page["dead"]) for page in found) == limit
    assert [one["id"] for page in found for one in page["dead"]] == [f"m{number}" for number in range(LETTERS)]


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"\x01" * 100, Encoding.UTF8),
        (b"\x01" * 100_000, Encoding.BASE64),
        ((b"x" * 9 + b"\x00") * 10_000, Encoding.UTF8),
        ((b"x" * 8 + b"\x00") * 10_000, Encoding.BASE64),
        (b'{"a":"\\n"}\n\t\r' * 10_000, Encoding.UTF8),
        ("\N{SNOWMAN}".encode() * 10_000, Encoding.UTF8),
    ],
)
def test_a_long_body_that_json_would_escape_six_bytes_for_one_is_base64(body: bytes, encoding: Encoding) -> None:
    text, chosen = text_body(body)

    assert chosen is encoding
    assert body_bytes(text, chosen) == body
    if encoding is Encoding.BASE64:
        assert base64.b64decode(text) == body
