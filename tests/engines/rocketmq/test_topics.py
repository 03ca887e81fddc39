"""Kinds of topics of RocketMQ, and what their settings and the broker's let us promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox_core.common.errors import StorageFailed
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from outbox_core.messages.refused_batch_isolation import publish_isolated
from tests.engines.rocketmq.rocketmq_cluster import RocketMqCluster
from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine

QUEUES = 4
KEYS = 10
STORED, REJECTED, DEFERRED = PublishStatus.STORED, PublishStatus.REJECTED, PublishStatus.DEFERRED


@pytest.fixture
def broker(engine: RocketMqEngine) -> Iterator[Broker]:
    """The adapter on the proxy."""
    opened = connect(engine.url)
    yield opened
    opened.close()


@pytest.fixture
def async_flush(cluster: RocketMqCluster) -> Iterator[None]:
    """A broker that confirms before it syncs, while the test runs."""
    cluster.client.set_broker("flushDiskType", "ASYNC_FLUSH")
    yield
    cluster.client.set_broker("flushDiskType", "SYNC_FLUSH")


@pytest.mark.parametrize("kind", ["FIFO", "MIXED"])
def test_a_key_has_one_queue_and_its_messages_are_in_order(
    engine: RocketMqEngine, broker: Broker, topic: str, kind: str
) -> None:
    engine.make_topic(topic, kind=kind, queues=QUEUES)
    batch = [Message(id=f"m{n}", topic=topic, body=b"%d" % n, key=f"k{n % KEYS}") for n in range(200)]
    batch.append(Message(id="no-key", topic=topic, body=b"-1"))

    results = [*broker.publish(batch[:100]), *broker.publish(batch[100:])]
    queues = engine.read_queues(topic)

    assert {one.status for one in results} == {STORED}
    assert sum(map(len, queues)) == len(batch)
    for key in (f"k{n}" for n in range(KEYS)):
        [numbers] = [found for queue in queues if (found := [int(one.body) for one in queue if one.key == key])]
        assert numbers == sorted(numbers)
        assert len(numbers) == 20
    assert len(queues) > 1


def test_a_topic_of_another_kind_or_without_write_permission_is_deferred_with_its_cure(
    engine: RocketMqEngine, broker: Broker, topic: str
) -> None:
    kinds = {f"{topic}.{kind}": kind for kind in ("DELAY", "TRANSACTION")}
    for name, kind in kinds.items():
        engine.make_topic(name, kind=kind)
    read_only = f"{topic}.read"
    engine.cluster.client.make_topic(read_only.replace(".", "_"), kind="NORMAL", queues=1, permission=4)
    engine.make_topic(topic)

    results = broker.publish([Message(id=name, topic=name, body=b"x") for name in (*kinds, read_only, topic)])

    assert [one.status for one in results] == [DEFERRED, DEFERRED, DEFERRED, STORED]
    assert "takes DELAY messages alone" in str(results[0].error)
    assert "+message.type=NORMAL" in str(results[1].error)
    assert "updateTopicPerm" in str(results[2].error)


def test_what_rocketmq_cannot_take_is_rejected_and_its_neighbours_are_stored(
    engine: RocketMqEngine, broker: Broker, topic: str
) -> None:
    engine.make_topic(topic)
    bad = {
        "system": {"KEYS": "reserved"},
        "control": {"name": "a\x01b"},
        "long": {"name": "x" * 20_000},
    }
    batch = [Message(id=name, topic=topic, body=b"x", headers=headers) for name, headers in bad.items()]
    good = [Message(id=f"m{n}", topic=topic, body=b"x") for n in range(3)]
    long_name = Message(id="name", topic="t" * 128, body=b"x")

    mixed = [good[0], batch[0], good[1], batch[1], batch[2], good[2], long_name]
    published = publish_isolated(broker.publish, mixed)

    results = [published.results[place] for place in range(len(mixed))]
    assert [one.status for one in results] == [STORED, REJECTED, STORED, REJECTED, REJECTED, STORED, REJECTED]
    assert "used by system" in str(results[1].error)
    assert {one.id for one in engine.read(topic, count=3)} == {one.id for one in good}


def test_a_message_that_only_the_broker_finds_too_large_is_rejected_and_the_others_are_stored(
    engine: RocketMqEngine, broker: Broker, topic: str
) -> None:
    engine.make_topic(topic)
    bodies = [b"x", b"x" * 100_000, b"x" * 1_000]
    engine.cluster.client.set_broker("maxMessageSize", 65_536)
    try:
        batch = [Message(id=f"m{n}", topic=topic, body=body) for n, body in enumerate(bodies)]
        published = publish_isolated(broker.publish, batch)
        alone = broker.publish([Message(id="alone", topic=topic, body=bodies[1])])
    finally:
        engine.cluster.client.set_broker("maxMessageSize", 4_194_304)

    together = [published.results[place] for place in range(3)]
    assert [one.status for one in (*together, *alone)] == [STORED, REJECTED, STORED, REJECTED]
    assert "too large for the broker" in str(alone[0].error)


def test_batches_larger_than_the_broker_takes_at_once_are_stored(
    engine: RocketMqEngine, broker: Broker, topic: str
) -> None:
    engine.make_topic(topic)
    batch = [Message(id=f"m{n}", topic=topic, body=bytes([n]) * 700_000) for n in range(10)]

    results = broker.publish(batch)

    assert {one.status for one in results} == {STORED}
    assert {one.id: one.body for one in engine.read(topic, count=10)} == {one.id: one.body for one in batch}


def test_a_broker_that_confirms_before_it_syncs_is_reported_and_refused_where_the_url_is_strict(
    engine: RocketMqEngine, broker: Broker, topic: str, async_flush: None
) -> None:
    engine.make_topic(topic)
    assert isinstance(broker, Inspectable)
    strict = connect(f"{engine.url}&strict=true")

    inspection = broker.inspect([topic])
    with pytest.raises(StorageFailed) as raised:
        strict.publish([Message(id="m", topic=topic, body=b"x")])
    engine.cluster.client.set_broker("flushDiskType", "SYNC_FLUSH")
    mended = strict.publish([Message(id="m", topic=topic, body=b"x")])
    strict.close()

    [weakness] = inspection.weaknesses
    assert (inspection.version, weakness.subject, weakness.topic) == ("5.5.0", "broker b1", None)
    assert "SYNC_FLUSH" in str(raised.value)
    assert [one.status for one in mended] == [STORED]


def test_settings_that_cannot_be_seen_are_reported_as_unknown(cluster: RocketMqCluster) -> None:
    blind = cluster.url().partition("?")[0]
    urls = [blind, f"{blind}?nameserver=127.0.0.1:1", cluster.url(login="nobody:password@")]
    brokers = [connect(url) for url in urls[:2]]

    weaknesses = [one for broker in brokers if isinstance(broker, Inspectable) for one in broker.inspect().weaknesses]
    for broker in brokers:
        broker.close()

    assert ["is unknown" in one.problem for one in weaknesses] == [True, True]
    assert ["?nameserver=" in weaknesses[0].cure, "check nameserver=" in weaknesses[1].cure] == [True, True]
