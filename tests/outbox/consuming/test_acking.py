"""Acks go beside the handling: they hold up nobody, at most one of a worker is on its way, and a stop waits for it.

What is handled meanwhile goes with the next one, which waits for company where messages come that fast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from outbox import consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.consumers.consumer_runner import RunnerTimes
from outbox.consumers.delivery_settler import AckSender
from outbox.consumers.in_flight import InFlightDelivery
from outbox.testing import AdvancingClock
from outbox_core import AckStatus, Clock, Delivery, SystemClock
from outbox_core.runtime.logs import event_name
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, delivery, message

CHILD = "tests.outbox.consuming.hanging_ack_consumer"
Running = Callable[..., ConsumerRunner]
INVISIBLE_MS = 60_000
LINGER_MS = 1_000 * 4 * WAIT_SECONDS
LONG_LINGER = RunnerTimes(ack_linger_ms=LINGER_MS)


class SlowToAck(WatchedBroker):
    """Its acks take until the test lets them through; the first of them may end in a defect."""

    def __init__(self, folder: Path, *, clock: Clock) -> None:
        super().__init__(folder, clock=clock)
        self.let_through = threading.Event()
        self.came = threading.Semaphore(0)
        self.defect = False

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        self.came.release()
        assert self.let_through.wait(WAIT_SECONDS)
        if self.defect:
            self.defect = False
            raise RuntimeError("a defect")
        return super().ack(receipts)


@pytest.fixture
def watched(tmp_path: Path, ahead: AdvancingClock) -> Iterator[SlowToAck]:
    """Also what `running` runs on."""
    broker = SlowToAck(tmp_path / "slow", clock=ahead)
    yield broker
    broker.close()


def test_the_next_message_is_pulled_and_handled_while_an_ack_is_on_its_way_and_none_behind_it(
    watched: SlowToAck, running: Running
) -> None:
    handled: list[str] = []

    def handle(one: Delivery) -> None:
        handled.append(one.id)
        watched.tell()

    watched.publish([message(number) for number in range(1, 5)])
    running(consumer("orders", group="g", prefetch=1)(handle))
    watched.wait_for(lambda: len(handled) == 2)
    figures = watched.admin.figures("orders", "g")

    assert handled == ["m-1", "m-2"]
    assert (figures["in_flight"], figures["backlog"]) == (2, 2), "two batches in hand, and no more"
    watched.let_through.set()
    watched.wait_for(lambda: watched.acked == 4)
    assert handled == [f"m-{number}" for number in range(1, 5)]


def handle_behind_an_ack(
    watched: SlowToAck, running: Running, *, count: int, prefetch: int, **options: Any
) -> ConsumerRunner:
    """One message is being acknowledged, and so many more were handled meanwhile."""
    handled: list[str] = []

    def handle(one: Delivery) -> None:
        handled.append(one.id)
        watched.tell()

    watched.publish([message()])
    runner = running(consumer("orders", group="g", prefetch=prefetch)(handle), **options)
    assert watched.came.acquire(timeout=WAIT_SECONDS)
    watched.publish([message(number) for number in range(2, count + 2)])
    watched.wait_for(lambda: len(handled) == count + 1)
    return runner


def test_what_is_handled_while_an_ack_is_on_its_way_goes_together_with_the_next(
    watched: SlowToAck, running: Running
) -> None:
    handle_behind_an_ack(watched, running, count=4, prefetch=10, times=RunnerTimes(ack_delay_ms=60_000))

    watched.let_through.set()
    watched.wait_for(lambda: watched.acked == 5)

    assert [len(statuses) for statuses in watched.acks] == [1, 4]


def test_a_batch_s_worth_of_acks_waits_for_no_more_company(watched: SlowToAck, running: Running) -> None:
    handle_behind_an_ack(watched, running, count=2, prefetch=2, times=LONG_LINGER)

    watched.let_through.set()
    watched.wait_for(lambda: watched.acked == 3)

    assert [len(statuses) for statuses in watched.acks] == [1, 2]


def test_a_stop_sends_what_waits_for_company(watched: SlowToAck, running: Running) -> None:
    runner = handle_behind_an_ack(watched, running, count=2, prefetch=10, times=LONG_LINGER)

    watched.let_through.set()

    assert runner.stop(timeout_seconds=WAIT_SECONDS)
    assert [len(statuses) for statuses in watched.acks] == [1, 2]


class NotingWaits(SystemClock):
    """A clock that notes when the thread of the acks waits, and when another one does."""

    def __init__(self) -> None:
        self.acks_wait = threading.Event()
        self.waits = threading.Event()

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        (self.acks_wait if threading.current_thread().name == "acks" else self.waits).set()
        return super().wait(condition, timeout_ms)


def test_an_ack_waits_for_company_only_where_messages_come_while_one_is_on_its_way() -> None:
    sent, clock = SimpleQueue[int](), NotingWaits()

    def ack(done: Sequence[InFlightDelivery]) -> None:
        clock.acks_wait.clear()
        sent.put(len(done))

    acks = AckSender(ack, name="acks", ahead_max=10, ack_linger_ms=LINGER_MS, clock=clock)

    for number in (1, 2):
        acks.put([held(number)])
        assert sent.get(timeout=WAIT_SECONDS) == 1
        assert clock.acks_wait.wait(WAIT_SECONDS)  # the ack is on its way no more
    acks.end()


def test_the_first_of_a_batch_wait_for_the_others_and_go_with_the_last() -> None:
    sent, clock = SimpleQueue[int](), NotingWaits()
    acks = AckSender(lambda done: sent.put(len(done)), name="acks", ahead_max=10, clock=clock)

    for number in (1, 2):
        acks.put([held(number)], wait_ms=LINGER_MS)
    assert clock.acks_wait.wait(WAIT_SECONDS)
    acks.put([held(3)])

    assert sent.get(timeout=WAIT_SECONDS) == 3
    acks.end()


def test_who_is_ahead_of_its_acks_by_more_than_a_batch_waits_for_them() -> None:
    let_through, clock = threading.Event(), NotingWaits()
    acks = AckSender(lambda _done: assert_told(let_through), name="acks", ahead_max=2, clock=clock)
    done = [held(number) for number in range(3)]

    acks.put(done[:2])
    waited_for_two = clock.waits.is_set()
    third = threading.Thread(target=acks.put, args=(done[2:],))
    third.start()
    waited_for_three = clock.waits.wait(WAIT_SECONDS)
    let_through.set()
    third.join(WAIT_SECONDS)
    acks.end()

    assert (waited_for_two, waited_for_three, third.is_alive()) == (False, True, False)


def assert_told(event: threading.Event) -> None:
    assert event.wait(WAIT_SECONDS)


def held(number: int) -> InFlightDelivery:
    made = consumer("orders", group="g")(lambda _one: None)
    return InFlightDelivery(consumer=made, delivery=delivery(number), since_ms=0, until_ms=1, extend_at_ms=1)


def test_a_stop_waits_for_the_ack_on_its_way(watched: SlowToAck, running: Running) -> None:
    watched.publish([message()])
    runner = running(consumer("orders", group="g")(lambda _one: None))
    assert watched.came.acquire(timeout=WAIT_SECONDS)

    in_time = runner.stop(timeout_seconds=0.1)
    watched.let_through.set()

    assert not in_time
    assert runner.stop(timeout_seconds=WAIT_SECONDS)
    assert watched.acked == 1


def test_an_ack_that_meets_a_defect_is_told_and_its_messages_come_back(
    watched: SlowToAck, running: Running, ahead: AdvancingClock, caplog: pytest.LogCaptureFixture
) -> None:
    watched.defect = True
    watched.let_through.set()
    handled: list[str] = []
    watched.publish([message(1)])

    running(consumer("orders", group="g", prefetch=1, invisible_ms=INVISIBLE_MS)(lambda one: handled.append(one.id)))
    assert watched.came.acquire(timeout=WAIT_SECONDS)
    watched.publish([message(2)])  # not before, else one ack may be for both
    watched.wait_for(lambda: watched.acked == 1)
    watched.wait_while_time_passes(lambda: watched.acked == 2, ahead, INVISIBLE_MS)

    assert sorted(handled) == ["m-1", "m-1", "m-2"]
    assert "consumer_failed" in [event_name(record) for record in caplog.records]


@pytest.mark.processes
def test_a_process_whose_stop_ran_out_of_time_ends_though_its_ack_hangs(tmp_path: Path) -> None:
    broker = WatchedBroker(tmp_path / "data")
    broker.publish([message()])
    broker.close()

    ended = fork_server().run(CHILD, str(tmp_path / "data"), env=environment())

    assert (ended.returncode, ended.stdout) == (0, "stopped in time: False\n"), ended.stderr
