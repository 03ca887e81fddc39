"""A server that is cut off, paused, killed under load, full, or out of memory: nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from broker_adapter.rabbitmq import open_broker as open_rabbitmq
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, StorageFailed
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import Message, PublishStatus
from outbox_core.messages.refused_batch_isolation import publish_isolated
from tests.broker_adapter.publishing.publisher_conformance import message, publish_until_stored
from tests.broker_adapter.rabbitmq.rabbitmq_engine import PASSWORD, USER, RabbitMqEngine
from tests.broker_adapter.rabbitmq.rabbitmq_server import DISK_FREE_LIMIT, HOST, MESSAGE_BYTES_MAX, wait_for
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy, cutting_tcp_proxy

Open = Callable[[str], Broker]
WAIT_SECONDS = 300
ATTEMPTS_MAX = 5_000
BATCH = 50


@pytest.fixture
def proxy(engine: RabbitMqEngine) -> Iterator[CuttingTcpProxy]:
    """In front of the server."""
    with cutting_tcp_proxy(engine.server.port) as made:
        yield made


@pytest.fixture
def topic() -> str:
    return f"t.{uuid.uuid4().hex}"


def behind(proxy: CuttingTcpProxy, engine: RabbitMqEngine) -> str:
    return f"{engine.url_of(USER, PASSWORD).replace(f':{engine.server.port}', f':{proxy.port}')}?timeout_ms=60000"


def publish_all(broker: Broker, batch: list[Message]) -> list[str]:
    """As the relay does: again, until the broker has it. Returns the ids."""
    for _ in range(ATTEMPTS_MAX):
        with contextlib.suppress(BrokerUnavailable, StorageFailed):
            results = broker.publish(batch)
            assert {one.status for one in results} == {PublishStatus.STORED}, results
            return [one.id for one in results]
    raise TimeoutError("the broker never took it")


def publish_again_and_again(broker: Broker, one: Message) -> None:
    """Until it fails, as it does once an alarm has reached the connection."""
    for _ in range(ATTEMPTS_MAX):
        broker.publish([one])


def is_connected() -> bool:
    """Whether the thread of a connection is there."""
    return any(thread.name == "outbox-rabbitmq" for thread in threading.enumerate())


def is_in_order(read: list[int]) -> bool:
    """Whether the first copies come in order."""
    first = list(dict.fromkeys(read))
    return first == sorted(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("request_bytes", 1),
        ("request_bytes", 300),
        ("request_bytes", 6_000),
        ("request_bytes", 40_000),
        ("answer_bytes", 1),  # one confirm may be for all
        ("answer_bytes", 20),
    ],
)
def test_a_batch_that_is_cut_in_its_middle_is_an_outage_and_its_repeat_is_complete_and_in_order(
    engine: RabbitMqEngine, open_broker: Open, proxy: CuttingTcpProxy, made_topic: str, way: str, place: int
) -> None:
    broker = open_broker(behind(proxy, engine))
    assert broker.publish([message(made_topic, 0)])[0].status is PublishStatus.STORED
    batch = [message(made_topic, n, key="k") for n in range(1, 400)]

    proxy.cut_after(**{way: place})
    with pytest.raises(BrokerUnavailable):
        broker.publish(batch)
    assert {one.status for one in broker.publish(batch)} == {PublishStatus.STORED}
    read = [int(one.body) for one in engine.read(made_topic, count=400)]

    assert proxy.cuts == 1
    assert set(read) == set(range(400))
    assert is_in_order(read)


@pytest.mark.slow
def test_a_paused_server_is_unavailable_within_the_time_out_and_used_again_once_it_goes_on(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str
) -> None:
    broker = open_broker(f"{engine.url_of(USER, PASSWORD)}?timeout_ms=1000")
    publish_all(broker, [message(made_topic, 0)])

    with engine.server.paused():
        begun = time.monotonic()
        for _ in range(2):  # on the connection that it had, and on one that it would make
            with pytest.raises(BrokerUnavailable):
                broker.publish([message(made_topic, n) for n in range(1, 300)])
        assert time.monotonic() - begun < 60  # 2 x 1.5 s, and what a loaded machine adds
    publish_all(broker, [message(made_topic, n) for n in range(1, 300)])

    assert {int(one.body) for one in engine.read(made_topic, count=300)} == set(range(300))


@pytest.mark.slow
def test_killed_and_restarted_under_load_nothing_acknowledged_is_lost_or_out_of_order(
    own_engine: RabbitMqEngine, open_broker: Open, topic: str
) -> None:
    own_engine.make_topic(topic)
    broker = open_broker(f"{own_engine.url_of(USER, PASSWORD)}?timeout_ms=2000")
    acknowledged: list[str] = []
    done = threading.Event()

    def publish(key: int) -> int:
        number = 0
        while not done.is_set():
            batch = [message(topic, key * 1_000_000 + number + n, key=str(key)) for n in range(BATCH)]
            acknowledged.extend(publish_all(broker, batch))
            number += BATCH
        return number

    with ThreadPoolExecutor(3) as pool:
        publishing = [pool.submit(publish, key) for key in range(3)]
        try:
            wait_for(lambda: len(acknowledged) >= 1_000)
            own_engine.kill()
            own_engine.start()
            before = len(acknowledged)
            wait_for(lambda: len(acknowledged) >= before + 500)
        finally:
            done.set()
        sent = sum(one.result(WAIT_SECONDS) for one in publishing)
    read = own_engine.read(topic, count=sent)

    assert len(acknowledged) == len(set(acknowledged)) == sent
    assert set(acknowledged) == {one.id for one in read}
    assert [key for key in range(3) if not is_in_order([int(m.body) for m in read if m.key == str(key)])] == []


@pytest.mark.slow
def test_after_a_restart_the_next_publish_connects_again(
    own_engine: RabbitMqEngine, open_broker: Open, topic: str
) -> None:
    own_engine.make_topic(topic)
    broker = open_broker(own_engine.url)
    broker.publish([message(topic, 0)])
    own_engine.kill()
    own_engine.start()

    publish_until_stored(broker, message(topic, 1))

    assert [one.body for one in own_engine.read(topic, count=2)] == [b"0", b"1"]


def test_a_connection_that_was_lost_meanwhile_costs_no_publish(
    engine: RabbitMqEngine, open_broker: Open, proxy: CuttingTcpProxy, made_topic: str
) -> None:
    broker = open_broker(behind(proxy, engine))
    broker.publish([message(made_topic, 0)])
    assert is_connected()
    proxy.hang_up()
    wait_for(lambda: not is_connected())

    [result] = broker.publish([message(made_topic, 1)])

    assert (result.status, is_connected()) == (PublishStatus.STORED, True)


def test_a_full_queue_defers_what_it_refused_and_takes_it_once_there_is_room(
    engine: RabbitMqEngine, open_broker: Open, topic: str
) -> None:
    engine.server.declare(topic, x_max_length=2, x_overflow="reject-publish")
    broker = open_broker(engine.url)
    broker.publish([message(topic, 0), message(topic, 1), message(topic, 2)])  # refused from the third on, or later

    results = broker.publish([message(topic, n, key="k") for n in range(10, 14)])

    assert {one.status for one in results} == {PublishStatus.DEFERRED}
    assert "x-max-length" in str(results[0].error)
    engine.server.api("DELETE", f"queues/%2F/{topic}/contents")
    wait_for(lambda: broker.publish([message(topic, 20)])[0].status is PublishStatus.STORED)


def test_several_returned_messages_are_told_apart_from_those_that_were_taken(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str, topic: str
) -> None:
    taken, returned = PublishStatus.STORED, PublishStatus.DEFERRED
    batch = [Message(id="same", topic=one, body=b"") for one in (topic, made_topic, topic, made_topic)]

    results = open_broker(engine.url).publish(batch)

    assert [one.status for one in results] == [returned, taken, returned, taken]
    assert "declare a queue" in str(results[0].error)


def test_an_exchange_routes_topics_and_one_that_is_gone_defers_them(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str
) -> None:
    exchange = f"x.{uuid.uuid4().hex}"
    engine.server.api("PUT", f"exchanges/%2F/{exchange}", type="topic", durable=True)
    engine.server.bind(exchange, made_topic, "paid.*")
    broker = open_broker(f"{engine.url}&exchange={exchange}")
    batch = [message("paid.eu", 0), message("unbound", 0), message("paid.us", 0)]

    statuses = [one.status for one in broker.publish(batch)]
    engine.server.api("DELETE", f"exchanges/%2F/{exchange}")
    gone = broker.publish(batch)

    assert statuses == [PublishStatus.STORED, PublishStatus.DEFERRED, PublishStatus.STORED]
    assert {one.status for one in gone} == {PublishStatus.DEFERRED}
    assert exchange in str(gone[0].error)


def test_each_of_several_messages_that_are_too_large_is_rejected_once_and_no_neighbour_is_stored_twice(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str
) -> None:
    large = b"x" * (MESSAGE_BYTES_MAX + 1)
    batch = [message(made_topic, n, **({"body": large} if n in {3, 7} else {})) for n in range(10)]

    results = open_broker(engine.url).publish(batch)

    rejected = [n for n, one in enumerate(results) if one.status is PublishStatus.REJECTED]
    assert rejected == [3, 7]
    assert [int(one.body) for one in engine.read(made_topic, count=8)] == [0, 1, 2, 4, 5, 6, 8, 9]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alarm", "end"),
    [
        (("set_vm_memory_high_watermark", "absolute", "1MB"), ("set_vm_memory_high_watermark", "0.6")),
        (("set_disk_free_limit", "1000000GB"), ("set_disk_free_limit", DISK_FREE_LIMIT)),
    ],
    ids=["memory", "disk"],
)
def test_a_server_that_blocks_publishers_is_storage_failed_and_takes_all_once_it_has_room(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str, alarm: tuple[str, ...], end: tuple[str, ...]
) -> None:
    broker = open_broker(engine.url_of(USER, PASSWORD))
    broker.publish([message(made_topic, 0)])

    engine.server.control(*alarm)
    try:
        with pytest.raises(StorageFailed, match="resource alarm"):
            publish_again_and_again(broker, message(made_topic, 1))
    finally:
        engine.server.control(*end)
    publish_all(broker, [message(made_topic, 1)])

    assert {int(one.body) for one in engine.read(made_topic, count=2)} == {0, 1}


def test_a_forked_child_has_a_connection_of_its_own_and_the_parent_keeps_its_own(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str
) -> None:
    broker = open_broker(engine.url)
    broker.publish([message(made_topic, 0)])
    before = engine.server.connections()

    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            for n in range(100, 150):
                assert broker.publish([message(made_topic, n)])[0].status is PublishStatus.STORED
            broker.close()
            status = 0
        os._exit(status)
    for n in range(1, 50):
        assert broker.publish([message(made_topic, n)])[0].status is PublishStatus.STORED
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert engine.server.connections() == before
    assert sorted(int(one.body) for one in engine.read(made_topic, count=100)) == [*range(50), *range(100, 150)]


def test_a_batch_under_way_when_the_broker_is_closed_ends_with_it(engine: RabbitMqEngine, made_topic: str) -> None:
    broker = open_rabbitmq(engine.url_of(USER, PASSWORD))
    broker.publish([message(made_topic, 0)])
    outcomes: list[Any] = []

    def publish() -> None:
        try:
            while True:
                broker.publish([message(made_topic, n) for n in range(100)])
        except (BrokerUnavailable, ConfigurationError) as error:
            outcomes.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    broker.close()
    thread.join(WAIT_SECONDS)

    assert len(outcomes) == 1
    with pytest.raises(ConfigurationError, match="was closed"):
        broker.publish([message(made_topic, 1)])


def test_a_server_that_is_not_there_is_an_outage_with_its_address(open_broker: Open) -> None:
    with pytest.raises(BrokerUnavailable, match=f"{HOST}:1"):
        open_broker(f"rabbitmq://{HOST}:1?timeout_ms=60000").publish([message("t", 0)])


@pytest.mark.parametrize("place", [0, 10, 19], ids=["first", "middle", "last"])
def test_a_topic_that_the_user_may_not_write_to_is_deferred_and_the_others_come_at_most_twice(
    engine: RabbitMqEngine, open_broker: Open, topic: str, place: int
) -> None:
    """The server ends the channel at the first of them, with what it has not confirmed of those before."""
    user, exchange = f"u-{topic}", f"x-{topic}"
    engine.server.api("PUT", f"exchanges/%2F/{exchange}", type="topic", durable=True)
    engine.server.add_user(user, PASSWORD)
    engine.server.api("PUT", f"topic-permissions/%2F/{user}", exchange=exchange, write=f"^{topic}\\.ok", read="")
    topics = [f"{topic}.ok1", f"{topic}.ok2"]
    for name in topics:
        engine.server.declare(name)
        engine.server.bind(exchange, name, name)
    broker = open_broker(f"{engine.url_of(user, PASSWORD)}?exchange={exchange}")
    batch = [message(topics[number % 2], number) for number in range(20)]
    batch[place] = message(f"{topic}.denied", place)

    published = publish_isolated(broker.publish, batch)

    denied = published.results[place]
    assert (denied.status, "ACCESS_REFUSED" in str(denied.error)) == (PublishStatus.DEFERRED, True)
    assert {one.status for at, one in published.results.items() if at != place} == {PublishStatus.STORED}
    for name in topics:
        wanted = {one.id for one in batch if one.topic == name}
        copies = Counter(one.id for one in engine.read(name, count=len(wanted)))
        assert set(copies) == wanted
        assert max(copies.values()) <= 2
