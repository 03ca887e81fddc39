"""Paths find their routes, and odd paths find none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests

from outbox_broker.http.probe_routes import OPERATIONS
from outbox_broker.http.responses import Problem
from outbox_broker.http.routes import ROUTES, Route, Router
from tests.outbox_broker.http.publish_bodies import of_topic

Client = Callable[..., requests.Response]
ROUTER = Router((*ROUTES, *OPERATIONS))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_is_found_with_the_names_in_its_path(route: Route) -> None:
    found, names = ROUTER.find(route.method, route.path)

    assert found is route
    assert names == {name: f"{{{name}}}" for name in ("topic", "group", "id", "name") if f"{{{name}}}" in route.path}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/topics//read", "/v1/topics/t/groups//pull", "/v1/topics//groups/g/pull", "/v1/topics/t/pull",
        "/v1/topics/t/groups/g/read", "/v1/topics/t/things/g/pull", "/v2/topics/t/read", "read", "",
        "/v1/publish/", "/v1/topics/t/publish", "/v1/topics/t/groups/g/publish", "/publish",
        "/v1/topics/t/read/", "/v1/topics/t/messages", "/v1/topics/t/groups/g/dead/pull", "//v1/topics/t/read",
        "/v1/topics/" + "t" * 5_000 + "/read",
    ],
)  # fmt: skip
def test_a_path_of_another_shape_finds_nothing(path: str) -> None:
    with pytest.raises(Problem) as refused:
        ROUTER.find("POST", path)

    assert refused.value.answer.status == 404


def test_a_message_whose_id_is_a_path_s_word_is_found() -> None:
    found, names = ROUTER.find("GET", "/v1/scheduled/cancel")

    assert (found.path, names) == ("/v1/scheduled/{id}", {"id": "cancel"})


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/topics/..%2Fx/read", "invalid-name"),
        ("/v1/topics/%2E%2E/read", "invalid-name"),
        ("/v1/topics/t/groups/a%20b/ack", "invalid-name"),
        ("/v1/topics//read", "unknown-route"),
        ("/v1/topics/t/groups/g/read", "unknown-route"),
        ("/v1/topics/t/read/", "unknown-route"),
    ],
)
def test_odd_paths_are_refused_as_ever(client: Client, shared_url: str, path: str, kind: str) -> None:
    body: dict[str, Any] = {} if path.endswith("read") else {"receipts": []}

    response = client("POST", shared_url + path, json=body)

    assert response.json()["type"].rpartition(":")[2] == kind


def test_an_escaped_name_is_the_name_that_it_stands_for(client: Client, shared_url: str, topic: str) -> None:
    escaped = topic.replace("t.", "%74%2E")
    client("POST", f"{shared_url}/v1/publish", json=of_topic(topic, {"body": "b"}))

    pulled = client("POST", f"{shared_url}/v1/topics/{escaped}/groups/g/pull", json={}).json()["deliveries"]

    assert [one["topic"] for one in pulled] == [topic]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_another_method_on_such_a_path_is_not_allowed(client: Client, shared_url: str, method: str) -> None:
    response = client(method, f"{shared_url}/v1/topics/t/read")

    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
