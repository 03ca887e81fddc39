"""What the OpenAPI document promises is kept: requests made from it and against it are answered as it says, never by
a defect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from broker_adapter.http.admin_client import AdminClient
from outbox_broker.filter import render
from outbox_broker.http.routes import ROUTES
from outbox_core.messages import limits
from tests.broker_adapter.servers import served
from tests.outbox_broker.filter.generated import nodes

EXAMPLES = 10
OF_A_DELAY_SERVICE = {"/v1/refused", "/v1/refused/retry"}
"""A broker says of these that it cannot do them; tests/outbox_broker/delay/test_delay_http.py asks a delay service."""
OPERATIONS = [(route.path, route.method) for route in ROUTES if route.path not in OF_A_DELAY_SERVICE]
PROBES = [(path, "GET") for path in ("/livez", "/readyz", "/healthz", "/metrics")]
POSITIVE, NEGATIVE = "positive", "negative"
# Nothing can be wrong about a probe: it takes no parameters.
CASES = [(*one, mode) for one in OPERATIONS for mode in (POSITIVE, NEGATIVE)] + [(*one, POSITIVE) for one in PROBES]
# Not those about resources that come and go: a topic comes to be by being named.
PROMISES = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
    "negative_data_rejection",
    "positive_data_acceptance",
    "unsupported_method",
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of its own: ids that are canceled here must not be missed elsewhere."""
    with served(tmp_path_factory.mktemp("broker")) as server:
        yield server.url


@pytest.fixture(scope="module")
def promised(url: str) -> Any:
    """The server's document."""
    import schemathesis  # a second of each process that collects this file, most of which run no test of it

    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_requests_made_from_the_document_are_answered_as_it_says(
    promised: Any, url: str, path: str, method: str, mode: str
) -> None:
    from schemathesis.checks import CHECKS, load_all_checks
    from schemathesis.generation import GenerationMode

    load_all_checks()
    promises = CHECKS.get_by_names(PROMISES)
    operation = promised[path][method]

    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)), filtering=nodes.map(render))
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    def answered_as_promised(case: Any, filtering: str) -> None:
        if mode == POSITIVE:
            _as_a_schema_cannot_say(case, filtering=filtering)
        case.call_and_validate(checks=promises, timeout=120)

    try:
        answered_as_promised()
    finally:
        AdminClient(url).uncordon()  # a cordoned broker takes no publishes of the next test


def _as_a_schema_cannot_say(case: Any, *, filtering: str) -> None:
    """Rules that JSON Schema has no words for are kept here; and nothing waits.

    An integer is written without a fraction; a filter and a cron expression are languages; a backoff does not begin
    above its end; a topic has one.
    """
    if not isinstance(case.body, dict):
        return
    body = {name: _whole(value) for name, value in case.body.items()}
    if isinstance(body.get("wait_ms"), int) and body["wait_ms"] <= limits.PULL_WAIT_MS_MAX:
        body["wait_ms"] = 0
    if isinstance(body.get("filter"), str):
        body["filter"] = filtering
    if isinstance(body.get("cron"), str):
        body |= {"cron": "0 6 * * *", "tz": "Europe/Berlin"}
    if isinstance(body.get("to_offset"), int):
        body["to_offset"] = 0
    body.pop("backoff", None)
    case.body = body


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _whole(inner) for name, inner in value.items()}
        case list():
            return [_whole(inner) for inner in value]
        case _:
            return value
