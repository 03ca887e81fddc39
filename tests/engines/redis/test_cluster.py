"""A Redis cluster under an Outbox and a compensator, with WAIT 1: each fault, isolated masters, all servers killed."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Broker
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
REASONS = r"0 of 1 replicas confirmed in time \(WAIT\)|CLUSTERDOWN .* cut off|NOREPLICAS .* start them"
PUBLISHES = 4


def test_a_master_that_is_isolated_while_its_replica_takes_over_loses_no_message_and_no_order_of_a_key(
    faulty: FaultyRedisCluster, shop: Shop, topic: str
) -> None:
    def isolate(_: EngineUnderFault, topic: str) -> None:
        faulty.isolate_leader(topic)
        faulty.wait_for_second_master(topic)

    check_fault_under_load(faulty, shop, topic, isolate)


def test_neither_an_isolated_master_nor_its_successor_without_a_replica_acknowledges_anything_and_each_says_why(
    faulty: FaultyRedisCluster, topic: str
) -> None:
    batch = [Message(id=f"m{n}", topic=topic, body=b"") for n in range(PUBLISHES + 2)]
    with closing(connect(f"{faulty.url}&timeout_ms={TIMEOUT_MS}")) as broker:
        publish_until_stored(broker, batch[0])
        faulty.isolate_leader(topic)
        errors = [refusal(broker, batch[1])]
        faulty.wait_for_second_master(topic)
        errors += [refusal(broker, one) for one in batch[2:-1]]
        faulty.restore()
        publish_until_stored(broker, batch[-1])
        [stream] = faulty.read_partitions(topic)

    assert [one for one in errors if not re.search(REASONS, one)] == []
    assert [one.id for one in stream] == [batch[0].id, batch[-1].id]


def test_all_servers_killed_at_once_lose_no_message_and_no_order_of_a_key(
    faulty: FaultyRedisCluster, shop: Shop, topic: str
) -> None:
    check_fault_under_load(faulty, shop, topic, lambda _, __: faulty.kill_all())


def refusal(broker: Broker, message: Message) -> str:
    """What a publish that must fail says."""
    with pytest.raises(BrokerError) as raised:
        broker.publish([message])
    return str(raised.value)
