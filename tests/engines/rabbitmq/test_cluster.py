"""Three nodes of RabbitMQ with quorum queues: each fault, an isolated leader, and a restart of all."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

from outbox_core.messages.broker_port import Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import publish_until_stored
from tests.engines.fault_conformance import *  # noqa: F403
from tests.engines.rabbitmq.rabbitmq_cluster import RabbitMqCluster


def test_a_quorum_queue_with_a_replica_on_each_node_shows_no_weakness(faulty: RabbitMqCluster, topic: str) -> None:
    faulty.make_ordered_topic(topic)
    with closing(connect(faulty.direct_url)) as broker:
        assert isinstance(broker, Inspectable)
        inspection = broker.inspect([topic])

    assert inspection.version.startswith("4.3.")
    assert inspection.weaknesses == ()


def test_a_leader_that_is_isolated_from_the_others_loses_nothing_that_was_acknowledged(
    faulty: RabbitMqCluster, topic: str
) -> None:
    faulty.make_ordered_topic(topic)
    batch = [Message(id=f"m{n:03d}", topic=topic, body=b"x", key="k") for n in range(60)]
    with closing(connect(f"{faulty.url}?timeout_ms=3000")) as broker:
        for one in batch[:20]:
            publish_until_stored(broker, one)
        isolated = faulty.leader(topic)
        faulty.isolate(isolated)
        try:
            for one in batch[20:40]:
                publish_until_stored(broker, one)
        finally:
            faulty.rejoin(isolated)
        for one in batch[40:]:
            publish_until_stored(broker, one)
    [read] = faulty.read_partitions(topic)

    assert list(dict.fromkeys(one.id for one in read)) == [one.id for one in batch]


def test_all_nodes_killed_at_once_have_all_that_was_acknowledged_after_their_restart(
    faulty: RabbitMqCluster, topic: str
) -> None:
    faulty.make_ordered_topic(topic)
    batch = [Message(id=f"m{n:03d}", topic=topic, body=b"x") for n in range(500)]
    with closing(connect(f"{faulty.url}?timeout_ms=60000")) as broker:
        results = broker.publish(batch)
        faulty.kill()
        faulty.restore()
        publish_until_stored(broker, Message(id="after", topic=topic, body=b"x"))
    [read] = faulty.read_partitions(topic)

    assert {one.status for one in results} == {PublishStatus.STORED}
    copies = Counter(one.id for one in read)
    assert set(copies) == {"after", *(one.id for one in batch)}
    assert [one.id for one in batch if copies[one.id] != 1] == []
