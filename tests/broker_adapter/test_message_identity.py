"""One id on two topics is two messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from outbox_core import Broker, Message
from outbox_core.common.clock import ManualClock

HOUR_MS = 3_600_000


@pytest.fixture
def broker(clock: ManualClock, tmp_path: Path) -> Iterator[Broker]:
    made = EmbeddedBroker(f"embedded:{tmp_path}", clock=clock)
    yield made
    made.close()


def message(topic: str, *, message_id: str = "same", due_ms: int | None = None) -> Message:
    return Message(id=message_id, topic=topic, body=topic.encode(), deliver_at_ms=due_ms)


def publish(broker: Broker, *batch: Message) -> list[str]:
    return [str(one.status) for one in broker.publish(batch)]


def bodies(broker: Broker, topic: str) -> list[bytes]:
    found = broker.pull(topic, "g", max_messages=100)
    broker.ack([one.receipt for one in found])
    return [one.body for one in found]


def test_a_repeat_is_one_on_its_own_topic_alone(broker: Broker) -> None:
    assert publish(broker, message("a"), message("b"), message("a")) == ["stored", "stored", "duplicate"]
    assert publish(broker, message("b"), message("c")) == ["duplicate", "stored"]
    assert [bodies(broker, topic) for topic in "abc"] == [[b"a"], [b"b"], [b"c"]]


def test_what_is_scheduled_under_one_id_on_two_topics_falls_due_on_both(broker: Broker, clock: ManualClock) -> None:
    due_ms = clock.now_ms() + HOUR_MS
    assert publish(broker, message("a", due_ms=due_ms), message("b", due_ms=due_ms), message("c")) == ["stored"] * 3
    clock.advance(HOUR_MS)

    assert [bodies(broker, topic) for topic in "abc"] == [[b"a"], [b"b"], [b"c"]]
    assert publish(broker, message("a"), message("b", due_ms=due_ms + HOUR_MS)) == ["duplicate", "duplicate"]


def test_a_cancel_stops_what_waits_on_any_topic_and_says_so_although_one_was_delivered(
    broker: Broker, clock: ManualClock
) -> None:
    due_ms = clock.now_ms() + HOUR_MS
    publish(broker, message("a"), message("b", due_ms=due_ms), message("c", due_ms=due_ms))

    assert broker.cancel(["same", "same"]) == ["canceled", "canceled"]

    clock.advance(HOUR_MS)
    assert [bodies(broker, topic) for topic in "abc"] == [[b"a"], [], []]
    assert publish(broker, message("b"), message("c"), message("d")) == ["duplicate", "duplicate", "stored"]


def test_a_cancel_that_came_first_stops_its_id_on_every_topic(broker: Broker) -> None:
    assert broker.cancel(["same"]) == ["unknown"]

    assert publish(broker, message("a"), message("a"), message("b")) == ["stored", "duplicate", "stored"]
    assert broker.cancel(["same"]) == ["canceled"]
    assert [bodies(broker, topic) for topic in "ab"] == [[], []]
