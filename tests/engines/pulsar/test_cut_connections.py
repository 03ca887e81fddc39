"""Connections to Pulsar that end in the middle of a batch, by a proxy whose address the server advertises."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest

from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.engines.pulsar.faulty_pulsar import FaultyPulsar
from tests.engines.pulsar.pulsar_engine import PulsarEngine


@pytest.mark.parametrize(
    ("way", "place"),
    [(way, place) for way in ("request_bytes", "answer_bytes") for place in (1, 20, 700)]
    + [("request_bytes", place) for place in (6_000, 20_000)],
)
def test_a_batch_that_is_cut_in_its_middle_is_stored_in_order_and_at_most_twice(
    own_engine: PulsarEngine, topic: str, way: str, place: int
) -> None:
    own_engine.make_topic(topic)
    proxy = own_engine.server.proxy
    batch = [Message(id=f"m{number:03d}", topic=topic, key=f"k{number % 3}", body=b"x" * 100) for number in range(400)]
    with closing(connect(f"pulsar://127.0.0.1:{proxy.port}?timeout_ms=60000")) as broker:
        broker.publish(batch[:1])
        cuts = proxy.cuts

        proxy.cut_after(**{way: place})
        results = broker.publish(batch[1:])

    assert proxy.cuts == cuts + 1
    assert {one.status for one in results} == {PublishStatus.STORED}
    [stored] = FaultyPulsar(own_engine).read_partitions(topic)
    read = [one.id for one in stored]
    assert list(dict.fromkeys(read)) == [one.id for one in batch]
    assert max(Counter(read).values()) <= 2
