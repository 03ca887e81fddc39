"""What is acknowledged is there, whatever is cut, paused, killed or full; and a call ends in time."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.api import DiscardPolicy

from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.nats.nats_server import NatsEngine, name_of
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy, cutting_tcp_proxy

WAIT_SECONDS = 300
STORED = {PublishStatus.STORED, PublishStatus.DUPLICATE}
Open = Callable[[str], Broker]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Connect to a URL; closed at the end of the test."""
    with ExitStack() as stack:

        def connected(url: str) -> Broker:
            broker = connect(url)
            stack.callback(broker.close)
            return broker

        yield connected


@pytest.fixture
def topic(engine: NatsEngine) -> str:
    """A topic with a stream."""
    made = f"t.{uuid.uuid4().hex}"
    engine.make_topic(made)
    return made


@pytest.fixture
def proxy(engine: NatsEngine) -> Iterator[CuttingTcpProxy]:
    """In front of the shared server."""
    with cutting_tcp_proxy(engine.server.port) as made:
        yield made


def batch_of(topic: str, count: int, *, first: int = 0, **parts: Any) -> list[Message]:
    return [Message(id=f"m{n:06d}", topic=topic, body=b"%d" % n, **parts) for n in range(first, first + count)]


def behind(proxy: CuttingTcpProxy, engine: NatsEngine, options: str = "") -> str:
    return engine.url.replace(engine.server.address, f"127.0.0.1:{proxy.port}") + options


@pytest.mark.parametrize("way", ["request_bytes", "answer_bytes"])
@pytest.mark.parametrize("place", [1, 700, 6_000, 20_000])
def test_a_batch_that_is_cut_in_its_middle_is_stored_once_and_in_order(
    engine: NatsEngine, opened: Open, proxy: CuttingTcpProxy, topic: str, way: str, place: int
) -> None:
    broker = opened(behind(proxy, engine, "?timeout_ms=60000"))
    assert broker.publish(batch_of(topic, 1))[0].status is PublishStatus.STORED

    proxy.cut_after(**{way: place})
    results = broker.publish(batch_of(topic, 400, first=1))
    read = [one.id for one in engine.read(topic, count=401)]

    assert proxy.cuts == 1
    assert {one.status for one in results} == {PublishStatus.STORED}  # by this call, though some were sent twice
    assert read == [one.id for one in batch_of(topic, 401)]


def test_a_repeat_is_a_duplicate_and_the_same_id_on_another_topic_is_not(
    engine: NatsEngine, opened: Open, topic: str
) -> None:
    name = f"s{uuid.uuid4().hex}"
    engine.add_stream(name, subjects=[f"{name}.>"])
    broker = opened(engine.url)
    first, other = Message(id="1", topic=f"{name}.a", body=b""), Message(id="1", topic=f"{name}.b", body=b"")

    statuses = [broker.publish([one])[0].status for one in (first, first, other)]

    assert statuses == [PublishStatus.STORED, PublishStatus.DUPLICATE, PublishStatus.STORED]


def test_a_prefix_stands_before_the_topic(engine: NatsEngine, opened: Open) -> None:
    prefix = f"p{uuid.uuid4().hex}"
    engine.make_topic(f"{prefix}.paid")

    [result] = opened(f"{engine.url}?prefix={prefix}").publish(batch_of("paid", 1))

    assert result.status is PublishStatus.STORED
    assert [one.body for one in engine.read(f"{prefix}.paid", count=1)] == [b"0"]


@pytest.mark.parametrize("limit", [{"max_msgs": 2}, {"max_bytes": 1_100}])
def test_a_full_stream_defers_what_it_has_no_room_for_and_takes_it_once_there_is_room(
    engine: NatsEngine, opened: Open, limit: dict[str, int]
) -> None:
    topic = f"t.{uuid.uuid4().hex}"
    engine.add_stream(name_of(topic), subjects=[topic], discard=DiscardPolicy.NEW, **limit)
    broker = opened(engine.url)
    batch = [Message(id=str(n), topic=topic, body=b"x" * 300) for n in range(4)]

    results = broker.publish(batch)
    stored = [one.id for one in results if one.status is PublishStatus.STORED]

    assert stored == ["0", "1"]
    assert [(one.status, "stream edit" in str(one.error)) for one in results[2:]] == [
        (PublishStatus.DEFERRED, True)
    ] * 2
    engine.run(lambda client: client.jetstream().purge_stream(name_of(topic)))
    assert [one.status for one in broker.publish(batch[2:])] == [PublishStatus.STORED] * 2


def test_a_message_larger_than_its_stream_takes_is_rejected(engine: NatsEngine, opened: Open) -> None:
    topic = f"t.{uuid.uuid4().hex}"
    engine.add_stream(name_of(topic), subjects=[topic], max_msg_size=500)
    large, small = Message(id="1", topic=topic, body=b"x" * 600), Message(id="2", topic=topic, body=b"x")

    results = opened(engine.url).publish([large, small])

    assert [one.status for one in results] == [PublishStatus.REJECTED, PublishStatus.STORED]
    assert "size" in str(results[0].error)


@pytest.mark.slow
def test_the_answer_of_a_plain_subscriber_is_not_taken_for_the_streams(
    engine: NatsEngine, opened: Open, topic: str
) -> None:
    """A responder of the old kind listens to the subject, and there is no stream for another that it listens to."""
    lonely = f"lonely.{uuid.uuid4().hex}"

    async def respond(client: Client) -> list[PublishStatus]:
        async def answer(message: Any) -> None:
            await message.respond(b"OK")

        await client.subscribe(topic, cb=answer)
        await client.subscribe(lonely, cb=answer)
        await client.flush()
        batch = [Message(id="1", topic=topic, body=b""), Message(id="2", topic=lonely, body=b"")]
        results = await asyncio.to_thread(opened(engine.url).publish, batch)
        return [one.status for one in results]

    assert engine.run(respond) == [PublishStatus.STORED, PublishStatus.DEFERRED]


@pytest.mark.slow
def test_a_server_that_hangs_is_unavailable_in_time_and_used_again_once_it_goes_on(
    own_engine: NatsEngine, opened: Open
) -> None:
    own_engine.make_topic("t")
    broker = opened(f"{own_engine.url}?timeout_ms=2500")
    publish_all(broker, batch_of("t", 1))

    own_engine.server.pause()
    try:
        begun = time.monotonic()
        for count in (300, 1):  # on the connection that it had, and on one that it would make
            with pytest.raises(BrokerUnavailable):
                broker.publish(batch_of("t", count, first=1))
        assert time.monotonic() - begun < 60  # 2 x 3.5 s, and what a loaded machine adds
    finally:
        own_engine.server.resume()
    publish_all(broker, batch_of("t", 301))

    assert {one.id for one in own_engine.read("t", count=301)} == {one.id for one in batch_of("t", 301)}


def test_nothing_acknowledged_is_lost_of_a_server_that_is_killed_under_load(
    own_engine: NatsEngine, opened: Open
) -> None:
    own_engine.make_topic("t")
    broker = opened(f"{own_engine.url}?timeout_ms=5000")
    acknowledged: list[str] = []
    many, done = threading.Event(), threading.Event()

    def publish() -> None:
        for number in itertools.count(0, 50):
            batch = batch_of("t", 50, first=number)
            acknowledged.extend(publish_all(broker, batch))
            if len(acknowledged) >= 500:
                many.set()
            if done.is_set():
                return

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        assert many.wait(WAIT_SECONDS)
        own_engine.kill()
        own_engine.start()
        before = len(acknowledged)
        deadline = time.monotonic() + WAIT_SECONDS
        while len(acknowledged) < before + 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        done.set()
        thread.join(WAIT_SECONDS)

    read = Counter(one.id for one in own_engine.read("t", count=len(acknowledged)))
    assert [one for one in acknowledged if one not in read] == []
    assert sum(read.values()) - len(read) == 0  # within the duplicate window no repeat is stored


def test_a_forked_child_has_a_connection_of_its_own_and_the_parent_keeps_its_own(
    engine: NatsEngine, opened: Open, topic: str
) -> None:
    broker = opened(engine.url)
    broker.publish(batch_of(topic, 1))
    before = engine.server.connections("outbox-mq")

    child = os.fork()
    if child == 0:
        status = 1
        try:
            [result] = broker.publish(batch_of(topic, 1, first=1))
            broker.close()
            status = 0 if result.status is PublishStatus.STORED else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    broker.publish(batch_of(topic, 1, first=2))

    assert [one.body for one in engine.read(topic, count=3)] == [b"0", b"1", b"2"]
    assert set(before) <= set(engine.server.connections("outbox-mq"))


def publish_all(broker: Broker, batch: list[Message]) -> list[str]:
    """As the compensator does: again, until the broker has it. Returns the ids."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            results = broker.publish(batch)
        except BrokerUnavailable:
            continue
        assert {one.status for one in results} <= STORED, results
        return [one.id for one in results]
    raise TimeoutError("the broker never took it")
