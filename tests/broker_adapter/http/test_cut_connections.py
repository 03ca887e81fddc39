"""A connection that is cut at any point of a request loses no message, settles none that it should not, and says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker
from outbox_core import Delivery, Message
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.ids import new_message_id
from tests.broker_adapter.servers import served
from tests.fixtures.cutting_http_proxy import CuttingHttpProxy, Point, cutting_http_proxy

POINTS = list(Point)
GROUP = "g"
INVISIBLE_MS = 400
DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CuttingHttpProxy]:
    """A real server behind a proxy."""
    folder: Path = tmp_path_factory.mktemp("broker")
    with served(folder) as server, cutting_http_proxy(server.url) as made:
        yield made


@pytest.fixture(params=["msgpack", "json"])
def broker(proxy: CuttingHttpProxy, request: pytest.FixtureRequest) -> Iterator[HttpBroker]:
    """A client of it, whose connection has been used before."""
    proxy.cut()
    made = HttpBroker(proxy.url, codec=request.param)
    made.admin.topics()
    yield made
    proxy.cut()
    made.close()


def messages(topic: str, count: int = 3) -> list[Message]:
    return [Message(id=new_message_id(), topic=topic, body=b"body %d" % number) for number in range(count)]


def in_hand(broker: HttpBroker, topic: str, *, invisible_ms: int = 60_000) -> list[Delivery]:
    broker.publish(messages(topic))
    return broker.pull(topic, GROUP, invisible_ms=invisible_ms)


@pytest.mark.parametrize("point", POINTS)
def test_a_publish_that_is_cut_goes_again_and_nothing_is_lost_or_doubled(
    broker: HttpBroker, proxy: CuttingHttpProxy, topic: str, point: Point
) -> None:
    batch = messages(topic)
    proxy.cut(point)

    results = broker.publish(batch)

    assert [one.status for one in results] == ["duplicate" if point.is_done else "stored"] * len(batch)
    assert len(proxy.asked) == 2
    taken = broker.pull(topic, GROUP, max_messages=100)
    assert [(one.id, one.body) for one in taken] == [(one.id, one.body) for one in batch]


@pytest.mark.parametrize("point", POINTS)
def test_a_publish_that_is_cut_twice_is_unavailable_and_may_be_sent_again(
    broker: HttpBroker, proxy: CuttingHttpProxy, topic: str, point: Point
) -> None:
    batch = messages(topic)
    proxy.cut(point, point)

    with pytest.raises(BrokerUnavailable) as caught:
        broker.publish(batch)
    again = broker.publish(batch)

    assert caught.value.retryable
    assert {one.status for one in again} == {"duplicate" if point.is_done else "stored"}
    assert len(broker.pull(topic, GROUP, max_messages=100)) == len(batch)


@pytest.mark.parametrize("point", POINTS)
def test_an_ack_that_is_cut_goes_again_and_settles(
    broker: HttpBroker, proxy: CuttingHttpProxy, topic: str, point: Point
) -> None:
    taken = in_hand(broker, topic)
    proxy.cut(point)

    statuses = broker.ack([one.receipt for one in taken])

    assert statuses == ["already_acked" if point.is_done else "acked"] * len(taken)
    figures = broker.admin.figures(topic, GROUP)
    assert (figures["in_flight"], figures["backlog"]) == (0, 0)


@pytest.mark.parametrize("point", POINTS)
def test_an_extension_that_is_cut_goes_again_and_holds(
    broker: HttpBroker, proxy: CuttingHttpProxy, topic: str, point: Point
) -> None:
    taken = in_hand(broker, topic)
    proxy.cut(point)

    statuses = broker.extend([one.receipt for one in taken], invisible_ms=60_000)

    assert set(statuses) == {"extended"}
    assert broker.admin.figures(topic, GROUP)["in_flight"] == len(taken)


@pytest.mark.parametrize("point", POINTS)
def test_a_pull_that_is_cut_is_not_sent_again_and_its_messages_come_back(
    broker: HttpBroker, proxy: CuttingHttpProxy, topic: str, point: Point
) -> None:
    batch = messages(topic)
    broker.publish(batch)
    proxy.cut(point)

    with pytest.raises(BrokerUnavailable):
        broker.pull(topic, GROUP, invisible_ms=INVISIBLE_MS)

    assert len(proxy.asked) == 1
    taken = _all_of(broker, topic, len(batch))
    assert {one.id for one in taken} == {one.id for one in batch}
    assert all(one.attempt <= 2 for one in taken)


@pytest.mark.parametrize("point", POINTS)
def test_a_nack_that_is_cut_is_not_sent_again_and_takes_at_most_its_one_attempt(
    broker: HttpBroker, proxy: CuttingHttpProxy, topic: str, point: Point
) -> None:
    taken = in_hand(broker, topic, invisible_ms=INVISIBLE_MS)
    proxy.cut(point)

    with pytest.raises(BrokerUnavailable):
        broker.nack([one.receipt for one in taken], delay_ms=0)

    assert len(proxy.asked) == 1
    again = _all_of(broker, topic, len(taken))
    assert {delivery.id for delivery in again} == {delivery.id for delivery in taken}
    # One where the nack arrived; none where their invisible time ended, since they were delivered together.
    assert {delivery.attempt for delivery in again} in ({1}, {2})


@pytest.mark.parametrize("point", POINTS)
def test_a_cancel_that_is_cut_goes_again_and_holds(
    broker: HttpBroker, proxy: CuttingHttpProxy, topic: str, point: Point
) -> None:
    sent = Message(id=new_message_id(), topic=topic, body=b"", deliver_at_ms=int(time.time() * 1_000) + DAY_MS)
    broker.publish([sent])
    proxy.cut(point)

    [status] = broker.cancel([sent.id])

    # The second one finds what the first has canceled: nothing is scheduled, and whatever comes stays canceled.
    assert status in {"canceled", "unknown"}
    assert broker.admin.figures(topic)["scheduled"] == 0


def test_producers_whose_connections_are_cut_again_and_again_lose_and_double_nothing(
    broker: HttpBroker, proxy: CuttingHttpProxy, topic: str
) -> None:
    proxy.cut(*POINTS * 6)
    sent: list[str] = []

    def produce() -> None:
        for _ in range(10):
            batch = messages(topic)
            _until_answered(lambda batch=batch: broker.publish(batch))  # type: ignore[misc]
            sent.extend(one.id for one in batch)

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    taken = _all_of(broker, topic, len(sent))
    assert sorted(one.id for one in taken) == sorted(sent)
    assert len(sent) == 120


def _all_of(broker: HttpBroker, topic: str, count: int) -> list[Delivery]:
    """Until as many are in hand; those of a lost answer come when their invisible time is over."""
    taken: list[Delivery] = []
    for _ in range(10):
        taken += broker.pull(topic, GROUP, max_messages=1_000, wait_ms=5_000)
        if len(taken) >= count:
            break
    return taken


def _until_answered(publish: Callable[[], object]) -> None:
    for _ in range(20):
        try:
            publish()
            return
        except BrokerUnavailable:
            continue
    raise AssertionError("twenty publishes in a row were cut")
