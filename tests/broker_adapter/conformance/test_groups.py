"""What every broker tells of topics and groups, and lets operators do with them."""

from __future__ import annotations

import threading
import time

import pytest

from outbox_core import Broker, GroupConfig, Message
from outbox_core.common.errors import BrokerRefused, InvalidMessage
from outbox_core.messages.ids import new_message_id


def publish(broker: Broker, topic: str, count: int = 1) -> list[str]:
    batch = [Message(id=new_message_id(), topic=topic, body=b"x") for _ in range(count)]
    broker.publish(batch)
    return [one.id for one in batch]


def pulled_ids(broker: Broker, topic: str, group: str = "g", *, wait_ms: int = 0) -> list[str]:
    return [one.id for one in broker.pull(topic, group, wait_ms=wait_ms)]


def test_a_group_begins_with_the_earliest_message(broker: Broker, topic: str) -> None:
    ids = publish(broker, topic, 3)

    assert pulled_ids(broker, topic) == ids


def test_a_group_that_starts_at_the_latest_sees_only_what_comes_after(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    broker.admin.declare_group(topic, "g", GroupConfig(start="latest"))
    [later] = publish(broker, topic)

    assert pulled_ids(broker, topic) == [later]


def test_a_group_that_starts_at_a_time_sees_what_came_from_then_on(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    start_ms = next_millisecond()
    later = publish(broker, topic, 2)
    broker.admin.declare_group(topic, "g", GroupConfig(start="at", start_at_ms=start_ms))

    assert pulled_ids(broker, topic) == later


def test_declaring_a_group_again_keeps_its_position(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig())
    publish(broker, topic)
    broker.ack([one.receipt for one in broker.pull(topic, "g")])

    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=3))

    assert pulled_ids(broker, topic) == []


def test_a_paused_group_gets_nothing_until_it_is_resumed(broker: Broker, topic: str) -> None:
    ids = publish(broker, topic)
    assert pulled_ids(broker, topic, "other") == ids
    broker.admin.declare_group(topic, "g", GroupConfig())
    broker.admin.pause(topic, "g", paused=True)
    broker.admin.pause(topic, "g", paused=True)

    assert pulled_ids(broker, topic, wait_ms=50) == []

    timer = threading.Timer(0.1, lambda: broker.admin.pause(topic, "g", paused=False))
    timer.start()
    assert pulled_ids(broker, topic, wait_ms=60_000) == ids
    timer.join()


def test_a_seek_to_an_offset_replays_from_there_and_makes_old_receipts_stale(broker: Broker, topic: str) -> None:
    ids = publish(broker, topic, 4)
    first = broker.pull(topic, "g")
    broker.ack([one.receipt for one in first[:2]])

    broker.admin.seek(topic, "g", to_offset=1)

    assert broker.ack([first[2].receipt]) == ["stale"]
    again = broker.pull(topic, "g")
    assert [one.id for one in again] == ids[1:]
    assert broker.ack([again[0].receipt]) == ["acked"]


def test_a_seek_to_a_time_replays_what_came_from_then_on(broker: Broker, topic: str) -> None:
    publish(broker, topic, 2)
    time_ms = next_millisecond()
    later = publish(broker, topic, 2)
    broker.ack([one.receipt for one in broker.pull(topic, "g")])

    broker.admin.seek(topic, "g", to_ms=time_ms)

    assert pulled_ids(broker, topic) == later


def test_a_seek_needs_either_a_time_or_an_offset(broker: Broker, topic: str) -> None:
    broker.pull(topic, "g")

    with pytest.raises((InvalidMessage, BrokerRefused)):
        broker.admin.seek(topic, "g")


def test_figures_tell_what_is_where(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1))
    publish(broker, topic, 5)
    broker.publish(
        [Message(id=new_message_id(), topic=topic, body=b"", deliver_at_ms=time.time_ns() // 1_000_000 + 86_400_000)]
    )
    deliveries = broker.pull(topic, "g", max_messages=3)
    broker.ack([deliveries[0].receipt])
    broker.nack([deliveries[1].receipt], reason="broken")

    figures = broker.admin.figures(topic, "g")

    assert {name: figures[name] for name in ("stored", "backlog", "in_flight", "dead", "scheduled")} == {
        "stored": 5, "backlog": 2, "in_flight": 1, "dead": 1, "scheduled": 1,
    }  # fmt: skip
    assert figures["oldest_unacked_age_ms"] >= 0
    assert broker.admin.figures(topic)["stored"] == 5


def test_a_topics_figures_are_those_of_its_groups_together(broker: Broker, topic: str) -> None:
    for group in ("g", "h", "idle"):
        broker.admin.declare_group(topic, group, GroupConfig(max_attempts=1))
    publish(broker, topic, 5)
    broker.ack([one.receipt for one in broker.pull(topic, "g", max_messages=5)])
    held = broker.pull(topic, "h", max_messages=3)
    broker.nack([held[0].receipt], reason="broken")

    youngest_ms = broker.admin.figures(topic, "idle")["oldest_unacked_age_ms"]
    figures = dict(broker.admin.figures(topic))
    oldest_ms = figures.pop("oldest_unacked_age_ms")

    assert figures == {"stored": 5, "scheduled": 0, "backlog": 2 + 5, "in_flight": 2, "dead": 1}
    assert youngest_ms <= oldest_ms <= broker.admin.figures(topic, "idle")["oldest_unacked_age_ms"]


def test_topics_are_listed_sorted(broker: Broker, topic: str) -> None:
    publish(broker, f"{topic}.b")
    publish(broker, f"{topic}.a")

    names = broker.admin.topics()

    assert names == sorted(names)
    assert {f"{topic}.a", f"{topic}.b"} <= set(names)


def test_what_does_not_exist_is_refused(broker: Broker, topic: str) -> None:
    with pytest.raises(BrokerRefused, match=topic):
        broker.admin.figures(topic)
    publish(broker, topic)
    with pytest.raises(BrokerRefused, match="nobody"):
        broker.admin.figures(topic, "nobody")
    with pytest.raises(BrokerRefused):
        broker.admin.pause(topic, "nobody", paused=True)
    with pytest.raises(BrokerRefused):
        broker.admin.redrive(topic, "nobody")


def next_millisecond() -> int:
    """A time that what was published before lies before, and what comes next does not."""
    start = time.time_ns() // 1_000_000
    while (now := time.time_ns() // 1_000_000) <= start:
        time.sleep(0.001)
    return now


def test_a_seek_beyond_the_end_is_refused_and_moves_nothing(broker: Broker, topic: str) -> None:
    ids = publish(broker, topic, 2)
    broker.admin.declare_group(topic, "g", GroupConfig())

    with pytest.raises((InvalidMessage, BrokerRefused), match="beyond the end"):
        broker.admin.seek(topic, "g", to_offset=3)

    assert pulled_ids(broker, topic) == ids
    broker.admin.seek(topic, "g", to_offset=2)
    assert pulled_ids(broker, topic) == []
