"""From messages of ours to RocketMQ's: names, types, groups, properties; and how many go in one request."""

from __future__ import annotations

import pytest

from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.proxy_connection import TopicRoute, route_weaknesses
from broker_adapter.rocketmq.rocketmq_publisher import (
    REQUEST_BYTES_MAX,
    REQUEST_MESSAGES_MAX,
    engine_message,
    message_group,
    requests_of,
    topic_name,
)
from outbox_core.messages.message import Message


def route(*types: int, permission: int = definition.READ_WRITE) -> TopicRoute:
    queue = definition.MessageQueue(permission=permission, accept_message_types=types)  # type: ignore[arg-type]
    return TopicRoute.of_queues([queue])


def message(**parts: object) -> Message:
    return Message(**{"id": "m:1", "topic": "t", "body": b"b", **parts})  # type: ignore[arg-type]


NORMAL, FIFO = route(definition.NORMAL), route(definition.FIFO)
MIXED = route(definition.NORMAL, definition.FIFO, definition.DELAY, definition.TRANSACTION)


@pytest.mark.parametrize(
    ("topic_route", "key", "group"),
    [
        (NORMAL, None, None),
        (NORMAL, "k", None),
        (FIFO, "k", "k"),
        (FIFO, None, "m:1"),
        (MIXED, "k", "k"),
        (MIXED, None, None),
        (FIFO, "k" * 64, "k" * 64),
        (FIFO, "k" * 65, "f39cdc2584758c99cf81c1f41d2572f54e17066afffc9d187aeafe5f7cbe2122"),
    ],
)
def test_the_group_is_the_key_where_the_topic_keeps_order(
    topic_route: TopicRoute, key: str | None, group: str | None
) -> None:
    assert message_group(message(key=key), topic_route) == group


@pytest.mark.parametrize("key", [" ", "line\nbreak", "ü" * 33, "k" * 1_000])
def test_a_key_that_rocketmq_refuses_as_a_group_is_grouped_by_its_hash(key: str) -> None:
    groups = [message_group(message(key=one), FIFO) or "" for one in (key, key, key + "x")]

    assert groups[0] == groups[1] != groups[2]
    assert groups[0].isalnum()
    assert len(groups[0]) == 64


def test_a_message_has_our_id_its_key_and_headers_and_the_time_of_its_creation() -> None:
    one = message(key="k", headers={"Trace": "grün", "content-type": "text/plain"}, created_at_ms=1_700_000_000_123)

    made = engine_message(one, group="k")

    system = made.system_properties
    assert (system.message_id, list(system.keys), system.message_group) == ("m:1", ["m:1"], "k")
    assert (system.message_type, system.born_timestamp.ToMilliseconds()) == (definition.FIFO, 1_700_000_000_123)
    assert (made.topic.name, made.body) == ("t", b"b")
    assert dict(made.user_properties) == {
        "Trace": "grün",
        "content-type": "text/plain",
        "outbox-id": "m:1",
        "outbox-key": "k",
        "outbox-created-at-ms": "1700000000123",
    }


def test_headers_without_a_value_are_named_since_rocketmq_drops_them() -> None:
    properties = engine_message(message(headers={"a": "", "b": "x", "c": ""}), group=None).user_properties

    assert dict(properties) == {"b": "x", "outbox-id": "m:1", "outbox-empty-headers": "a,c"}


def test_attributes_of_an_event_and_its_content_type_stand_where_the_binding_has_them() -> None:
    headers = {"ce-id": "e%20", "CE-Type": "paid", "content-type": "application/json"}

    properties = engine_message(message(headers=headers), group=None).user_properties

    assert {name: value for name, value in properties.items() if name.startswith("CE_")} == {
        "CE_id": "e ",
        "CE_type": "paid",
        "CE_contenttype": "application/json",
    }


def test_dots_of_a_topic_are_underscores_and_its_own_name_is_a_property() -> None:
    made = engine_message(message(topic="payment.completed"), group=None)

    assert made.topic.name == topic_name("payment.completed") == "payment_completed"
    assert made.user_properties["outbox-topic"] == "payment.completed"


def test_a_request_ends_before_it_is_too_large_and_a_large_message_goes_alone() -> None:
    half = REQUEST_BYTES_MAX // 2
    sizes = dict(enumerate([half, half, 1, 5 * half, 1]))

    assert list(requests_of(sizes, sizes)) == [[0, 1], [2], [3], [4]]


def test_a_request_has_a_greatest_number_of_messages() -> None:
    numbers = range(REQUEST_MESSAGES_MAX + 1)

    assert [len(one) for one in requests_of(numbers, dict.fromkeys(numbers, 1))] == [REQUEST_MESSAGES_MAX, 1]
    assert list(requests_of([], {})) == []


@pytest.mark.parametrize(
    ("topic_route", "words", "cure"),
    [
        (route(definition.DELAY), "takes DELAY messages alone", "+message.type=NORMAL"),
        (route(definition.TRANSACTION), "takes TRANSACTION messages alone", "+message.type=NORMAL"),
        (route(definition.NORMAL, permission=definition.READ), "no writable queue", "updateTopicPerm"),
    ],
)
def test_a_topic_that_takes_nothing_of_ours_is_a_weakness_with_its_cure(
    topic_route: TopicRoute, words: str, cure: str
) -> None:
    [weakness] = route_weaknesses({"t": topic_route, "good": MIXED})

    assert (weakness.subject, weakness.topic) == ("t", "t")
    assert words in weakness.problem
    assert cure in weakness.cure
