"""Each way in which a stream's settings lose messages is seen on a real server, and is gone once it is cured."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType

from outbox_core.common.errors import StorageFailed
from outbox_core.messages.broker_port import Broker, Inspectable, Weakness
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.nats.nats_server import NatsEngine

Open = Callable[[str], Broker]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Connect to a URL; closed at the end of the test."""
    with ExitStack() as stack:

        def connected(url: str) -> Broker:
            broker = connect(url)
            stack.callback(broker.close)
            return broker

        yield connected


@pytest.fixture
def topic() -> str:
    return f"t{uuid.uuid4().hex}"


def weaknesses(broker: Broker, topic: str) -> list[Weakness]:
    assert isinstance(broker, Inspectable)
    return list(broker.inspect([topic]).weaknesses)


def test_a_stream_in_memory_is_weak(engine: NatsEngine, opened: Open, topic: str) -> None:
    engine.add_stream(topic, subjects=[topic], storage=StorageType.MEMORY)

    [weakness] = weaknesses(opened(engine.url), topic)

    assert (weakness.subject, "memory" in weakness.problem) == (f"stream {topic}", True)
    assert "storage: file" in weakness.cure


def test_a_short_duplicate_window_is_weak_until_it_is_widened(engine: NatsEngine, opened: Open, topic: str) -> None:
    engine.add_stream(topic, subjects=[topic], duplicate_window=10)
    broker = opened(engine.url)

    [weakness] = weaknesses(broker, topic)

    assert "after 10 s is stored twice" in weakness.problem
    change_stream(engine, topic, duplicate_window=120)
    assert weaknesses(broker, topic) == []


@pytest.mark.slow
def test_a_stream_that_confirms_nothing_is_weak_and_its_messages_are_deferred(
    engine: NatsEngine, opened: Open, topic: str
) -> None:
    engine.add_stream(topic, subjects=[topic], no_ack=True)
    broker = opened(engine.url)

    [weakness] = weaknesses(broker, topic)
    [result] = broker.publish([Message(id="1", topic=topic, body=b"")])

    assert "confirms nothing" in weakness.problem
    assert (result.status, "--ack" in str(result.error)) == (PublishStatus.DEFERRED, True)


def test_a_stream_that_keeps_what_consumers_want_is_weak_until_one_wants_the_topic(
    engine: NatsEngine, opened: Open, topic: str
) -> None:
    engine.add_stream(topic, subjects=[f"{topic}.>"], retention=RetentionPolicy.INTEREST)
    add_consumer(engine, topic, filter_subject=f"{topic}.other.>")
    broker = opened(engine.url)

    [weakness] = weaknesses(broker, f"{topic}.paid")

    assert "vanish" in weakness.problem
    add_consumer(engine, topic, filter_subject=f"{topic}.*")
    assert weaknesses(broker, f"{topic}.paid") == []


def test_messages_that_are_confirmed_before_they_are_written_are_weak(
    engine: NatsEngine, opened: Open, topic: str
) -> None:
    async def make(client: Client) -> None:
        request = b'{"name":"%s","subjects":["%s"],"persist_mode":"async"}' % (topic.encode(), topic.encode())
        answer = await client.request(f"$JS.API.STREAM.CREATE.{topic}", request, timeout=60)
        assert b'"error"' not in answer.data, answer.data

    engine.run(make)

    [weakness] = weaknesses(opened(engine.url), topic)

    assert "before they are written" in weakness.problem


def test_strict_refuses_a_weak_stream_and_takes_it_once_it_is_cured(
    engine: NatsEngine, opened: Open, topic: str
) -> None:
    engine.add_stream(topic, subjects=[topic], duplicate_window=10)
    broker = opened(f"{engine.url}?strict=true")
    message = Message(id="1", topic=topic, body=b"")

    with pytest.raises(StorageFailed, match="dupe-window"):
        broker.publish([message])
    change_stream(engine, topic, duplicate_window=120)

    assert broker.publish([message])[0].status is PublishStatus.STORED


def change_stream(engine: NatsEngine, name: str, **changes: Any) -> None:
    async def change(client: Client) -> None:
        api = client.jetstream()
        config = (await api.stream_info(name)).config
        await api.update_stream(config.evolve(**changes))

    engine.run(change)


def add_consumer(engine: NatsEngine, stream: str, *, filter_subject: str) -> None:
    name = f"c{uuid.uuid4().hex}"
    config = ConsumerConfig(durable_name=name, filter_subject=filter_subject)
    engine.run(lambda client: client.jetstream().add_consumer(stream, config))
