"""What every broker does with messages that are for later."""

from __future__ import annotations

import time

from outbox_core import Broker, Message
from outbox_core.messages.ids import new_message_id

WAIT_MS = 60_000
HOUR_MS = 3_600_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def publish(broker: Broker, topic: str, *, deliver_at_ms: int, message_id: str | None = None) -> str:
    message = Message(id=message_id or new_message_id(), topic=topic, body=b"later", deliver_at_ms=deliver_at_ms)
    [result] = broker.publish([message])
    assert result.status == "stored", result
    return message.id


def test_a_due_time_in_the_past_means_now(broker: Broker, topic: str) -> None:
    sent = publish(broker, topic, deliver_at_ms=now_ms() - 1_000)

    assert [one.id for one in broker.pull(topic, "g")] == [sent]


def test_a_scheduled_message_wakes_a_long_poll_at_its_time_and_not_before(broker: Broker, topic: str) -> None:
    deliver_at_ms = now_ms() + 250
    publish(broker, topic, deliver_at_ms=deliver_at_ms)

    [got] = broker.pull(topic, "g", wait_ms=WAIT_MS)

    assert now_ms() >= deliver_at_ms
    assert now_ms() < deliver_at_ms + 3_000
    assert got.deliver_at_ms == deliver_at_ms


def test_scheduled_messages_come_in_the_order_of_their_times(broker: Broker, topic: str) -> None:
    base = now_ms() + 600  # all three are stored before the first is due, on a busy machine as well
    ids = [publish(broker, topic, deliver_at_ms=base + offset) for offset in (80, 0, 40)]

    pulled: list[str] = []
    while len(pulled) < 3:
        found = broker.pull(topic, "g", wait_ms=WAIT_MS)
        assert found
        pulled += [one.id for one in found]

    assert pulled == [ids[1], ids[2], ids[0]]


def test_a_message_for_much_later_is_stored_and_not_delivered(broker: Broker, topic: str) -> None:
    publish(broker, topic, deliver_at_ms=now_ms() + 730 * 24 * HOUR_MS)

    assert broker.pull(topic, "g", wait_ms=50) == []
    assert broker.admin.figures(topic)["scheduled"] == 1


def test_a_canceled_message_is_never_delivered(broker: Broker, topic: str) -> None:
    deliver_at_ms = now_ms() + 300
    gone = publish(broker, topic, deliver_at_ms=deliver_at_ms)
    kept = publish(broker, topic, deliver_at_ms=deliver_at_ms)

    assert broker.cancel([gone]) == ["canceled"]
    assert broker.cancel([gone]) == ["canceled"]

    assert [one.id for one in broker.pull(topic, "g", wait_ms=WAIT_MS)] == [kept]
    assert broker.pull(topic, "g", wait_ms=100) == []


def test_a_cancel_that_comes_after_the_due_time_is_too_late(broker: Broker, topic: str) -> None:
    sent = publish(broker, topic, deliver_at_ms=now_ms() - 1)
    assert len(broker.pull(topic, "g", wait_ms=WAIT_MS)) == 1

    assert broker.cancel([sent]) == ["too_late"]


def test_a_cancel_of_an_unknown_id_is_unknown_and_keeps_its_place(broker: Broker, topic: str) -> None:
    sent = publish(broker, topic, deliver_at_ms=now_ms() + HOUR_MS)

    assert broker.cancel([new_message_id(), sent, new_message_id()]) == ["unknown", "canceled", "unknown"]


def test_a_message_that_was_canceled_before_it_came_is_not_delivered(broker: Broker, topic: str) -> None:
    message_id = new_message_id()
    assert broker.cancel([message_id]) == ["unknown"]

    publish(broker, topic, deliver_at_ms=now_ms() + 50, message_id=message_id)
    kept = publish(broker, topic, deliver_at_ms=now_ms() + 60)

    assert [one.id for one in broker.pull(topic, "g", wait_ms=WAIT_MS)] == [kept]
    assert broker.pull(topic, "g", wait_ms=100) == []
