"""What every broker does with messages on their way in and out."""

from __future__ import annotations

import threading
import time
from enum import Enum

import pytest

from outbox_core import Broker, Message, PublishStatus
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.ids import new_message_id

WAIT_MS = 60_000
STORED, DUPLICATE, REJECTED = PublishStatus.STORED, PublishStatus.DUPLICATE, PublishStatus.REJECTED


def message(topic: str, body: bytes = b"body", **more: object) -> Message:
    return Message(**{"id": new_message_id(), "topic": topic, "body": body, **more})  # type: ignore[arg-type]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_messages_are_delivered_in_the_order_of_their_batch(broker: Broker, topic: str) -> None:
    batch = [message(topic, str(number).encode()) for number in range(50)]
    broker.publish(batch[:20])
    broker.publish(batch[20:])

    pulled = broker.pull(topic, "g", max_messages=30) + broker.pull(topic, "g", max_messages=30)

    assert [one.id for one in pulled] == [one.id for one in batch]
    assert [one.body for one in pulled] == [one.body for one in batch]


def test_each_message_of_a_batch_has_its_result_in_its_place(broker: Broker, topic: str) -> None:
    first, late, last = message(topic), message(topic, deliver_at_ms=now_ms() + 3 * 366 * 86_400_000), message(topic)
    broker.publish([last])

    results = broker.publish([first, late, last])

    assert [one.id for one in results] == [first.id, late.id, last.id]
    assert [one.status for one in results] == [STORED, REJECTED, DUPLICATE]


def test_a_batch_of_many_topics_keeps_its_results_in_order(broker: Broker, topic: str) -> None:
    batch = [message(f"{topic}.{number % 3}", str(number).encode()) for number in range(10)]

    results = broker.publish(batch)

    assert [one.id for one in results] == [one.id for one in batch]
    assert [one.body for one in broker.pull(f"{topic}.1", "g")] == [b"1", b"4", b"7"]


def test_a_topic_and_a_group_may_be_named_by_members_of_an_enum(broker: Broker, topic: str) -> None:
    class Names(str, Enum):  # noqa: UP042 - as people name their topics
        TOPIC = topic
        GROUP = "g"

    broker.publish([message(Names.TOPIC, b"1")])
    broker.publish([message(Names.TOPIC, b"2"), message(f"{topic}.other")])
    broker.publish([message(topic, b"3")])

    [first] = broker.pull(Names.TOPIC, Names.GROUP, max_messages=1)
    rest = broker.pull(topic, "g")

    assert [one.body for one in (first, *rest)] == [b"1", b"2", b"3"]
    assert {one.topic for one in (first, *rest)} == {topic}


def test_an_empty_batch_has_no_results(broker: Broker) -> None:
    assert broker.publish([]) == []


def test_a_batch_larger_than_one_request_is_stored_whole(broker: Broker, topic: str) -> None:
    batch = [message(topic, str(number).encode()) for number in range(2_500)]

    results = broker.publish(batch)

    assert [one.status for one in results] == [STORED] * 2_500
    pulled = [one.body for _ in range(3) for one in broker.pull(topic, "g", max_messages=1_000)]
    assert pulled == [one.body for one in batch]


def test_a_message_published_twice_is_delivered_once(broker: Broker, topic: str) -> None:
    twice = message(topic)

    results = broker.publish([twice, twice]) + broker.publish([twice])

    assert [one.status for one in results] == [STORED, DUPLICATE, DUPLICATE]
    assert len(broker.pull(topic, "g")) == 1
    assert broker.pull(topic, "g") == []


def test_a_delay_of_three_years_is_rejected_with_the_reason_and_nothing_else_is(broker: Broker, topic: str) -> None:
    far = message(topic, deliver_at_ms=now_ms() + 3 * 365 * 86_400_000)
    near = message(topic)

    rejected, stored = broker.publish([far, near])

    assert rejected.status is REJECTED
    assert rejected.error is not None
    assert "731 days" in rejected.error
    assert stored.status is STORED
    assert [one.id for one in broker.pull(topic, "g")] == [near.id]


def test_all_parts_of_a_message_arrive_as_they_were_sent(broker: Broker, topic: str) -> None:
    sent = message(
        topic,
        "Grüße, 你好, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🚀".encode(),
        key="schlüssel-🔑",
        headers={"content-type": "text/plain", "x-note": 'naïve 🚀 \t ,;="'},
        created_at_ms=1_700_000_000_123,
        deliver_at_ms=1_700_000_000_456,
    )
    broker.publish([sent])

    [got] = broker.pull(topic, "g")

    assert (got.id, got.topic, got.body, got.key) == (sent.id, sent.topic, sent.body, sent.key)
    assert dict(got.headers) == dict(sent.headers)
    assert (got.created_at_ms, got.deliver_at_ms, got.attempt) == (1_700_000_000_123, 1_700_000_000_456, 1)


@pytest.mark.parametrize(
    "body", [b"", b"\x00\xff\xfe\x80", bytes(range(256)) * 40, "🚀".encode(), b"\xed\xa0\x80", b'"\\\x7f\x01']
)
def test_any_bytes_are_a_body(broker: Broker, topic: str, body: bytes) -> None:
    broker.publish([message(topic, body)])

    [got] = broker.pull(topic, "g")

    assert got.body == body


def test_a_body_of_some_megabytes_arrives_whole(broker: Broker, topic: str) -> None:
    body = bytes(range(256)) * 4096 * 12

    broker.publish([message(topic, body), message(topic, b"small")])

    assert [one.body for one in broker.pull(topic, "g", wait_ms=WAIT_MS)] == [body, b"small"]


def test_a_message_without_a_creation_time_gets_one(broker: Broker, topic: str) -> None:
    before = now_ms()
    broker.publish([message(topic)])

    [got] = broker.pull(topic, "g")

    assert before <= got.created_at_ms <= now_ms()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a b", "ü", "a" * 256, "a\n", "a\x00"])
def test_a_name_that_could_be_a_path_is_refused(broker: Broker, topic: str, name: str) -> None:
    with pytest.raises(InvalidMessage):
        broker.pull(name, "g")
    with pytest.raises(InvalidMessage):
        broker.pull(topic, name)


def test_a_pull_that_finds_nothing_returns_at_once(broker: Broker, topic: str) -> None:
    start = time.monotonic()

    assert broker.pull(topic, "g") == []

    assert time.monotonic() - start < 30


def test_a_long_poll_that_finds_nothing_returns_when_its_time_is_over(broker: Broker, topic: str) -> None:
    start = time.monotonic()

    assert broker.pull(topic, "g", wait_ms=150) == []

    assert 0.14 <= time.monotonic() - start < 30


def test_a_long_poll_wakes_at_once_when_a_message_arrives(broker: Broker, topic: str) -> None:
    sent = message(topic)
    timer = threading.Timer(0.2, broker.publish, [[sent]])
    timer.start()
    start = time.monotonic()

    pulled = broker.pull(topic, "g", wait_ms=WAIT_MS)

    assert [one.id for one in pulled] == [sent.id]
    assert time.monotonic() - start < WAIT_MS / 2_000
    timer.join()


def test_a_long_poll_wakes_for_each_group_that_waits(broker: Broker, topic: str) -> None:
    found: dict[str, list[str]] = {}

    def wait(group: str) -> None:
        found[group] = [one.id for one in broker.pull(topic, group, wait_ms=20_000)]

    threads = [threading.Thread(target=wait, args=(f"g{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    sent = message(topic)
    broker.publish([sent])
    for thread in threads:
        thread.join(120)

    assert found == {f"g{number}": [sent.id] for number in range(4)}


def test_a_message_is_not_handed_to_two_consumers_of_a_group(broker: Broker, topic: str) -> None:
    ids = [message(topic).id for _ in range(200)]
    broker.publish([message(topic, id=one) for one in ids])
    pulled: list[str] = []

    def consume() -> None:
        while found := broker.pull(topic, "g", max_messages=7, invisible_ms=60_000):
            pulled.extend(one.id for one in found)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert sorted(pulled) == sorted(ids)


def test_each_of_two_groups_gets_every_message(broker: Broker, topic: str) -> None:
    batch = [message(topic) for _ in range(3)]
    broker.publish(batch)

    one, two = broker.pull(topic, "one"), broker.pull(topic, "two")
    broker.ack([delivery.receipt for delivery in one])

    assert [delivery.id for delivery in one] == [delivery.id for delivery in two] == [sent.id for sent in batch]
    assert set(broker.ack([delivery.receipt for delivery in two])) == {"acked"}
