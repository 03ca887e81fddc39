"""Connections to a proxy that end in the middle of a batch: nothing acknowledged is lost, order per key holds."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest

from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.engines.outbox_load import first_copies_by_key
from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine
from tests.fixtures.cutting_tcp_proxy import cutting_tcp_proxy

TRIES_MAX = 20
KEYS = 5


def publish_until_stored(broker: Broker, batch: list[Message]) -> int:
    """As the compensator does: again, until the broker has all; how many tries ended without an answer."""
    for tries in range(TRIES_MAX):
        try:
            results = broker.publish(batch)
        except BrokerUnavailable:
            continue
        assert {one.status for one in results} == {PublishStatus.STORED}
        return tries
    raise TimeoutError("the broker never took it")


@pytest.mark.parametrize("kind", ["NORMAL", "FIFO"])
@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("request_bytes", 1),
        ("request_bytes", 700),
        ("request_bytes", 15_000),
        ("answer_bytes", 1),
        ("answer_bytes", 20),
    ],
)
def test_a_batch_that_is_cut_in_its_middle_is_stored_and_each_cut_adds_one_copy_at_most(
    engine: RocketMqEngine, topic: str, kind: str, way: str, place: int
) -> None:
    engine.make_topic(topic, kind=kind, queues=4)
    batch = [Message(id=f"m{n:03d}", topic=topic, body=b"%0100d" % n, key=f"k{n % KEYS}") for n in range(100)]
    with cutting_tcp_proxy(engine.cluster.proxy_port) as proxy:
        with closing(connect(f"{engine.cluster.url(port=proxy.port)}&timeout_ms=60000")) as broker:
            broker.publish(batch[:1])
            proxy.cut_after(**{way: place})
            in_doubt = publish_until_stored(broker, batch[1:])
        cuts = proxy.cuts
    queues = engine.read_queues(topic)

    copies = Counter(one.id for queue in queues for one in queue)
    assert cuts == 1
    assert in_doubt <= 1
    assert set(copies) == {one.id for one in batch}
    assert max(copies.values()) <= 1 + in_doubt
    for queue in queues if kind == "FIFO" else []:
        for numbers in first_copies_by_key(queue).values():
            assert numbers == sorted(numbers)
