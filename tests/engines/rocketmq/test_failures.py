"""RocketMQ under an Outbox and a compensator: each fault of its broker, of its proxy, and no broker for a long time."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, closing

import pytest

from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import publish_until_stored
from tests.compensator.serving import WatchedMetrics, serving
from tests.engines.fault_conformance import *  # noqa: F403
from tests.engines.fault_conformance import check_fault_under_load, is_taken
from tests.engines.outbox_load import wait_for
from tests.engines.recorded_broker import recorded_broker
from tests.engines.rocketmq.faulty_rocketmq import FaultyRocketMq
from tests.engines.rocketmq.rocketmq_cluster import RocketMqCluster
from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine
from tests.outbox.shop import Shop

TIMEOUT_MS = 2_000
WAIT_SECONDS = 300


def test_a_killed_proxy_loses_no_message_and_no_order_of_a_key(
    faulty: FaultyRocketMq, cluster: RocketMqCluster, shop: Shop, topic: str
) -> None:
    check_fault_under_load(faulty, shop, topic, lambda _, __: cluster.kill_proxy())


def test_while_no_broker_is_there_no_attempt_is_counted_and_the_breaker_opens_until_it_is_back(
    engine: RocketMqEngine, shop: Shop, topic: str
) -> None:
    """Longer than a proxy keeps the route of a topic: then it says that the topic is not there."""
    cluster, metrics, in_doubt = engine.cluster, WatchedMetrics(), Counter[str]()
    engine.make_topic(topic)
    broker = recorded_broker(engine.url, in_doubt, timeout_ms=TIMEOUT_MS)
    service, close = serving([shop], [broker], metrics=metrics)

    with ExitStack() as ending:
        for end in (cluster.start, broker.close, close, service.stop):
            ending.callback(end)
        wait_for(lambda: is_taken(broker, Message(id="before", topic=topic, body=b"x")))
        cluster.kill_broker()
        refusal_without_route(engine, topic)
        ids = shop.add_due(50, topic=topic)
        service.start()
        metrics.wait_for(lambda it: it.breakers.count("open") >= 3)
        waiting = shop.rows()
        cluster.start()
        wait_for(lambda: is_taken(broker, Message(id="after", topic=topic, body=b"x")))  # else rows wait a minute more
        shop.end_delays()
        metrics.wait_for(lambda it: it.accepted == len(ids))
        read = engine.read(topic, count=len(ids) + 2)

    assert {(row["state"], row["attempts"] <= 2) for row in waiting} == {("pending", True)}
    copies = Counter(one.id for one in read)
    assert {*ids, "before", "after"} == set(copies)
    assert copies - Counter(set(copies)) <= in_doubt


def refusal_without_route(engine: RocketMqEngine, topic: str) -> None:
    """Wait until a proxy no longer has a route to the topic, as a broker that has never seen it says."""
    deadline = time.monotonic() + WAIT_SECONDS
    with closing(connect(engine.url + "&timeout_ms=20000")) as fresh:
        while time.monotonic() < deadline:
            try:
                [result] = fresh.publish([Message(id="probe", topic=f"{topic}", body=b"x")])
            except BrokerUnavailable as error:
                if "no broker serves" in str(error):
                    return
            else:
                if result.status is PublishStatus.DEFERRED:
                    return
    raise TimeoutError("the proxy kept the route")


def test_a_paused_proxy_is_unavailable_within_the_time_out(engine: RocketMqEngine, topic: str) -> None:
    engine.make_topic(topic)
    broker = connect(f"{engine.url}&timeout_ms=1000")
    publish_until_stored(broker, Message(id="m0", topic=topic, body=b"x"))
    engine.cluster.pause_proxy()
    begin = time.monotonic()
    try:
        with pytest.raises(BrokerUnavailable):
            broker.publish([Message(id="m1", topic=topic, body=b"x")])
        took_seconds = time.monotonic() - begin
    finally:
        engine.cluster.start()
    publish_until_stored(broker, Message(id="m2", topic=topic, body=b"x"))
    broker.close()

    assert took_seconds < 60
    assert {"m0", "m2"} <= {one.id for one in engine.read(topic, count=2)}
