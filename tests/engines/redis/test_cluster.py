"""A Redis cluster under an Outbox and a compensator, with WAIT 1: each fault of a master, and one that is isolated."""

from __future__ import annotations

from contextlib import closing

import pytest

from outbox_core.common.errors import BrokerUnavailable, StorageFailed
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message
from tests.broker_adapter.publishing.publisher_conformance import publish_until_stored
from tests.engines.engine_under_fault import EngineUnderFault
from tests.engines.fault_conformance import *  # noqa: F403
from tests.engines.fault_conformance import check_fault_under_load
from tests.engines.redis.faulty_cluster import FaultyRedisCluster
from tests.outbox.shop import Shop

TIMEOUT_MS = 5_000
"""Of which a fifth is left for the answer after WAIT, on a busy machine, too."""


def test_a_master_that_is_isolated_while_its_replica_takes_over_loses_no_message_and_no_order_of_a_key(
    faulty: FaultyRedisCluster, shop: Shop, topic: str
) -> None:
    def isolate(_: EngineUnderFault, topic: str) -> None:
        faulty.isolate_leader(topic)
        faulty.wait_for_second_master(topic)

    check_fault_under_load(faulty, shop, topic, isolate)


def test_neither_an_isolated_master_nor_its_successor_without_a_replica_acknowledges_anything(
    faulty: FaultyRedisCluster, topic: str
) -> None:
    batch = [Message(id=f"m{n}", topic=topic, body=b"") for n in range(4)]
    with closing(connect(f"{faulty.url}&timeout_ms={TIMEOUT_MS}")) as broker:
        publish_until_stored(broker, batch[0])
        faulty.isolate_leader(topic)
        with pytest.raises(StorageFailed, match=r"0 of 1 replicas confirmed in time \(WAIT\)"):
            broker.publish(batch[1:2])
        faulty.wait_for_second_master(topic)
        with pytest.raises((StorageFailed, BrokerUnavailable)):
            broker.publish(batch[2:3])
        faulty.restore()
        publish_until_stored(broker, batch[3])
        [stream] = faulty.read_partitions(topic)

    assert [one.id for one in stream] == ["m0", "m3"]
