"""Three servers of NATS with a copy of a stream on each: each fault, elections, isolated leaders, a restart of all."""

from __future__ import annotations

import itertools
from contextlib import closing

import pytest

from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import publish_until_stored
from tests.engines.fault_conformance import *  # noqa: F403
from tests.engines.nats.nats_cluster import NAMES, NatsCluster
from tests.engines.outbox_load import wait_for

STORED = {PublishStatus.STORED, PublishStatus.DUPLICATE}


def batch_of(topic: str, numbers: range) -> list[Message]:
    return [Message(id=f"m{n:04d}", topic=topic, body=b"x" * 100, key="k") for n in numbers]


def ids_in(cluster: NatsCluster, topic: str) -> list[str]:
    [stream] = cluster.read_partitions(topic)
    return [one.id for one in stream]


def test_an_election_is_ridden_over_within_one_publish(faulty: NatsCluster, topic: str) -> None:
    faulty.make_ordered_topic(topic)
    with closing(connect(f"{faulty.url}?timeout_ms=60000")) as broker:
        before = broker.publish(batch_of(topic, range(50)))
        faulty.kill_leader(topic)
        during = broker.publish(batch_of(topic, range(50, 100)))

    assert {one.status for one in (*before, *during)} <= STORED
    assert ids_in(faulty, topic) == [one.id for one in batch_of(topic, range(100))]


def test_a_stream_with_one_copy_is_weak_and_one_with_three_is_not(faulty: NatsCluster, topic: str) -> None:
    faulty.make_ordered_topic(topic)
    faulty.make_stream("lonely", subject="lonely.t", copies=1)
    with closing(connect(faulty.url)) as broker:
        assert isinstance(broker, Inspectable)
        weaknesses = broker.inspect([topic, "lonely.t"]).weaknesses

    assert [one.subject for one in weaknesses] == ["stream lonely"]


@pytest.mark.parametrize("is_clients", [True, False], ids=["the client's own server", "another server"])
def test_a_leader_that_is_isolated_from_the_others_loses_nothing_that_was_acknowledged_and_is_left(
    faulty: NatsCluster, topic: str, is_clients: bool
) -> None:
    faulty.make_ordered_topic(topic)
    with closing(connect(f"{faulty.url}?timeout_ms=3000")) as broker:
        for one in batch_of(topic, range(50)):
            publish_until_stored(broker, one)
        leader = leader_that_clients_use(faulty, broker, topic) if is_clients else faulty.leader(topic)
        faulty.isolate(leader)
        publish_until_stored(broker, *batch_of(topic, range(50, 51)))
        if is_clients:
            wait_for(lambda: not faulty.proxy_of(leader).is_used)
        faulty.restore()
        for one in batch_of(topic, range(51, 100)):  # a server that comes back may have the others elect again
            publish_until_stored(broker, one)

    assert ids_in(faulty, topic) == [one.id for one in batch_of(topic, range(100))]


def test_all_servers_killed_at_once_have_all_that_was_acknowledged_after_their_restart(
    faulty: NatsCluster, topic: str
) -> None:
    faulty.make_ordered_topic(topic)
    with closing(connect(f"{faulty.url}?timeout_ms=60000")) as broker:
        results = broker.publish(batch_of(topic, range(500)))
        faulty.kill()
        faulty.restore()
        publish_until_stored(broker, *batch_of(topic, range(500, 501)))

    assert {one.status for one in results} <= STORED
    assert ids_in(faulty, topic) == [one.id for one in batch_of(topic, range(501))]


def leader_that_clients_use(cluster: NatsCluster, broker: Broker, topic: str) -> str:
    """Move the broker's connection to the server that leads the stream."""
    leader = cluster.leader(topic)
    for number in itertools.count():
        if cluster.proxy_of(leader).is_used:
            return leader
        assert number < 10 * len(NAMES), "the client never came to the leader"
        cluster.proxy_in_use(topic).hang_up()
        publish_until_stored(broker, *batch_of(topic, range(1)))  # a repeat: it is stored once
    raise AssertionError
