"""Resources that are deleted: nothing that was acknowledged is lost, whoever dies meanwhile."""

from __future__ import annotations

import pytest

from outbox_core import Message
from tests.engines.kubernetes.cluster import DEADLINE_S, Cluster, KeptBroker, StartOperator, eventually
from tests.engines.kubernetes.load import GROUP, TOPIC, Load


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
