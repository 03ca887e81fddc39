"""The bound on a body by its route: far above what is lawful there, and far below what a server has memory for."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
import requests

from outbox_broker.filter.parser import FILTER_CHARS_MAX
from outbox_broker.http.routes import ROUTES
from outbox_core.messages import limits

MIB = 1024 * 1024
LISTS_BYTES = 2 * MIB
type_of_client = Callable[..., requests.Response]
PUBLISH = "/v1/publish"
WITH_BODIES = {PUBLISH, "/v1/topics/{topic}/groups/{group}/dead/edit"}


def longest_receipts(topic: str, group: str) -> list[str]:
    return [f"{topic}/{group}/{10**17 + number}.{10**17}.{10**8}" for number in range(limits.BATCH_MESSAGES_MAX)]


@pytest.mark.parametrize("kind", ["application/json", "application/msgpack"])
@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_as_many_receipts_of_the_longest_names_as_a_request_may_have_fit(
    client: type_of_client, shared_url: str, topic: str, verb: str, kind: str
) -> None:
    name, group = topic.ljust(limits.TOPIC_CHARS_MAX, "t"), "g" * limits.GROUP_CHARS_MAX
    body = {"receipts": longest_receipts(name, group)}
    if verb == "extend":
        body["invisible_ms"] = 1  # type: ignore[assignment]
    if verb == "nack":
        body["reason"] = "\N{COLLISION SYMBOL}" * limits.REASON_CHARS_MAX  # type: ignore[assignment]
    data = msgspec.msgpack.encode(body) if "msgpack" in kind else json.dumps(body).encode()

    answer = client(
        "POST", f"{shared_url}/v1/topics/{name}/groups/{group}/{verb}", data=data,
        headers={"content-type": kind, "accept": "application/json"},
    )  # fmt: skip

    assert (answer.status_code, len(answer.json()["results"])) == (200, limits.BATCH_MESSAGES_MAX)


def test_as_many_ids_as_a_request_may_have_fit(client: type_of_client, shared_url: str) -> None:
    ids = [f"{number:064}" for number in range(limits.BATCH_MESSAGES_MAX)]

    answer = client("POST", f"{shared_url}/v1/scheduled/cancel", json={"ids": ids})

    assert (answer.status_code, len(answer.json()["results"])) == (200, limits.BATCH_MESSAGES_MAX)


def test_the_longest_filter_fits_however_it_is_escaped(client: type_of_client, shared_url: str, topic: str) -> None:
    text = "type = '" + "\N{COLLISION SYMBOL}" * (FILTER_CHARS_MAX - 9) + "'"

    answer = client("PUT", f"{shared_url}/v1/topics/{topic}/groups/g", json={"filter": text})

    assert answer.status_code == 200
    assert client("GET", f"{shared_url}/v1/topics/{topic}/groups/g").json()["settings"]["filter"] == text


@pytest.mark.parametrize("route", [one for one in ROUTES if one.body], ids=lambda one: f"{one.method} {one.path}")
def test_a_body_beyond_the_bound_of_its_route_is_refused_before_it_is_read(
    client: type_of_client, shared_url: str, topic: str, route: object
) -> None:
    (found,) = [one for one in ROUTES if one is route]
    size = limits.BATCH_BYTES_MAX if found.body_bytes_max is None else found.body_bytes_max
    path = found.path.format(topic=topic, group="g", name="n")

    answer = client(
        found.method, f"{shared_url}{path}", data=b" " * (size + 1), headers={"content-type": "application/json"}
    )

    assert (answer.status_code, answer.json()["limit"]) == (413, size)
    assert found.path in WITH_BODIES or size <= LISTS_BYTES
