"""A real cluster of three masters and three replicas: a master dies under load, and a slot moves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox_core.common.errors import BrokerUnavailable, NotAuthorized
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import PublishStatus
from outbox_demo.ports import free_port
from tests.broker_adapter.publishing.publisher_conformance import message, publish_until_stored
from tests.broker_adapter.redis.redis_cluster import (
    MASTERS,
    SLOTS,
    STEADY_MS,
    RedisClusterServers,
    epochs,
    redis_cluster,
)
from tests.broker_adapter.redis.redis_engine import read_stream
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server
from tests.broker_adapter.redis.test_failures import BATCH, WAIT_SECONDS, publish_in_batches, wait_for

Open = Callable[[str], Broker]
TOPICS = ("a", "b", "c", "d", "e", "f")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisClusterServers]:
    """The cluster that this module's tests share."""
    with redis_cluster(node_timeout_ms=STEADY_MS) as joined:
        yield joined


def read(cluster: RedisClusterServers, topic: str, *, count: int) -> list[str]:
    with contextlib.closing(cluster.client) as client:
        return [one.id for one in read_stream(client, f"outbox:{{{topic}}}", count=count)]


@pytest.mark.slow
def test_each_master_of_a_new_cluster_has_an_epoch_of_its_own_which_all_know() -> None:
    with redis_cluster(node_timeout_ms=STEADY_MS) as fresh:
        for server in fresh.servers:
            known = epochs(server)
            assert len(known) == 2 * MASTERS
            assert set(known.values()) == {1, 2, 3}, "as they were given: none had to be chosen anew"


def test_topics_lie_on_all_masters_and_a_batch_of_all_is_stored_in_order(
    cluster: RedisClusterServers, open_broker: Open
) -> None:
    broker = open_broker(f"{cluster.url}?prefix=outbox:")
    batch = [message(f"order.{topic}", n) for n in range(50) for topic in TOPICS]

    results = broker.publish(batch)

    assert [(one.id, one.status) for one in results] == [(one.id, PublishStatus.STORED) for one in batch]
    assert {cluster.master_of(f"outbox:{{order.{topic}}}").port for topic in TOPICS} == {
        server.port for server in cluster.masters
    }
    for topic in TOPICS:
        expected = [message(f"order.{topic}", n).id for n in range(50)]
        assert read(cluster, f"order.{topic}", count=50) == expected


@pytest.mark.slow
def test_the_weakness_of_each_master_is_named(cluster: RedisClusterServers, open_broker: Open) -> None:
    broker = open_broker(cluster.url)
    assert isinstance(broker, Inspectable)

    found = broker.inspect([]).weaknesses

    assert {one.subject.rpartition(":")[2] for one in found} == {str(server.port) for server in cluster.masters}
    assert all("min-replicas-to-write" in one.cure for one in found)


def test_a_slot_that_moves_between_publishes_loses_and_doubles_nothing(
    cluster: RedisClusterServers, open_broker: Open
) -> None:
    broker, topic = open_broker(cluster.url), "moving"
    key = f"outbox:{{{topic}}}"
    source = cluster.master_of(key)
    target = next(server for server in cluster.masters if server is not source)
    slot = source.ask("CLUSTER", "KEYSLOT", key)
    source_id, target_id = (server.ask("CLUSTER", "MYID").decode() for server in (source, target))

    broker.publish([message(topic, n) for n in range(10)])
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    before = broker.publish([message(topic, n) for n in range(5, 15)])
    source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 60_000, "KEYS", key, f"{key}:ids")
    asked = broker.publish([message(topic, n) for n in range(10, 20)])  # ASK: the slot's owner is the source still
    for server in cluster.masters:
        server.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    moved = broker.publish([message(topic, n) for n in range(15, 25)])

    for results in (before, asked, moved):
        expected = [PublishStatus.DUPLICATE] * 5 + [PublishStatus.STORED] * 5
        assert [one.status for one in results] == expected
    assert read(cluster, topic, count=25) == [message(topic, n).id for n in range(25)]


@pytest.fixture
def lone_node() -> Iterator[RedisServer]:
    """A node that is not part of a cluster yet: no slot has a node."""
    with redis_server(cluster_enabled="yes", cluster_port=str(free_port(HOST))) as server:
        yield server


@pytest.mark.slow
def test_nodes_without_slots_are_an_outage_until_they_have_them(lone_node: RedisServer, open_broker: Open) -> None:
    broker = open_broker(f"redis+cluster://{HOST}:{lone_node.port}/?wait=0&timeout_ms=500")

    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match="no slot has a node"):
            broker.publish([message("t", 0)])
    lone_node.ask("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
    publish_until_stored(broker, message("t", 0))
    lone_node.ask("CLUSTER", "DELSLOTSRANGE", 0, SLOTS - 1)

    for topic in ("t", "new"):
        with pytest.raises(BrokerUnavailable):
            broker.publish([message(topic, 1)])


def test_a_user_who_may_not_ask_for_the_slots_is_told_so(lone_node: RedisServer, open_broker: Open) -> None:
    lone_node.ask("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
    lone_node.ask("ACL", "SETUSER", "app", "on", ">word", "~outbox:*", "+@all", "-cluster|slots")
    broker = open_broker(f"redis+cluster://app:word@{HOST}:{lone_node.port}/?wait=0")

    with pytest.raises(NotAuthorized, match=r"cluster\|slots.*ACL SETUSER"):
        broker.publish([message("t", 0)])


@pytest.mark.slow
def test_a_master_killed_under_load_with_wait_1_loses_nothing_that_was_acknowledged() -> None:
    with redis_cluster() as cluster:
        fail_over_under_load(cluster)


def fail_over_under_load(cluster: RedisClusterServers) -> None:
    """Kill a master, let its replica be elected, let it come back as a replica of that."""
    broker = connect(f"{cluster.url}?wait=1&timeout_ms=8000")
    victim = cluster.master_of("outbox:{a}")
    heir = cluster.replica_of(victim)
    acknowledged: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    batches = 60

    with ThreadPoolExecutor(len(TOPICS)) as pool, contextlib.closing(broker):
        publishing = [
            pool.submit(publish_in_batches, broker, topic, thread=0, batches=batches, acknowledged=acknowledged[topic])
            for topic in TOPICS
        ]
        wait_for(lambda: all(len(ids) >= 5 * BATCH for ids in acknowledged.values()))
        victim.kill()
        wait_for(lambda: re.search(rb"role:master", heir.ask("INFO", "replication")) is not None)
        victim.start()
        for one in publishing:
            one.result(WAIT_SECONDS)

    total = batches * BATCH
    for topic in TOPICS:
        ids = read(cluster, topic, count=total)
        assert set(acknowledged[topic]) - set(ids) == set(), "acknowledged and lost"
        assert ids == [message(topic, n).id for n in range(total)], "each once, in order"
