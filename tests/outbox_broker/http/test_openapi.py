"""The OpenAPI document lists every route of the protocol, and its shapes are those on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from outbox_broker.http.routes import ROUTES

Client = Callable[..., requests.Response]

PROTOCOL = {
    ("delete", "/v1/topics/{topic}"),
    ("delete", "/v1/topics/{topic}/groups/{group}"),
    ("post", "/v1/topics/{topic}/read"),
    ("post", "/v1/publish"),
    ("post", "/v1/topics/{topic}/groups/{group}/pull"),
    ("post", "/v1/topics/{topic}/groups/{group}/ack"),
    ("post", "/v1/topics/{topic}/groups/{group}/nack"),
    ("post", "/v1/topics/{topic}/groups/{group}/extend"),
    ("post", "/v1/scheduled/cancel"),
    ("put", "/v1/topics/{topic}/groups/{group}"),
    ("get", "/v1/scheduled"),
    ("get", "/v1/scheduled/{id}"),
    ("get", "/v1/refused"),
    ("post", "/v1/refused/retry"),
    ("get", "/v1/recurring"),
    ("put", "/v1/recurring/{name}"),
    ("get", "/v1/recurring/{name}"),
    ("delete", "/v1/recurring/{name}"),
    ("post", "/v1/recurring/{name}/pause"),
    ("post", "/v1/recurring/{name}/resume"),
    ("post", "/v1/cordon"),
    ("post", "/v1/uncordon"),
    ("post", "/v1/snapshot"),
    ("get", "/v1/status"),
    ("get", "/v1/topics"),
    ("get", "/v1/topics/{topic}"),
    ("get", "/v1/topics/{topic}/groups/{group}"),
    ("post", "/v1/topics/{topic}/purge"),
    ("post", "/v1/topics/{topic}/groups/{group}/seek"),
    ("post", "/v1/topics/{topic}/groups/{group}/pause"),
    ("post", "/v1/topics/{topic}/groups/{group}/resume"),
    ("get", "/v1/topics/{topic}/groups/{group}/dead"),
    ("post", "/v1/topics/{topic}/groups/{group}/dead/redrive"),
    ("post", "/v1/topics/{topic}/groups/{group}/dead/redrive/stop"),
    ("post", "/v1/topics/{topic}/groups/{group}/dead/count"),
    ("post", "/v1/topics/{topic}/groups/{group}/dead/discard"),
    ("post", "/v1/topics/{topic}/groups/{group}/dead/edit"),
    ("get", "/metrics"),
    ("get", "/livez"),
    ("get", "/readyz"),
    ("get", "/healthz"),
    ("get", "/openapi.json"),
}


@pytest.fixture
def document(client: Client, shared_url: str) -> dict[str, Any]:
    """The document as the server tells it."""
    found: dict[str, Any] = client("GET", f"{shared_url}/openapi.json").json()
    return found


def test_the_document_lists_every_route_of_the_protocol_and_no_other(document: dict[str, Any]) -> None:
    listed = {(method, path) for path, methods in document["paths"].items() for method in methods}

    assert listed == PROTOCOL
    assert document["openapi"].startswith("3.1")


def test_every_listed_route_is_served(client: Client, shared_url: str, document: dict[str, Any], topic: str) -> None:
    for path, methods in document["paths"].items():
        url = shared_url + path.format(topic=topic, group="g", id="x", name="n") if "{" in path else shared_url + path
        for method in methods:
            response = client(method.upper(), url, data=b"", headers={"content-type": "application/json"})

            assert response.status_code != 405, (method, path)
            assert "unknown-route" not in response.text, (method, path)


def test_every_reference_in_the_document_leads_somewhere(document: dict[str, Any]) -> None:
    references = set(_references(document))

    assert references
    for reference in references:
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found


def test_operation_ids_are_unique_and_every_operation_has_a_summary(document: dict[str, Any]) -> None:
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]

    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] for operation in operations)


def test_get_routes_change_nothing() -> None:
    changing = {"publish", "ack", "nack", "extend", "cancel", "declare", "seek", "pause", "resume", "redrive"}

    assert not [
        route for route in ROUTES if route.method == "GET" and getattr(route.handler, "__name__", "") in changing
    ]


def test_statuses_that_answers_have_are_in_the_document(
    client: Client, shared_url: str, document: dict[str, Any]
) -> None:
    path = "/v1/publish"
    listed = set(document["paths"][path]["post"]["responses"])

    for body, headers in (
        (b"{", {"content-type": "application/json"}),
        (b"{}", {"content-type": "application/json"}),
        (b"{}", {"content-type": "text/plain"}),
        (b'{"messages": []}', {"content-type": "application/json"}),
        (b'{"messages": []}', {"content-type": "application/json", "accept": "text/html"}),
    ):
        response = client("POST", shared_url + path, data=body, headers=headers)

        assert str(response.status_code) in listed


def _references(part: object) -> Iterator[str]:
    match part:
        case dict():
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            for inner in part.values():
                yield from _references(inner)
        case list():
            for inner in part:
                yield from _references(inner)
