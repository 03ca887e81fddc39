"""Connections to Kafka that end in the middle of a batch, by a proxy whose address the server advertises."""

from __future__ import annotations

from contextlib import closing

import pytest

from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.engines.kafka.kafka_cluster import PROXIED, KafkaCluster
from tests.engines.kafka.kafka_engine import KafkaEngine


@pytest.mark.parametrize(
    ("way", "place"),
    [(way, place) for way in ("request_bytes", "answer_bytes") for place in (1, 20)]
    + [("request_bytes", place) for place in (700, 6_000, 20_000)],  # an answer is shorter than these
)
def test_a_batch_that_is_cut_in_its_middle_is_stored_once_and_in_order(
    own_engine: KafkaEngine, node: KafkaCluster, topic: str, way: str, place: int
) -> None:
    node.make_topic(topic)
    proxy = node.proxy(1)
    batch = [Message(id=f"m{number:03d}", topic=topic, body=b"x" * 100) for number in range(400)]
    with closing(connect(f"kafka://{node.addresses(PROXIED)}?timeout_ms=60000")) as broker:
        broker.publish(batch[:1])
        cuts = proxy.cuts

        proxy.cut_after(**{way: place})
        results = broker.publish(batch[1:])

    assert proxy.cuts == cuts + 1
    assert {one.status for one in results} == {PublishStatus.STORED}
    [partition] = own_engine.read_partitions(topic)
    assert [one.id for one in partition] == [one.id for one in batch]  # though some were sent twice
