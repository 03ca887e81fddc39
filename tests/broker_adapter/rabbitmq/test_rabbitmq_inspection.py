"""Each way in which queues lose messages is seen on a real server, and so is what cannot be seen."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from broker_adapter.rabbitmq.durability_inspection import queue_weaknesses, takes
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.broker_port import Broker, Inspectable, Weakness
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.rabbitmq.rabbitmq_engine import PASSWORD, USER, RabbitMqEngine
from tests.broker_adapter.rabbitmq.rabbitmq_server import HOST, wait_for

Open = Callable[[str], Broker]
QUORUM = {"name": "q", "durable": True, "auto_delete": False, "arguments": {}, "members": ["a", "b", "c"]}
CLASSIC = {"name": "q", "durable": True, "auto_delete": False, "arguments": {}}


@pytest.fixture
def topic() -> str:
    return f"t.{uuid.uuid4().hex}"


def weaknesses(broker: Broker, *topics: str) -> list[Weakness]:
    assert isinstance(broker, Inspectable)
    return list(broker.inspect(topics).weaknesses)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"durable": False}, "not durable"),
        ({"auto_delete": True}, "last consumer"),
        ({"x_expires": 3_600_000}, "nobody has consumed"),
        ({"x_message_ttl": 3_600_000}, "nobody has read in time"),
        ({"x_max_length": 5}, "drops its oldest"),
        ({"x_max_length_bytes": 500, "x_overflow": "drop-head"}, "drops its oldest"),
    ],
)
def test_a_queue_that_loses_messages_is_weak_and_strict_defers_its_topic_alone(
    engine: RabbitMqEngine, open_broker: Open, topic: str, made_topic: str, settings: dict[str, Any], problem: str
) -> None:
    engine.server.declare(topic, **settings)

    [weakness] = weaknesses(open_broker(engine.url), topic, made_topic)
    results = open_broker(f"{engine.url}&strict=true").publish(
        [Message(id="1", topic=topic, body=b""), Message(id="2", topic=made_topic, body=b"")]
    )

    assert (weakness.topic, weakness.subject, problem in weakness.problem) == (topic, f"queue {topic}", True)
    assert [one.status for one in results] == [PublishStatus.DEFERRED, PublishStatus.STORED]


def test_a_queue_that_passes_on_what_nobody_has_read_in_time_is_not_weak(
    engine: RabbitMqEngine, open_broker: Open, topic: str
) -> None:
    engine.server.declare(topic, x_message_ttl=3_600_000, x_dead_letter_exchange="amq.direct")

    assert weaknesses(open_broker(engine.url), topic) == []


def test_a_limited_queue_that_refuses_what_it_has_no_room_for_is_not_weak(
    engine: RabbitMqEngine, open_broker: Open, topic: str
) -> None:
    engine.server.declare(topic, x_max_length=5, x_overflow="reject-publish")

    assert weaknesses(open_broker(engine.url), topic) == []


@pytest.mark.slow
def test_a_limit_by_policy_is_seen(engine: RabbitMqEngine, open_broker: Open, topic: str) -> None:
    engine.server.declare(topic)
    path = f"policies/%2F/{topic}"
    engine.server.api("PUT", path, pattern=f"^{topic}$", definition={"max-length": 5}, **{"apply-to": "queues"})
    try:
        wait_for(lambda: bool(engine.server.api("GET", f"queues/%2F/{topic}").get("policy")))
        [weakness] = weaknesses(open_broker(engine.url), topic)
    finally:
        engine.server.api("DELETE", path)

    assert "drops its oldest" in weakness.problem


def test_a_topic_without_a_queue_is_named(engine: RabbitMqEngine, open_broker: Open, topic: str) -> None:
    [weakness] = weaknesses(open_broker(engine.url), topic)

    assert (weakness.topic, f"no queue '{topic}'" in weakness.problem) == (topic, True)
    assert "exchange" not in str(weakness), "the URL names none, so declaring one is no cure"


def test_queues_behind_an_exchange_are_found_by_its_bindings(
    engine: RabbitMqEngine, open_broker: Open, topic: str
) -> None:
    exchange = f"x.{uuid.uuid4().hex}"
    engine.server.api("PUT", f"exchanges/%2F/{exchange}", type="topic", durable=True)
    for queue, durable in ((f"{topic}.kept", True), (f"{topic}.lost", False)):
        engine.server.declare(queue, durable=durable)
        engine.server.bind(exchange, queue, "paid.#")
    broker = open_broker(f"{engine.url}&exchange={exchange}")

    found = weaknesses(broker, "paid.eu", "unbound")

    assert [(one.topic, one.subject) for one in found] == [
        ("paid.eu", f"queue {topic}.lost"),
        ("unbound", "topic unbound"),
    ]


def test_without_the_management_api_durability_is_unknown_and_strict_refuses(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str
) -> None:
    url = engine.url_of(USER, PASSWORD)

    [weakness] = weaknesses(open_broker(url), made_topic)
    with pytest.raises(StorageFailed, match="management="):
        open_broker(f"{url}?strict=true").publish([Message(id="1", topic=made_topic, body=b"")])

    assert (weakness.topic, "unknown" in weakness.problem) == (None, True)


@pytest.mark.parametrize("management", ["http://127.0.0.1:1", "the user's"])
def test_an_api_that_cannot_be_asked_is_named_and_stops_no_publish(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str, management: str
) -> None:
    engine.server.add_user("untagged", "s3cret")
    api = engine.server.management_url if management == "the user's" else management
    broker = open_broker(f"{engine.url_of('untagged', 's3cret')}?management={api}")

    [weakness] = weaknesses(broker, made_topic)
    [result] = broker.publish([Message(id="1", topic=made_topic, body=b"")])

    assert ("unknown" in weakness.problem, "monitoring" in weakness.cure) == (True, True)
    assert result.status is PublishStatus.STORED


@pytest.mark.slow
def test_an_api_that_hangs_is_named_and_stops_no_publish(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str
) -> None:
    with socket.create_server((HOST, 0)) as silent:
        url = f"{engine.url_of(USER, PASSWORD)}?management=http://{HOST}:{silent.getsockname()[1]}"

        [result] = open_broker(url).publish([Message(id="1", topic=made_topic, body=b"")])
        shown = [weaknesses(open_broker(f"{url}&timeout_ms={bound}"), made_topic) for bound in (3_000, 4_000)]

    assert result.status is PublishStatus.STORED
    assert "no answer in time" in shown[0][0].problem
    assert shown[0] == shown[1], "it is logged once"


def test_in_a_cluster_a_queue_needs_a_second_copy() -> None:
    assert list(queue_weaknesses("t", CLASSIC, node_count=1)) == []
    assert list(queue_weaknesses("t", QUORUM, node_count=3)) == []
    assert ["one of 3 nodes" in one.problem for one in queue_weaknesses("t", CLASSIC, node_count=3)] == [True]


@pytest.mark.parametrize(
    ("kind", "binding", "topic", "expected"),
    [
        ("direct", "a.b", "a.b", True),
        ("direct", "a.#", "a.b", False),
        ("fanout", "", "a", True),
        ("headers", "", "a", True),
        ("topic", "#", "a.b", True),
        ("topic", "a.*", "a.b", True),
        ("topic", "a.*", "a.b.c", False),
        ("topic", "a.#", "a", True),
        ("topic", "a.#.d", "a.b.c.d", True),
        ("topic", "*.b", "b", False),
    ],
)
def test_a_binding_takes_what_the_exchanges_type_says(kind: str, binding: str, topic: str, expected: bool) -> None:
    assert takes(kind, binding, topic) is expected
