"""What every broker does for readers without a group."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox_core import Broker, Message
from outbox_core.common.errors import BrokerRefused, InvalidMessage
from outbox_core.messages.broadcast_port import Broadcaster, TopicRead

WAIT_S = 60


@pytest.fixture
def readable(broker: Broker) -> Broadcaster:
    """The broker, as readers see it."""
    assert isinstance(broker, Broadcaster)
    return broker


def publish(broker: Broker, topic: str, *bodies: bytes) -> None:
    broker.publish([Message(id=f"{topic}.{body.hex()}"[-64:], topic=topic, body=body) for body in bodies])


def bodies(found: TopicRead) -> list[bytes]:
    return [one.body for one in found.messages]


def test_every_reader_gets_all_from_its_place_on(broker: Broker, readable: Broadcaster, topic: str) -> None:
    publish(broker, topic, b"a", b"\xff\xfe")
    late = readable.read(topic)
    publish(broker, topic, b"c")

    first = readable.read(topic, start="earliest", max_messages=2)

    assert (bodies(first), first.offset, first.next_offset) == ([b"a", b"\xff\xfe"], 0, 2)
    assert bodies(readable.read(topic, offset=first.next_offset)) == [b"c"]
    assert (bodies(late), late.next_offset) == ([], 2)
    assert bodies(readable.read(topic, offset=late.next_offset)) == [b"c"]


def test_a_reader_that_waits_gets_the_message_when_it_comes(broker: Broker, readable: Broadcaster, topic: str) -> None:
    begun = threading.Event()

    def read() -> TopicRead:
        begun.set()
        return readable.read(topic, offset=0, wait_ms=WAIT_S * 1_000)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read)
        assert begun.wait(WAIT_S)
        publish(broker, topic, b"a")

        assert bodies(found.result(WAIT_S)) == [b"a"]


def test_a_place_behind_the_end_is_answered_with_the_end(broker: Broker, readable: Broadcaster, topic: str) -> None:
    publish(broker, topic, b"a")

    found = readable.read(topic, offset=5)

    assert (found.messages, found.offset, found.next_offset) == ([], 5, 1)


def test_where_no_reader_can_begin_is_refused(readable: Broadcaster, topic: str) -> None:
    with pytest.raises((InvalidMessage, BrokerRefused)):
        readable.read(topic, start="middle")  # type: ignore[arg-type]
