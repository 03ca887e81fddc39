"""Resources that are deleted: nothing that was acknowledged is lost, whoever dies meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from outbox_core import Broker, Message
from outbox_core.common.errors import BrokerCordoned, BrokerError
from tests.engines.kubernetes.cluster import DEADLINE_S, Cluster, KeptBroker, StartOperator, eventually

TOPIC, GROUP = "orders", "billing"
SOON_MS = 500


class Load:
    """A publisher, some of whose messages are due a moment later, and a consumer that can be paused."""

    def __init__(self, broker: KeptBroker) -> None:
        self._broker = broker
        self.stored: set[str] = set()
        self.delivered: list[str] = []
        self.refused = threading.Event()
        self._consumes = threading.Event()
        self._consumes.set()
        self._pulls = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._publish, self._consume)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the block is left."""
        self._broker.client().pull(TOPIC, GROUP)
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._consumes.set()
            for thread in self._threads:
                thread.join(DEADLINE_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is consumed within the block."""
        self._consumes.clear()
        with self._pulls:  # what was pulled is acknowledged
            yield
        self._consumes.set()

    def wait_for(self, count: int) -> None:
        """Wait until so many were delivered and acknowledged."""
        eventually(lambda: len(self.delivered) >= count, what=f"{count} deliveries")

    def _run(self, work: Callable[[Broker, int], None]) -> None:
        client, number = self._broker.client(), 0
        while not self._stop.is_set():
            number += 1
            try:
                work(client, number)
            except BrokerCordoned:
                self.refused.set()
                return
            except BrokerError:  # it has ended
                self._stop.wait(0.1)
        client.close()

    def _publish(self, client: Broker, number: int) -> None:
        soon_ms = time.time_ns() // 1_000_000 + SOON_MS
        dues = {f"now-{number}-{index}": None for index in range(8)} | {f"soon-{number}": soon_ms}
        batch = [Message(id=one, topic=TOPIC, body=b"x" * 100, deliver_at_ms=due) for one, due in dues.items()]
        self.stored |= {result.id for result in client.publish(batch) if result.status == "stored"}
        self._stop.wait(0.01)

    def _consume(self, client: Broker, _number: int) -> None:
        self._consumes.wait(DEADLINE_S)
        with self._pulls:
            deliveries = client.pull(TOPIC, GROUP, max_messages=50, wait_ms=100)
            statuses = client.ack([delivery.receipt for delivery in deliveries]) if deliveries else []
            self.delivered += [one.id for one, status in zip(deliveries, statuses, strict=True) if status == "acked"]


@pytest.fixture
def broker(cluster: Cluster, namespace: str) -> KeptBroker:
    """A resource."""
    return cluster.create(namespace, "orders")


def left(broker: KeptBroker) -> int:
    """What the resource says is left."""
    return int(broker.status["backlog"]) + int(broker.status["scheduled"])


def test_a_broker_that_is_deleted_under_load_goes_when_all_that_it_acknowledged_is_delivered(
    broker: KeptBroker, start_operator: StartOperator
) -> None:
    start_operator()
    broker.wait_until_ready()
    load = Load(broker)

    with load.running():
        load.wait_for(200)
        with load.paused():
            broker.delete()
            assert load.refused.wait(DEADLINE_S)
            waiting = len(load.stored) - len(load.delivered)
            eventually(lambda: left(broker) == waiting, what="a status that says what is left")
            told = broker.condition("Progressing")
            assert (told["reason"], broker.pod() is not None) == ("Draining", True)
            assert waiting > 0
        broker.wait_until_gone()

    assert sorted(load.delivered) == sorted(load.stored)
    assert broker.pod() is None
    assert broker.found("apps/v1", "StatefulSet") is None
    assert broker.found("v1", "PersistentVolumeClaim", "data-orders-0") is not None


@pytest.mark.parametrize("when", ["before the cordon", "while it drains"])
def test_an_operator_that_is_killed_in_a_drain_is_followed_by_one_that_ends_it(
    broker: KeptBroker, start_operator: StartOperator, when: str
) -> None:
    operator = start_operator()
    broker.wait_until_ready()
    load = Load(broker)

    with load.running():
        load.wait_for(200)
        with load.paused():
            if when == "while it drains":
                broker.delete()
                broker.wait_until("Progressing", "True", "Draining")
                operator.kill9()
            else:
                operator.kill9()
                broker.delete()
            assert broker.pod() is not None
        start_operator()
        broker.wait_until_gone()

    assert sorted(load.delivered) == sorted(load.stored)


def test_without_an_api_server_the_broker_serves_the_operator_ends_and_the_next_one_goes_on(
    cluster: Cluster, broker: KeptBroker, start_operator: StartOperator
) -> None:
    operator = start_operator()
    broker.wait_until_ready()
    load = Load(broker)

    with load.running():
        load.wait_for(100)
        with cluster.paused():
            status = operator.ended()
            load.wait_for(len(load.delivered) + 200)
        start_operator()
        broker.delete()
        broker.wait_until_gone()

    assert status == 1
    assert sorted(load.delivered) == sorted(load.stored)


def test_a_resource_of_the_same_name_goes_on_with_the_volume_that_was_kept(
    cluster: Cluster, broker: KeptBroker, start_operator: StartOperator
) -> None:
    start_operator()
    broker.change(deletionPolicy="Retain")
    broker.wait_until_ready()
    client = broker.client()
    client.pull(TOPIC, GROUP)
    client.publish([Message(id="a", topic=TOPIC, body=b"")])

    broker.delete()
    broker.wait_until_gone()
    again = cluster.create(broker.namespace, broker.name)
    again.wait_until_ready()
    [delivery] = again.client().pull(TOPIC, GROUP, wait_ms=10_000)
    again.client().ack([delivery.receipt])
    again.delete()
    again.wait_until_gone()
    once_more = cluster.create(broker.namespace, broker.name)
    once_more.wait_until_ready()

    assert delivery.id == "a"
    # The drain of the second one has left its cordon on the volume, and the third one takes messages all the same.
    eventually(lambda: once_more.admin().status().cordon is None, what="a broker that takes messages again")


def test_a_drain_that_would_not_end_is_ended_by_another_policy_and_discards_the_volume(
    broker: KeptBroker, start_operator: StartOperator
) -> None:
    start_operator()
    broker.wait_until_ready()
    client = broker.client()
    client.pull(TOPIC, GROUP)
    client.publish([Message(id="a", topic=TOPIC, body=b"")])

    broker.delete()
    told = broker.wait_until("Progressing", "True", "Draining")
    broker.change(deletionPolicy="Discard")
    broker.wait_until_gone()

    assert "1 ready" in told["message"]
    eventually(
        lambda: broker.found("v1", "PersistentVolumeClaim", "data-orders-0") is None, what="a claim that is gone"
    )


def test_a_resource_can_be_deleted_where_no_operator_runs(broker: KeptBroker, start_operator: StartOperator) -> None:
    operator = start_operator()
    broker.wait_until_ready()
    operator.end()

    broker.delete()
    assert broker.resource() is not None
    broker.free()
    broker.wait_until_gone()

    eventually(lambda: broker.pod() is None, what="a pod that follows its resource")
    assert broker.found("v1", "PersistentVolumeClaim", "data-orders-0") is not None
