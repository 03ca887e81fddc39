"""CloudEvents, binary mode: what we write others read, what others write we read, and what is none is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary, to_binary
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from outbox import CloudEvents, cloudevents
from outbox_core import Delivery, Message
from outbox_core.common.errors import ConfigurationError, InvalidMessage
from outbox_core.messages.message import check_headers, check_key
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop

EVENTS = CloudEvents(source="/shop", type_prefix="com.example.")
CREATED_AT_MS = 1_800_000_000_007
strings = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60).filter(cloudevents.is_string)


def made(headers: Mapping[str, str] | None = None, **parts: Any) -> dict[str, str]:
    named: dict[str, Any] = {"message_id": "m-1", "topic": "payment.completed", "key": None, **parts}
    return EVENTS.headers(created_at_ms=CREATED_AT_MS, headers=headers or {}, **named)


def delivery(headers: Mapping[str, str], body: bytes = b"") -> Delivery:
    return Delivery(receipt="r", attempt=1, message=Message(id="m-1", topic="t", body=body, headers=headers))


def whole(**headers: str) -> dict[str, str]:
    required = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/x", "ce-type": "t"}
    return {**required, **{name.replace("_", "-"): value for name, value in headers.items()}}


def test_a_message_is_an_event_by_its_headers() -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}

    headers = made({"content-type": "application/json", **trace}, key="order 7", deliver_at_ms=CREATED_AT_MS + 60_000)

    assert headers == {
        "content-type": "application/json",
        **trace,
        "ce-specversion": "1.0",
        "ce-id": "m-1",
        "ce-source": "/shop",
        "ce-type": "com.example.payment.completed",
        "ce-time": "2027-01-15T08:00:00.007Z",
        "ce-subject": "order%207",
        "ce-deliverat": "2027-01-15T08:01:00.007Z",
        "ce-traceparent": trace["traceparent"],
        "ce-tracestate": "a=b",
    }


def test_a_header_of_the_users_own_wins() -> None:
    headers = made({"CE-Type": "mine", "ce-subject": "hers"}, key="k")

    assert headers["CE-Type"] == "mine"
    assert "ce-type" not in headers
    assert headers["ce-subject"] == "hers"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ("plain-~!#$&'()*+,/:;=?@[]^_`{|}\\", "plain-~!#$&'()*+,/:;=?@[]^_`{|}\\"),
        ('a "b" 100%', "a%20%22b%22%20100%25"),
        ("Euro \u20ac \U0001f600", "Euro%20%E2%82%AC%20%F0%9F%98%80"),
        ("already%20encoded", "already%2520encoded"),
    ],
)
def test_values_are_percent_encoded_where_they_must_be_and_nowhere_else(value: str, encoded: str) -> None:
    assert cloudevents.encode(value) == encoded
    assert cloudevents.decode(encoded) == value


@pytest.mark.parametrize(
    ("encoded", "value"),
    [('"quoted \\"x\\" \\\\"', 'quoted "x" \\'), ("%e2%82%ac", "\u20ac"), ("%41", "A"), ("", ""), ("a+b", "a+b")],
)
def test_what_older_and_other_writers_write_is_read(encoded: str, value: str) -> None:
    assert cloudevents.decode(encoded) == value


@pytest.mark.parametrize("encoded", ["%", "%4", "%zz", "%C0%A0", "%ED%A0%80", "%FF", "100%"])
def test_what_is_no_percent_encoded_utf8_is_refused(encoded: str) -> None:
    with pytest.raises(ValueError, match=r"%|utf-8"):
        cloudevents.decode(encoded)
    with pytest.raises(InvalidMessage, match="ce-subject"):
        cloudevents.read(delivery(whole(ce_subject=encoded)))


@given(value=strings)
def test_any_value_comes_back_and_is_a_header_that_any_transport_carries(value: str) -> None:
    encoded = cloudevents.encode(value)

    assert cloudevents.decode(encoded) == value
    assert all("\x21" <= character <= "\x7e" and character != '"' for character in encoded)


@given(key=strings, prefix=strings, data=st.dictionaries(st.text(), st.integers()))
def test_the_reference_sdk_reads_what_we_write(key: str, prefix: str, data: dict[str, int]) -> None:
    headers = CloudEvents(source="/shop", type_prefix=prefix).headers(
        message_id="m-1", topic="orders", key=key, created_at_ms=CREATED_AT_MS,
        headers={"content-type": "application/json"},
    )  # fmt: skip

    event = from_binary(HTTPMessage(headers=headers, body=json.dumps(data).encode()), JSONFormat(), CloudEvent)

    assert event.get_type() == prefix + "orders"
    assert (event.get_id(), event.get_source(), event.get_subject()) == ("m-1", "/shop", key)
    assert event.get_time() == datetime(2027, 1, 15, 8, 0, 0, 7_000, UTC)
    assert event.get_data() == data


@given(
    subject=strings,
    extension=st.from_regex(r"[a-z][a-z0-9]{0,19}", fullmatch=True).filter(
        lambda name: (
            name not in {"id", "type", "time", "data", "source", "subject"} and not name.startswith(("data", "spec"))
        )
    ),
    value=strings,
)
def test_we_read_what_the_reference_sdk_writes(subject: str, extension: str, value: str) -> None:
    given_attributes = {"id": "1", "source": "/x", "type": "t", "specversion": "1.0", "subject": subject}
    event = CloudEvent(attributes={**given_attributes, extension: value}, data={"n": 1})
    written = to_binary(event, JSONFormat())

    found = cloudevents.read(delivery(written.headers, written.body))

    assert found["subject"] == subject
    assert found[extension] == value
    assert found["data"] == ({"n": 1} if "datacontenttype" in found else written.body)


@given(key=st.text(min_size=1, max_size=30))
def test_a_key_makes_a_valid_message_or_is_refused_at_publish(key: str) -> None:
    try:
        check_key(key)
        headers = made(key=key)
    except InvalidMessage:
        return

    check_headers(headers)
    assert cloudevents.read(delivery(headers))["subject"] == key


def test_an_event_is_read_whole_by_names_in_any_case() -> None:
    headers = {
        "CE-SpecVersion": "1.0", "Ce-Id": "1", "ce-source": "/x", "ce-type": "t", "ce-comexampleext": "a%20b",
        "Content-Type": "application/vnd.shop+json; charset=utf-8", "other": "not an attribute",
    }  # fmt: skip

    assert cloudevents.read(delivery(headers, b'{"n":1}')) == {
        "specversion": "1.0",
        "id": "1",
        "source": "/x",
        "type": "t",
        "comexampleext": "a b",
        "datacontenttype": "application/vnd.shop+json; charset=utf-8",
        "data": {"n": 1},
    }


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, "no id, source, specversion, type"),
        ({"ce-id": "1", "ce-source": "/x", "ce-specversion": "1.0"}, "no type"),
        (whole(ce_id=""), "no id"),
        (whole(ce_specversion="0.3"), "version '0.3'"),
        (whole(ce_data="x"), "ce-data"),
        (whole(ce_datacontenttype="text/plain"), "ce-datacontenttype"),
        (whole(ce_a_b="x"), "ce-a-b"),
        (whole(ce_subject="a%0Ab"), "ce-subject"),
        (whole(content_type="application/json"), "not JSON"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_is_no_event_is_refused_with_the_reason(headers: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidMessage, match=named):
        cloudevents.read(delivery(headers, b"{"))


@pytest.mark.parametrize("source", ["", "a b", "\u20ac", "/x%", "/x%zz", '"', "<x>"])
def test_a_source_that_is_no_uri_reference_is_refused(source: str) -> None:
    with pytest.raises(ConfigurationError, match="URI-reference"):
        CloudEvents(source=source)


@pytest.mark.parametrize("key", ["a\nb", "\x7f", "\ufffe", "\U0001ffff", "\ufdd0"])
def test_a_key_that_can_be_no_subject_is_refused(key: str) -> None:
    with pytest.raises(InvalidMessage, match="subject"):
        made(key=key)


def test_an_outbox_publishes_events(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker, cloudevents=EVENTS)

    @box.transactional
    def pay(_session: object) -> None:
        box.publish("payment.completed", {"order": 7}, key="7", message_id="m-7")

    pay()
    broker.wait_for(lambda one: len(one.stored) == 1)

    (message,) = broker.stored
    event = cloudevents.read(delivery(message.headers, message.body))
    assert (event["id"], event["type"], event["subject"]) == ("m-7", "com.example.payment.completed", "7")
    assert event["data"] == {"order": 7}
