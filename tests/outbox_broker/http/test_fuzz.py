"""Whatever is sent, the answer is one of the protocol's: never a defect, never another format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.http.routes import ROUTES
from outbox_core.protocol.problem import PROBLEM_PREFIX, ProblemKind

FIELDS = sorted(
    {name for route in ROUTES if route.body for name in route.body.__struct_fields__} | {"body", "id", "key"}
)
CORDON, UNCORDON = "/v1/cordon", "/v1/uncordon"
# A long poll would only wait here, so no wait_ms that is allowed is drawn.
VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from([-1, 0, 2**53, 2**64, 10**30]) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from([name for name in FIELDS if name != "wait_ms"]), VALUES, max_size=4) | VALUES
QUERY = ["topic", "from_ms", "to_ms", "bucket", "limit", "after", "x"]
PARTS = st.text(max_size=12) | st.sampled_from(["t", "g", "..", ".", "%", "%2e", "a/b", "\x00"])


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One client for all examples."""
    with requests.Session() as made:
        made.trust_env = False
        yield made


@given(
    route=st.sampled_from(ROUTES),
    body=BODIES | st.binary(max_size=60),
    packed=st.booleans(),
    accept=st.sampled_from(["*/*", "application/msgpack", "application/json", "text/html", ",;q=x", "*/*;q=0"]),
    names=st.tuples(PARTS, PARTS, PARTS),
    query=st.dictionaries(st.sampled_from(QUERY), PARTS, max_size=3),
)  # fmt: skip
def test_any_request_is_answered_in_the_words_of_the_protocol(
    session: requests.Session, shared_url: str, route: Any, body: object, packed: bool, accept: str,
    names: tuple[str, str, str], query: dict[str, str],
) -> None:  # fmt: skip
    topic, group, item = (requests.utils.quote(name, safe="") for name in names)
    path = route.path.format(topic=topic, group=group, id=item, name=item)

    response = session.request(
        route.method,
        shared_url + path,
        params=query,
        data=None if route.body is None else _written(body, packed=packed),
        headers={"accept": accept, "content-type": "application/msgpack" if packed else "application/json"},
        timeout=120,
    )
    if route.path == CORDON:  # a cordoned broker refuses publishes, of other tests, too
        session.post(shared_url + UNCORDON, timeout=120).raise_for_status()

    assert response.status_code < 500, response.text
    kind = response.headers["content-type"]
    if response.status_code == 200:
        decode = {"application/json": msgspec.json.decode, "application/msgpack": msgspec.msgpack.decode}[kind]
        assert isinstance(decode(response.content), dict if kind == "application/json" else dict | list)
    else:
        assert kind == "application/problem+json"
        assert response.json()["type"].removeprefix(PROBLEM_PREFIX) in set(ProblemKind)


def _written(body: object, *, packed: bool) -> bytes:
    if isinstance(body, bytes):
        return body
    if not packed:
        return json.dumps(body).encode("utf-8", "surrogatepass")
    try:
        return msgspec.msgpack.encode(body)
    except (OverflowError, UnicodeEncodeError):
        return b"\xc1"
