"""Consumers of shared subscriptions get each message by itself, whatever was published together with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import pulsar

from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import Message
from tests.broker_adapter.publishing.publisher_conformance import open_broker
from tests.engines.pulsar.pulsar_engine import MOMENT_MS, READ_MS_MAX, PulsarEngine

__all__ = ["open_broker"]

Open = Callable[[str], Broker]
GROUP = "workers"
AGAIN_MS = 500


def test_a_message_that_fails_takes_no_other_to_the_dead_letters(
    engine: PulsarEngine, open_broker: Open, topic: str
) -> None:
    engine.server.create_topic(topic)
    engine.server.create_subscription(topic, GROUP)
    dead_topic = f"{topic}.dead"
    engine.server.create_topic(dead_topic)
    engine.server.create_subscription(dead_topic, GROUP)
    worker = engine.client.subscribe(
        topic,
        GROUP,
        pulsar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=AGAIN_MS,
        dead_letter_policy=pulsar.ConsumerDeadLetterPolicy(2, dead_topic, GROUP),
    )
    dead = engine.client.subscribe(dead_topic, GROUP)

    open_broker(engine.url).publish([Message(id=f"m-{n}", topic=topic, body=b"%d" % n) for n in range(20)])
    delivered: Counter[bytes] = Counter()
    while delivered[b"7"] < 3 or delivered.total() < 22:
        received = worker.receive(READ_MS_MAX)
        delivered[received.data()] += 1
        settle = worker.negative_acknowledge if received.data() == b"7" else worker.acknowledge
        settle(received)
    first_dead = dead.receive(READ_MS_MAX).data()

    assert first_dead == b"7"
    assert delivered == Counter({b"%d" % n: 3 if n == 7 else 1 for n in range(20)})
    assert not received_in_a_moment(worker)
    assert not received_in_a_moment(dead)


def test_consumers_that_share_a_subscription_by_key_each_get_their_own_keys(
    engine: PulsarEngine, open_broker: Open, topic: str
) -> None:
    engine.server.create_topic(topic)
    workers = [engine.client.subscribe(topic, GROUP, pulsar.ConsumerType.KeyShared) for _ in range(3)]
    batch = [Message(id=f"m-{n}", topic=topic, key=f"k{n % 30}", body=b"%d" % n) for n in range(300)]

    open_broker(engine.url).publish(batch)
    read = received_by_all(workers, count=300)

    keys = [{one.partition_key() for one in some} for some in read]
    assert sum(map(len, keys)) == 30
    assert sum(map(bool, keys)) > 1
    for some in read:
        for key in {one.partition_key() for one in some}:
            numbers = [int(one.data()) for one in some if one.partition_key() == key]
            assert numbers == sorted(numbers)


def received_by_all(consumers: Sequence[pulsar.Consumer], *, count: int) -> list[list[pulsar.Message]]:
    """What each of them gets until they have so many together."""
    found: list[list[pulsar.Message]] = [[] for _ in consumers]
    deadline = time.monotonic() + READ_MS_MAX / 1000
    while sum(map(len, found)) < count and time.monotonic() < deadline:
        for consumer, some in zip(consumers, found, strict=True):
            some.extend(received_in_a_moment(consumer))
    assert sum(map(len, found)) == count
    return found


def received_in_a_moment(consumer: pulsar.Consumer) -> list[pulsar.Message]:
    """What a consumer has, or gets within a moment."""
    found: list[pulsar.Message] = []
    try:
        while True:
            found.append(consumer.receive(MOMENT_MS))
    except pulsar.Timeout:
        return found
