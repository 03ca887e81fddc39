"""What every broker promises of an ordered group: one message of a key at a time, in order, and no other held up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox_core import Broker, Delivery, GroupConfig, Message
from outbox_core.messages.ids import new_message_id
from tests.broker_adapter.servers import Restartable


def publish(broker: Broker, topic: str, *keys: str | None) -> list[str]:
    batch = [Message(id=new_message_id(), topic=topic, body=b"x", key=key) for key in keys]
    broker.publish(batch)
    return [one.id for one in batch]


def ids_of(deliveries: list[Delivery]) -> list[str]:
    return [one.id for one in deliveries]


@pytest.fixture
def ordered(broker: Broker, topic: str) -> Broker:
    """A broker on whose topic the group `g` is ordered."""
    broker.admin.declare_group(topic, "g", GroupConfig(ordered=True, max_attempts=2))
    return broker


def test_messages_of_one_key_come_one_at_a_time_in_order(ordered: Broker, topic: str) -> None:
    a0, a1, b0, none0, a2, none1 = publish(ordered, topic, "a", "a", "b", None, "a", None)

    first = ordered.pull(topic, "g")
    assert ids_of(first) == [a0, b0, none0, none1]
    assert ordered.pull(topic, "g") == []

    for following in (a1, a2):
        ordered.ack([first[0].receipt])
        first = ordered.pull(topic, "g")
        assert ids_of(first) == [following]


def test_a_key_waits_for_a_message_that_was_given_back_and_other_keys_do_not(ordered: Broker, topic: str) -> None:
    a0, a1, b0, b1 = publish(ordered, topic, "a", "a", "b", "b")
    held = ordered.pull(topic, "g")
    assert ids_of(held) == [a0, b0]

    ordered.nack([held[0].receipt], delay_ms=0)
    ordered.ack([held[1].receipt])

    again = ordered.pull(topic, "g")
    assert ids_of(again) == [a0, b1]
    ordered.ack([one.receipt for one in again])
    assert ids_of(ordered.pull(topic, "g")) == [a1]


def test_an_invisible_time_that_runs_out_keeps_the_order(ordered: Broker, topic: str) -> None:
    a0, a1 = publish(ordered, topic, "a", "a")
    ordered.pull(topic, "g", invisible_ms=50)

    again = ordered.pull(topic, "g", wait_ms=60_000)

    assert (ids_of(again), again[0].attempt) == ([a0], 2)
    ordered.ack([again[0].receipt])
    assert ids_of(ordered.pull(topic, "g")) == [a1]


def test_a_dead_letter_lets_the_next_of_its_key_go_and_comes_back_outside_the_order(
    ordered: Broker, topic: str
) -> None:
    a0, a1, a2 = publish(ordered, topic, "a", "a", "a")
    for _ in range(2):
        ordered.nack([ordered.pull(topic, "g")[0].receipt], delay_ms=0)

    in_hand = ordered.pull(topic, "g")
    assert ids_of(in_hand) == [a1]
    assert ordered.admin.redrive(topic, "g") == 1
    assert ids_of(ordered.pull(topic, "g")) == [a0]

    ordered.ack([in_hand[0].receipt])
    assert ids_of(ordered.pull(topic, "g")) == [a2]


def test_a_long_poll_ends_when_the_message_before_is_settled(ordered: Broker, topic: str) -> None:
    _, a1 = publish(ordered, topic, "a", "a")
    [held] = ordered.pull(topic, "g")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ordered.pull, topic, "g", wait_ms=60_000)
        ordered.ack([held.receipt])
        assert ids_of(waiting.result(120)) == [a1]


def test_a_seek_begins_the_order_anew(ordered: Broker, topic: str) -> None:
    ids = publish(ordered, topic, "a", "a")
    ordered.ack([ordered.pull(topic, "g")[0].receipt])
    ordered.pull(topic, "g")

    ordered.admin.seek(topic, "g", to_offset=0)

    assert ids_of(ordered.pull(topic, "g")) == ids[:1]


def test_another_group_of_the_topic_is_not_held_up(ordered: Broker, topic: str) -> None:
    ids = publish(ordered, topic, "a", "a", "a")
    ordered.pull(topic, "g")

    assert ids_of(ordered.pull(topic, "plain")) == ids


def test_many_consumers_keep_the_order_of_every_key(ordered: Broker, topic: str) -> None:
    keys = ["a", "b", "a", "c", "a", "b", None] * 6
    numbers = {one: number for number, one in enumerate(publish(ordered, topic, *keys))}
    order: dict[str | None, list[int]] = {key: [] for key in keys}

    def consume() -> None:
        while sum(len(found) for found in order.values()) < len(keys):
            for one in ordered.pull(topic, "g", max_messages=3, wait_ms=50):
                order[one.key].append(numbers[one.id])
                ordered.ack([one.receipt])

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(consume) for _ in range(4)]:
            one.result(120)

    for key in ("a", "b", "c"):
        assert order[key] == [number for number, one in enumerate(keys) if one == key]


def test_the_order_survives_a_restart(restartable: Restartable, topic: str) -> None:
    broker = restartable.broker
    broker.admin.declare_group(topic, "g", GroupConfig(ordered=True))
    a0, a1, b0 = publish(broker, topic, "a", "a", "b")
    held = broker.pull(topic, "g")
    assert ids_of(held) == [a0, b0]

    restartable.restart()
    broker = restartable.broker

    assert broker.pull(topic, "g") == []
    broker.ack([held[0].receipt])
    assert ids_of(broker.pull(topic, "g")) == [a1]


def test_half_of_a_pull_is_of_keys_that_did_not_fail_while_others_are_tried_again(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(ordered=True, max_attempts=100))
    failed = set(publish(broker, topic, *(f"failing-{number}" for number in range(10))))
    held = broker.pull(topic, "g", max_messages=10)
    broker.nack([delivery.receipt for delivery in held], delay_ms=0)
    publish(broker, topic, *(f"failing-{number}" for number in range(10)))  # behind those, so not deliverable
    fresh = set(publish(broker, topic, *(f"fresh-{number}" for number in range(10))))

    pulled = [set(ids_of(broker.pull(topic, "g", max_messages=10))) for _ in range(2)]

    assert [(len(ids & failed), len(ids & fresh)) for ids in pulled] == [(5, 5), (5, 5)]


def test_a_pull_of_one_is_never_empty_because_only_retries_are_deliverable(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(ordered=True, max_attempts=100))
    [head, *_] = publish(broker, topic, "a", "a", "a")
    for _ in range(4):
        [delivery] = broker.pull(topic, "g", max_messages=1)
        broker.nack([delivery.receipt], delay_ms=0)
        assert delivery.id == head
