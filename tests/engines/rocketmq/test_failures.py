"""A proxy or a broker under an Outbox and a compensator that is killed, paused and started again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from compensator.admission.circuit_breaker import BreakerState
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import publish_until_stored
from tests.compensator.serving import WatchedMetrics, add_due, serving
from tests.engines.outbox_load import Load, first_copies_by_key, wait_for
from tests.engines.rocketmq.recorded_broker import recorded_broker
from tests.engines.rocketmq.rocketmq_cluster import RocketMqCluster
from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine
from tests.fixtures.databases import Database
from tests.outbox.shop import Shop, open_shop

QUEUES = 4
TIMEOUT_MS = 2_000
WAIT_SECONDS = 300


@pytest.fixture
def shop(sqlite: Database) -> Iterator[Shop]:
    """A shop on SQLite."""
    with open_shop(sqlite) as opened:
        yield opened


@pytest.mark.parametrize(
    "fault", [RocketMqCluster.kill_proxy, RocketMqCluster.kill_broker, RocketMqCluster.pause_broker]
)
def test_a_server_that_fails_under_load_loses_no_message_and_no_order_of_a_key(
    engine: RocketMqEngine, shop: Shop, topic: str, fault: Callable[[RocketMqCluster], None]
) -> None:
    engine.make_topic(topic, kind="FIFO", queues=QUEUES)
    metrics, in_doubt = WatchedMetrics(), Counter[str]()
    broker = recorded_broker(engine.url, in_doubt, timeout_ms=TIMEOUT_MS)
    box = shop.box(broker, ordered={topic})
    load = Load(shop, box, topic)
    service, close = serving([shop], [broker], metrics=metrics)

    with ThreadPoolExecutor(1) as pool, ExitStack() as ending:
        for end in (engine.cluster.start, broker.close, box.close, close, service.stop, load.end):
            ending.callback(end)
        service.start()
        loading = pool.submit(load.run)
        load.wait_for_more(100)
        fault(engine.cluster)
        wait_for(lambda: len(in_doubt) > 0)
        engine.cluster.start()
        load.wait_for_more(100)
        load.end()
        loading.result(WAIT_SECONDS)
        wait_for(lambda: not load.left())
        queues = engine.read_queues(topic)

    copies = Counter(one.id for queue in queues for one in queue)
    repeated = copies - Counter(set(load.ids))
    print(f"{len(load.ids)} committed, {len(in_doubt)} in doubt, {repeated.total()} duplicates, {metrics.breakers}")
    assert set(copies) == set(load.ids)
    assert repeated <= in_doubt  # one copy at most for each publish that ended without an answer
    assert metrics.accepted > 0
    for queue in queues:
        for numbers in first_copies_by_key(queue).values():
            assert numbers == sorted(numbers)


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
        broker.publish([Message(id="before", topic=topic, body=b"x")])
        cluster.kill_broker()
        refusal_without_route(engine, topic)
        ids = add_due(shop, 50, topic=topic)
        service.start()
        metrics.wait_for(lambda it: it.breakers.count(BreakerState.OPEN) >= 3)
        waiting = shop.rows()
        cluster.start()
        shop.end_delays()
        metrics.wait_for(lambda it: it.accepted == len(ids))
        read = engine.read(topic, count=len(ids) + 1)

    assert {(row["state"], row["attempts"] <= 2) for row in waiting} == {("pending", True)}
    copies = Counter(one.id for one in read)
    assert {*ids, "before"} == set(copies)
    assert copies - Counter(set(copies)) <= in_doubt


def refusal_without_route(engine: RocketMqEngine, topic: str) -> None:
    """Wait until a proxy no longer has a route to the topic, as a broker that has never seen it says."""
    deadline = time.monotonic() + WAIT_SECONDS
    with closing(connect(engine.url + "&timeout_ms=1000")) as fresh:
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
