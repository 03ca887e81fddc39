"""What is special about the timer store as a Broker: its slots, its bounds, and what it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from outbox_core.common.errors import ConfigurationError, NotSupported, StorageFailed
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import AckStatus, CancelStatus, GroupConfig, Message, PublishStatus
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server

Open = Callable[[str], Broker]
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    """A server that tests share; they keep apart by their topics."""
    with redis_server() as running:
        yield running


def url_of(server: RedisServer, options: str = "") -> str:
    return f"redis://{HOST}:{server.port}/?store=timers&wait=0{options}"


def message(topic: str, *, delay_ms: int = 0) -> Message:
    deliver_at_ms = time.time_ns() // 1_000_000 + delay_ms if delay_ms else None
    return Message(id=new_message_id(), topic=topic, body=b"x" * 100, deliver_at_ms=deliver_at_ms)


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("store=timers&slots=3", "power of two"),
        ("store=timers&slots=2048", "power of two"),
        ("slots=4", "about timers"),
        ("store=timers&maxlen=10", "about streams"),
        ("store=tables", "streams, timers"),
    ],
)
def test_options_that_cannot_work_are_refused_with_their_cure(options: str, cure: str) -> None:
    with pytest.raises(ConfigurationError, match=cure):
        connect(f"redis://h/?{options}")


def test_another_number_of_slots_than_the_topic_has_stores_nothing(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    first, second = open_broker(url_of(shared, "&slots=4")), open_broker(url_of(shared, "&slots=8"))
    first.publish([message(topic)])

    with pytest.raises(StorageFailed, match="4 slots"):
        second.publish([message(topic)])

    assert open_broker(url_of(shared)).admin.figures(topic)["stored"] == 1


def test_an_id_that_was_canceled_before_it_came_is_dropped_on_a_topic_that_there_is(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(shared))
    broker.publish([message(topic)])
    canceled, kept = message(topic, delay_ms=50), message(topic)

    assert broker.cancel([canceled.id]) == [CancelStatus.UNKNOWN]
    assert [one.status for one in broker.publish([canceled, kept])] == [PublishStatus.STORED] * 2

    assert broker.admin.figures(topic)["scheduled"] == 0
    assert broker.admin.figures(topic)["stored"] == 2
    assert broker.cancel([canceled.id]) == [CancelStatus.CANCELED]


def test_what_every_group_acknowledged_leaves_only_its_id_behind(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(shared))
    broker.publish([message(topic) for _ in range(10)])
    pulled = [broker.pull(topic, group) for group in ("g", "h")]
    for deliveries in pulled:
        assert broker.ack([one.receipt for one in deliveries]) == [AckStatus.ACKED] * 10

    left = {key.decode().rpartition("}:")[2] for key in shared.ask("KEYS", f"outbox:timers:{{{topic}:0}}:*")}

    assert left == {"meta", "ids", "group:g:config", "group:h:config"}


def test_a_group_with_a_filter_or_an_order_by_key_and_a_seek_are_not_supported(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    admin = open_broker(url_of(shared)).admin

    for config in (GroupConfig(filter="a = 1"), GroupConfig(ordered=True)):
        with pytest.raises(NotSupported):
            admin.declare_group(topic, "g", config)
    with pytest.raises(NotSupported):
        admin.seek(topic, "g", to_ms=0)


def test_a_full_server_refuses_what_comes_and_goes_on_to_deliver_and_to_settle(
    server: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(server))
    due, canceled = [message(topic) for _ in range(100)], message(topic, delay_ms=3_600_000)
    broker.publish([*due, canceled])
    server.ask("CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(StorageFailed):
        broker.publish([message(topic)])
    assert broker.cancel([canceled.id]) == [CancelStatus.CANCELED]
    deliveries = broker.pull(topic, "g", max_messages=100, wait_ms=WAIT_MS)

    assert [one.id for one in deliveries] == [one.id for one in due]
    assert broker.ack([one.receipt for one in deliveries]) == [AckStatus.ACKED] * 100
