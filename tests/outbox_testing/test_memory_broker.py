"""The in-memory broker: what tests may do with it beyond what every broker does (see tests/broker_adapter)."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from datetime import timedelta
from random import Random

import pytest

from broker_adapter.embedded import EmbeddedBroker
from outbox.testing import AdvancingClock, MemoryBroker, MemoryLimits
from outbox_core import Broker, GroupConfig, Message
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import BrokerRefused, BrokerUnavailable, ConfigurationError, StorageFailed
from outbox_core.messages.ids import new_message_id
from tests.outbox_testing.side_by_side import SideBySide

HOUR_MS = 3_600_000
WAIT_SECONDS = 300


def message(topic: str = "t", body: bytes = b"x", *, deliver_at_ms: int | None = None) -> Message:
    return Message(id=new_message_id(), topic=topic, body=body, deliver_at_ms=deliver_at_ms)


def bodies(broker: Broker, topic: str = "t", group: str = "g", *, wait_ms: int = 0) -> list[bytes]:
    deliveries = broker.pull(topic, group, wait_ms=wait_ms)
    broker.ack([one.receipt for one in deliveries])
    return [one.body for one in deliveries]


def test_it_is_a_broker() -> None:
    assert isinstance(MemoryBroker(), Broker)


def test_a_scheduled_message_falls_due_when_the_clock_is_put_forward_and_not_before(clock: ManualClock) -> None:
    broker = MemoryBroker(clock=clock)
    broker.publish([message(body=b"later", deliver_at_ms=clock.now_ms() + 2 * HOUR_MS), message(body=b"now")])

    early = bodies(broker)
    clock.advance(2 * HOUR_MS - 1)
    still_early = bodies(broker)
    clock.advance(1)

    assert (early, still_early, bodies(broker)) == ([b"now"], [], [b"later"])


def test_putting_the_clock_forward_wakes_every_long_poll() -> None:
    clock = AdvancingClock()
    broker = MemoryBroker(clock=clock)
    due_at_ms = clock.now_ms() + 24 * HOUR_MS
    broker.publish([message(body=b"tomorrow", deliver_at_ms=due_at_ms)])
    found: dict[str, list[bytes]] = {}

    def poll(group: str) -> None:
        while not found.get(group):
            found[group] = bodies(broker, group=group, wait_ms=60_000)

    threads = [threading.Thread(target=poll, args=(group,)) for group in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    clock.advance(timedelta(days=1))
    for thread in threads:
        thread.join(WAIT_SECONDS)

    assert found == {group: [b"tomorrow"] for group in ("a", "b", "c")}


def test_time_that_is_put_forward_ends_invisible_times_and_backoffs(clock: ManualClock) -> None:
    broker = MemoryBroker(clock=clock)
    broker.admin.declare_group("t", "g", GroupConfig(max_attempts=2, backoff_initial_ms=60_000))
    broker.publish([message()])
    [first] = broker.pull("t", "g")
    broker.nack([first.receipt])

    assert bodies(broker) == []
    clock.advance(60_000)
    [second] = broker.pull("t", "g", invisible_ms=5_000)
    assert second.attempt == 2
    clock.advance(5_000)
    assert bodies(broker) == []

    [letter], _ = broker.admin.dead("t", "g")
    assert (letter.id, letter.attempts) == (first.id, 2)


def test_all_who_name_a_broker_share_it_as_long_as_one_of_them_lives() -> None:
    name = f"memory://shop-{new_message_id()}"
    one, two = MemoryBroker(name), MemoryBroker(name)
    one.publish([message(body=b"shared")])
    one.close()
    del one

    shared = bodies(two)
    del two
    gc.collect()

    assert shared == [b"shared"]
    assert bodies(MemoryBroker(name)) == []


def test_brokers_without_a_name_are_each_their_own() -> None:
    one, two = MemoryBroker(), MemoryBroker("memory://")
    one.publish([message()])

    assert bodies(two) == []


@pytest.mark.parametrize("url", ["memory:x", "memory://a/b", "memory://a?x=1", "redis://a"])
def test_a_url_that_names_no_such_broker_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="memory://NAME"):
        MemoryBroker(url)


def test_it_takes_no_more_than_its_bounds_and_says_the_cure() -> None:
    broker = MemoryBroker(limits=MemoryLimits(messages_max=2, bytes_max=10, topics_max=1))
    broker.publish([message(), message()])

    with pytest.raises(StorageFailed, match=r"clear\(\)"):
        broker.publish([message()])
    broker.clear()
    with pytest.raises(StorageFailed, match="bytes"):
        broker.publish([message(body=b"x" * 11)])
    broker.publish([message(topic="one")])
    with pytest.raises(BrokerRefused, match="topics"):
        broker.publish([message(topic="two")])


def test_an_id_is_known_as_long_as_it_is_among_the_newest() -> None:
    broker = MemoryBroker(limits=MemoryLimits(dedup_ids_max=2))
    sent = [message(), message(), message()]
    broker.publish(sent)

    again = broker.publish([sent[1], sent[0]])

    assert [one.status for one in again] == ["duplicate", "stored"]


def test_the_id_of_a_scheduled_message_is_known_until_it_is_due() -> None:
    broker = MemoryBroker(limits=MemoryLimits(dedup_ids_max=1))
    later = message(deliver_at_ms=broker.clock.now_ms() + HOUR_MS)
    broker.publish([later, message(), message()])

    assert [one.status for one in broker.publish([later])] == ["duplicate"]


def test_what_its_sender_changes_later_does_not_reach_consumers() -> None:
    headers = {"a": "1"}
    broker = MemoryBroker()
    broker.publish([Message(id="m", topic="t", body=b"", headers=headers)])
    headers["a"] = "2"

    [delivery] = broker.pull("t", "g")

    assert dict(delivery.headers) == {"a": "1"}


def test_out_of_service_every_call_fails_and_a_long_poll_ends() -> None:
    broker = MemoryBroker()
    broker.publish([message(body=b"kept")])
    ended = threading.Event()

    def poll() -> None:
        with suppress(BrokerUnavailable):
            broker.pull("nothing", "g", wait_ms=60_000)
        ended.set()

    thread = threading.Thread(target=poll)
    thread.start()
    with broker.out_of_service():
        assert ended.wait(WAIT_SECONDS)
        with pytest.raises(BrokerUnavailable):
            broker.publish([message()])
        with pytest.raises(BrokerUnavailable):
            broker.admin.topics()
    thread.join(WAIT_SECONDS)

    assert bodies(broker) == [b"kept"]


def test_closed_it_ends_its_polls_and_refuses_to_be_used() -> None:
    broker = MemoryBroker()

    def poll() -> None:
        with suppress(ConfigurationError):  # where it comes too late
            broker.pull("t", "g", wait_ms=60_000)

    thread = threading.Thread(target=poll)
    thread.start()
    broker.close()
    broker.close()
    thread.join(WAIT_SECONDS)

    assert not thread.is_alive()
    with pytest.raises(ConfigurationError, match="closed"):
        broker.publish([message()])


def test_it_does_what_the_projects_broker_does_whatever_is_asked(
    tmp_path_factory: pytest.TempPathFactory, random_seed: int
) -> None:
    clock = ManualClock()
    engine = EmbeddedBroker(f"embedded:{tmp_path_factory.mktemp('data')}", clock=clock)
    pair = SideBySide(engine, MemoryBroker(clock=clock), clock=clock, random=Random(random_seed))

    for _ in range(600):
        pair.step()
    engine.close()

    assert pair.steps > 500
    assert pair.handed_out > 20
