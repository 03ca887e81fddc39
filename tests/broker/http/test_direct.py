"""What goes the short way is answered as by the long one, and the short way takes nothing that is not its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import requests

from broker.http.direct import DIRECT, path_names
from broker.http.routes import ROUTES

Client = Callable[..., requests.Response]


def test_every_publish_pull_and_settlement_goes_the_short_way_and_nothing_else_ends_like_one() -> None:
    short = [route for route in ROUTES if route.path.rpartition("/")[2] in DIRECT]

    assert len(short) == len(DIRECT)
    assert {route.method for route in short} == {"POST"}
    for route in short:
        last, names = path_names(route.path.encode())
        assert last in DIRECT
        assert names is not None


@pytest.mark.parametrize(
    "path",
    [
        "/v1/topics//messages", "/v1/topics/t/groups//pull", "/v1/topics//groups/g/pull", "/v1/topics/t/pull",
        "/v1/topics/t/groups/g/messages", "/v1/topics/t/things/g/pull", "/v2/topics/t/messages", "messages", "",
        "/v1/publish/", "/v1/topics/t/publish", "/v1/topics/t/groups/g/publish", "/publish", "/v1/topics/publish",
        "/v1/topics/t/messages/", "/v1/topics/t/groups/g/dead/pull", "//v1/topics/t/messages",
    ],
)  # fmt: skip
def test_a_path_of_another_shape_does_not_go_the_short_way(path: str) -> None:
    assert path_names(path.encode())[1] is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/topics/..%2Fx/messages", "invalid-name"),
        ("/v1/topics/%2E%2E/messages", "invalid-name"),
        ("/v1/topics/t/groups/a%20b/ack", "invalid-name"),
        ("/v1/topics//messages", "unknown-route"),
        ("/v1/topics/t/groups/g/messages", "unknown-route"),
        ("/v1/topics/t/messages/", "unknown-route"),
    ],
)
def test_odd_paths_are_refused_as_ever(client: Client, shared_url: str, path: str, kind: str) -> None:
    body = {"messages": [{"body": "b"}]} if path.endswith("messages") else {"receipts": []}

    response = client("POST", shared_url + path, json=body)

    assert response.json()["type"].rpartition(":")[2] == kind


def test_an_escaped_name_is_the_name_that_it_stands_for(client: Client, shared_url: str, topic: str) -> None:
    escaped = topic.replace("t.", "%74%2E")
    client("POST", f"{shared_url}/v1/topics/{escaped}/messages", json={"messages": [{"body": "b"}]})

    pulled = client("POST", f"{shared_url}/v1/topics/{topic}/groups/g/pull", json={}).json()["deliveries"]

    assert [one["topic"] for one in pulled] == [topic]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_another_method_on_such_a_path_is_not_allowed(client: Client, shared_url: str, method: str) -> None:
    response = client(method, f"{shared_url}/v1/topics/t/messages")

    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
