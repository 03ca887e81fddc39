"""What every broker does with messages that are for later."""

from __future__ import annotations

import time
from collections.abc import Iterator

from outbox_core import Broker, Message
from outbox_core.messages.ids import new_message_id
from tests.broker_adapter.conformance.scheduled_order import in_order, scheduled

WAIT_MS = 60_000
HOUR_MS = 3_600_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def publish(broker: Broker, topic: str, *, deliver_at_ms: int, message_id: str | None = None) -> str:
    message = Message(id=message_id or new_message_id(), topic=topic, body=b"later", deliver_at_ms=deliver_at_ms)
    [result] = broker.publish([message])
    assert result.status == "stored", result
    return message.id


def places(topic: str) -> Iterator[tuple[str, int]]:
    """Fresh topics with due times that are ever further away, for a test that has to do something before the due time.

    A busy machine may not come to it in time: then the test does it once more in the next place.
    """
    for number, lead_ms in enumerate((500, 5_000, 50_000)):
        yield f"{topic}.{number}", now_ms() + lead_ms


def test_a_due_time_in_the_past_means_now(broker: Broker, topic: str) -> None:
    sent = publish(broker, topic, deliver_at_ms=now_ms() - 1_000)

    assert [one.id for one in broker.pull(topic, "g")] == [sent]


def test_a_scheduled_message_wakes_a_long_poll_at_its_time_and_not_before(broker: Broker, topic: str) -> None:
    deliver_at_ms = now_ms() + 250
    publish(broker, topic, deliver_at_ms=deliver_at_ms)

    [got] = broker.pull(topic, "g", wait_ms=WAIT_MS)

    assert now_ms() >= deliver_at_ms
    assert now_ms() < deliver_at_ms + WAIT_MS // 2  # woken, not at the end of its wait
    assert got.deliver_at_ms == deliver_at_ms


def test_scheduled_messages_come_in_the_order_of_their_times(broker: Broker, topic: str) -> None:
    for place, base in places(topic):
        ids = [publish(broker, place, deliver_at_ms=base + offset) for offset in (80, 0, 40)]
        if now_ms() < base:
            break

    pulled: list[str] = []
    while len(pulled) < 3:
        found = broker.pull(place, "g", wait_ms=WAIT_MS)
        assert found
        pulled += [one.id for one in found]

    assert pulled == [ids[1], ids[2], ids[0]]


def test_a_message_for_much_later_is_stored_and_not_delivered(broker: Broker, topic: str) -> None:
    publish(broker, topic, deliver_at_ms=now_ms() + 730 * 24 * HOUR_MS)

    assert broker.pull(topic, "g", wait_ms=50) == []
    assert broker.admin.figures(topic)["scheduled"] == 1


def test_a_canceled_message_is_never_delivered(broker: Broker, topic: str) -> None:
    for place, deliver_at_ms in places(topic):
        gone = publish(broker, place, deliver_at_ms=deliver_at_ms)
        kept = publish(broker, place, deliver_at_ms=deliver_at_ms)
        first, second = broker.cancel([gone]), broker.cancel([gone])
        if now_ms() < deliver_at_ms:
            break

    assert (first, second) == (["canceled"], ["canceled"])
    assert [one.id for one in broker.pull(place, "g", wait_ms=WAIT_MS)] == [kept]
    assert broker.pull(place, "g", wait_ms=100) == []


def test_a_cancel_that_comes_after_the_due_time_is_too_late(broker: Broker, topic: str) -> None:
    sent = publish(broker, topic, deliver_at_ms=now_ms() - 1)
    assert len(broker.pull(topic, "g", wait_ms=WAIT_MS)) == 1

    assert broker.cancel([sent]) == ["too_late"]


def test_a_cancel_of_an_unknown_id_is_unknown_and_keeps_its_place(broker: Broker, topic: str) -> None:
    sent = publish(broker, topic, deliver_at_ms=now_ms() + HOUR_MS)

    assert broker.cancel([new_message_id(), sent, new_message_id()]) == ["unknown", "canceled", "unknown"]


def test_a_message_that_was_canceled_before_it_came_is_not_delivered(broker: Broker, topic: str) -> None:
    for place, deliver_at_ms in places(topic):
        message_id = new_message_id()
        assert broker.cancel([message_id]) == ["unknown"]
        publish(broker, place, deliver_at_ms=deliver_at_ms, message_id=message_id)
        if now_ms() < deliver_at_ms:
            break

    kept = publish(broker, place, deliver_at_ms=deliver_at_ms + 10)

    assert [one.id for one in broker.pull(place, "g", wait_ms=WAIT_MS)] == [kept]
    assert broker.pull(place, "g", wait_ms=100) == []


def test_scheduled_messages_come_by_due_time_then_in_the_order_in_which_they_were_published(
    broker: Broker, topic: str
) -> None:
    for place, base_ms in places(topic):
        batches = scheduled(place, base_ms=base_ms)
        for batch in batches:
            broker.publish(batch)
        if now_ms() < base_ms:
            break

    pulled: list[str] = []
    while len(pulled) < len(in_order(batches)):
        deliveries = broker.pull(place, "g", max_messages=70, wait_ms=WAIT_MS)
        broker.ack([delivery.receipt for delivery in deliveries])
        pulled += [delivery.id for delivery in deliveries]
    assert pulled == in_order(batches)
