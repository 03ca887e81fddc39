"""Broadcast consumers: each process gets all, in order; what fails is tried where it stands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.temporary_broker import TemporaryBroker
from outbox import Consumer, RetryLater, consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.consumers.consumer_runner import PULL_WAIT_MS, RunnerTimes
from outbox_broker.common.engine_options import EngineOptions
from outbox_core import Delivery, ManualClock
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, NotSupported
from outbox_core.messages.limits import ATTEMPTS_MAX_DEFAULT
from outbox_core.runtime.logs import event_name
from tests.outbox.shop import Shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, message
from tests.outbox_broker.message_log import message_segments

POLL_SECONDS = 0.01
Running = Callable[..., ConsumerRunner]
SHORT = RunnerTimes(broadcast_retries=Backoff(initial_ms=1, max_ms=2))


def stop(runner: ConsumerRunner, clock: ManualClock) -> None:
    """Stop it though it waits for messages, by letting the time of its read pass."""
    stopping = threading.Thread(target=runner.stop, kwargs={"timeout_seconds": WAIT_SECONDS})
    stopping.start()
    while stopping.is_alive():
        clock.advance(PULL_WAIT_MS)
        stopping.join(POLL_SECONDS)


class Told:
    """What handlers were given, to wait for."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._changed = threading.Condition()

    def note(self, one: Delivery) -> None:
        with self._changed:
            self.ids.append(f"{one.id}/{one.attempt}")
            self._changed.notify_all()

    def wait_until_last(self, last: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ids[-1:] == [last], WAIT_SECONDS), self.ids

    def wait_for(self, *ids: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ids == list(ids), WAIT_SECONDS), self.ids


def begun(watched: WatchedBroker, running: Running, handler: Callable[..., object], **options: Any) -> ConsumerRunner:
    """A runner that has read once: from here on it gets everything."""
    before = watched.begun
    runner = running(consumer("orders", group="cache", **{"broadcast": True, **options})(handler), times=SHORT)
    watched.wait_for(lambda: watched.begun > before)
    return runner


def test_each_of_two_gets_every_message_that_comes_after_its_start(watched: WatchedBroker, running: Running) -> None:
    one, other = Told(), Told()
    watched.publish([message(1)])
    begun(watched, running, one.note)
    watched.publish([message(2)])
    one.wait_for("m-2/1")
    begun(watched, running, other.note)

    watched.publish([message(3), message(4)])

    one.wait_for("m-2/1", "m-3/1", "m-4/1")
    other.wait_for("m-3/1", "m-4/1")


def test_from_the_earliest_all_that_is_kept_comes(watched: WatchedBroker, running: Running) -> None:
    told = Told()
    watched.publish([message(1), message(2)])

    runner = begun(watched, running, told.note, broadcast="earliest", prefetch=1)

    told.wait_for("m-1/1", "m-2/1")
    watched.publish([message(3)])
    told.wait_for("m-1/1", "m-2/1", "m-3/1")
    watched.wait_for(lambda: runner.figures.handled == 3)  # counted after the handler has returned


def test_what_fails_is_tried_again_before_anything_behind_it(watched: WatchedBroker, running: Running) -> None:
    told = Told()

    def handle(one: Delivery) -> None:
        told.note(one)
        if one.id == "m-1" and one.attempt == 1:
            raise KeyError("x")
        if one.id == "m-1" and one.attempt == 2:
            raise RetryLater(delay_ms=1)

    runner = begun(watched, running, handle)
    watched.publish([message(1), message(2)])

    told.wait_for("m-1/1", "m-1/2", "m-1/3", "m-2/1")
    assert runner.figures.failed == 2


def test_what_always_fails_is_given_up_and_told(
    watched: WatchedBroker, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()

    def handle(one: Delivery) -> None:
        told.note(one)
        if one.id == "m-1":
            raise GeneratorExit

    runner = begun(watched, running, handle)
    watched.publish([message(1), message(2)])

    told.wait_for(*(f"m-1/{number + 1}" for number in range(ATTEMPTS_MAX_DEFAULT)), "m-2/1")
    assert (runner.figures.given_up, runner.figures.failed) == (1, ATTEMPTS_MAX_DEFAULT)
    assert "broadcast_given_up" in [event_name(record) for record in caplog.records]


def test_an_outage_of_the_broker_costs_no_message(watched: WatchedBroker, running: Running) -> None:
    told = Told()
    begun(watched, running, told.note)
    watched.read_fails = [BrokerUnavailable("down"), BrokerUnavailable("down")]

    watched.publish([message(1)])

    told.wait_for("m-1/1")


def test_a_consumer_stops_although_its_message_fails_and_waits(watched: WatchedBroker, running: Running) -> None:
    told = Told()

    def handle(one: Delivery) -> None:
        told.note(one)
        raise RetryLater(delay_ms=60_000)

    runner = begun(watched, running, handle)
    watched.publish([message(1)])
    told.wait_for("m-1/1")

    assert runner.stop(timeout_seconds=WAIT_SECONDS)
    assert told.ids == ["m-1/1"]


def test_an_async_handler_gets_all_as_well(watched: WatchedBroker, running: Running) -> None:
    told = Told()

    async def handle(one: Delivery) -> None:
        told.note(one)

    begun(watched, running, handle)
    watched.publish([message(1)])

    told.wait_for("m-1/1")


def test_where_the_broker_lost_its_messages_it_begins_as_it_began_and_says_so(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    told, broker = Told(), TemporaryBroker(clock=clock)
    one = consumer("orders", group="cache", broadcast="earliest")(told.note)
    with closing(broker), ConsumerRunner([one], broker=broker, clock=clock, times=SHORT) as runner:
        broker.publish([message(1), message(2)])
        told.wait_for("m-1/1", "m-2/1")

        broker.clear()
        broker.publish([message(3)])

        told.wait_for("m-1/1", "m-2/1", "m-3/1")
        stop(runner, clock)
    assert "broadcast_begun_anew" in [event_name(record) for record in caplog.records]


def test_what_retention_dropped_before_it_came_to_it_is_told(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    options = EngineOptions(segment_bytes=4096, retention_ms=1_000, retention_check_ms=1_000)
    broker = EmbeddedBroker(f"embedded:{tmp_path / 'data'}", clock=clock, options=options)
    told, free, stopped = Told(), threading.Event(), threading.Event()

    def handle(one: Delivery) -> None:
        told.note(one)
        assert free.wait(WAIT_SECONDS)

    broker.publish([message(0)])
    one = consumer("orders", group="cache", broadcast="earliest", prefetch=1)(handle)
    with closing(broker), ConsumerRunner([one], broker=broker, clock=clock, times=SHORT) as runner:
        told.wait_for("m-0/1")
        for number in range(1, 40):
            broker.publish([message(number, body=bytes(1_000))])
        dropped, *_, active = message_segments(tmp_path / "data")
        clock.advance(1_000)
        while dropped.exists():  # a check of retention may have begun before
            clock.advance(1_000)
            stopped.wait(POLL_SECONDS)
        assert active.exists()
        broker.publish([message(40)])
        free.set()
        told.wait_until_last("m-40/1")
        stop(runner, clock)

    missed = 41 - len(told.ids)
    assert missed > 0
    assert [record.messages for record in caplog.records if event_name(record) == "broadcast_missed"] == [missed]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "because"),
    [({"workers": 2}, "one worker"), ({"broadcast": "middle"}, "earliest")],
)
def test_what_a_broadcast_consumer_cannot_have_is_refused(options: dict[str, Any], because: str) -> None:
    with pytest.raises(ConfigurationError, match=because):
        consumer("orders", group="cache", **{"broadcast": True, **options})


def test_an_inbox_is_refused_since_all_would_share_it(sqlite_shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="no inbox"):
        consumer("orders", group="cache", broadcast=True, inbox=sqlite_shop.engine)


def test_a_broker_that_cannot_be_read_is_refused(watched: WatchedBroker) -> None:
    class Groups:
        """A broker of groups alone."""

    one: Consumer = consumer("orders", group="cache", broadcast=True)(print)

    with pytest.raises(NotSupported, match="without a group"):
        ConsumerRunner([one], broker=Groups())  # type: ignore[arg-type]
