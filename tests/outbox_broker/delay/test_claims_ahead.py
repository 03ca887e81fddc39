"""Messages that are claimed before they are due: never early, in order, and again after a takeover."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from outbox_broker.delay_service.target_publisher import PARKED_AGAIN_MS
from outbox_broker.schedule.delay_store import DelayStore, TimedMessage
from outbox_broker.schedule.schedule_runner import DeliveryOutcome, ScheduleRunner
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import BrokerUnavailable
from tests.outbox_broker.delay.conftest import NOW_MS, Opened, flush, put, recorded, timed

AHEAD_MS = 50


class Target:
    """Notes at what time which messages came, and refuses what it is told."""

    def __init__(self, clock: ManualClock) -> None:
        self.came: list[tuple[int, list[str]]] = []
        self.refuses: set[str] = set()
        self.errors: list[Exception] = []
        self._clock = clock

    @property
    def ids(self) -> list[str]:
        return [one for _, ids in self.came for one in ids]

    def __call__(self, batch: Sequence[TimedMessage]) -> DeliveryOutcome:
        assert all(one.due_ms <= self._clock.now_ms() for one in batch), "early"
        if self.errors:
            raise self.errors.pop(0)
        self.came.append((self._clock.now_ms() - NOW_MS, [one.id for one in batch]))
        again_at_ms = self._clock.now_ms() + PARKED_AGAIN_MS
        refused = [structs.replace(one, due_ms=again_at_ms) for one in batch if one.id in self.refuses]
        return DeliveryOutcome(again=refused)


class Turned:
    """A service that is turned by hand, on a schedule that can be opened again."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.clock = ManualClock(NOW_MS)
        self.target = Target(self.clock)
        self.restart()

    def restart(self, **options: int) -> None:
        self.schedule: DelayStore = self.opened.open(**options)
        self.service = ScheduleRunner(
            self.schedule, deliver=self.target, clock=self.clock, claim_ahead_ms=AHEAD_MS
        )  # fmt: skip

    def put(self, **ahead_ms: int) -> None:
        put(self.schedule, self.clock.now_ms(), *(timed(name, NOW_MS + ms) for name, ms in ahead_ms.items()))

    def until(self, ms: int) -> None:
        """Turn for as long as the service says, up to a time."""
        while True:
            while (pause_ms := self.service.turn()) == 0:
                pass
            left_ms = NOW_MS + ms - self.clock.now_ms()
            if left_ms <= 0:
                return
            self.clock.advance(min(pause_ms, left_ms))

    def in_flight(self) -> int:
        return len(recorded(self.opened).hand_outs)


@pytest.fixture
def turned(opened: Opened) -> Turned:
    return Turned(opened)


def test_what_is_claimed_ahead_comes_when_it_is_due_each_at_its_time(turned: Turned) -> None:
    turned.put(a=100, b=110, c=120, d=400)

    turned.until(99)
    assert turned.in_flight() == 1
    assert turned.target.came == []
    turned.until(1_000)

    assert turned.target.came == [(100, ["a"]), (110, ["b"]), (120, ["c"]), (400, ["d"])]
    assert turned.in_flight() == 0
    assert turned.service.lateness.worst_ms == 0


def test_a_cancel_wins_until_the_claim_and_is_too_late_after_it(turned: Turned) -> None:
    turned.put(a=100, b=101)
    turned.until(100 - AHEAD_MS - 1)
    assert turned.schedule.cancel(["a"], now_ms=turned.clock.now_ms()) == ["canceled"]

    turned.until(99)

    assert turned.schedule.cancel(["b"], now_ms=turned.clock.now_ms()) == ["too_late"]
    turned.until(200)
    assert turned.target.ids == ["b"]


def test_what_is_scheduled_after_a_claim_and_due_before_it_comes_first(turned: Turned) -> None:
    turned.put(a=100, z=120)
    turned.until(80)
    turned.put(soon=90, between=110, now=0)

    turned.until(200)

    assert turned.target.came == [(80, ["now"]), (90, ["soon"]), (100, ["a"]), (110, ["between"]), (120, ["z"])]


def test_messages_of_several_claims_that_are_late_come_in_order_of_their_due_times(turned: Turned) -> None:
    turned.put(a=100, c=120)
    turned.until(80)
    turned.put(b=110, d=121)
    turned.until(81)
    turned.clock.advance(500)

    turned.until(600)

    assert turned.target.came[0] == (581, ["a", "b", "c", "d"])


def test_a_batch_that_was_claimed_ahead_is_not_early_after_a_restart(turned: Turned) -> None:
    turned.put(a=100, b=120)
    turned.until(90)
    assert turned.in_flight() == 1
    turned.clock.step_wall(-60)
    turned.restart()

    turned.until(500)

    assert [ids for _, ids in turned.target.came] == [["a"], ["b"]]
    assert turned.in_flight() == 0


def test_a_batch_of_which_a_part_was_delivered_comes_whole_after_a_kill(turned: Turned) -> None:
    turned.put(a=100, b=120)
    turned.until(110)
    turned.restart()

    turned.until(500)

    assert turned.target.ids == ["a", "a", "b"]


def test_of_a_batch_of_which_a_part_was_delivered_only_the_rest_comes_after_a_stop(turned: Turned) -> None:
    turned.put(a=100, b=101, c=120, d=140)
    turned.target.refuses = {"a"}
    turned.until(110)
    turned.target.refuses = set()

    turned.service.stop()

    assert turned.in_flight() == 1
    assert turned.schedule.cancel(["c"], now_ms=turned.clock.now_ms()) == ["too_late"]
    for _ in range(2):  # what was settled is in the checkpoint, too
        turned.restart()
    turned.until(500)
    assert turned.target.came == [(100, ["a"]), (101, ["b"]), (120, ["c"]), (140, ["d"])]
    assert turned.in_flight() == 0
    turned.until(500 + PARKED_AGAIN_MS)
    assert turned.target.ids == ["a", "b", "c", "d", "a"]


def test_a_service_that_was_stopped_amid_a_batch_goes_on_with_it_when_it_is_started_again(turned: Turned) -> None:
    turned.put(a=100, b=101, c=120)
    turned.target.refuses = {"a"}
    turned.until(110)
    turned.target.refuses = set()

    for _ in range(2):
        turned.service.stop()
    turned.until(500 + PARKED_AGAIN_MS)

    assert turned.target.ids == ["a", "b", "c", "a"]
    assert turned.in_flight() == 0


def test_a_burst_is_claimed_in_a_few_batches_and_delivered_whole_and_once(turned: Turned) -> None:
    turned.restart(batch_messages_max=10)
    names = [f"m{number:03}" for number in range(200)]
    turned.put(**dict.fromkeys(names, 300))
    flush(turned.schedule, NOW_MS)

    turned.until(299)
    assert 1 <= turned.in_flight() <= 3
    turned.until(400)

    assert turned.target.ids == names
    assert turned.in_flight() == 0


def test_while_a_delivery_fails_nothing_else_is_claimed_and_nothing_is_lost(turned: Turned) -> None:
    turned.put(a=10, b=20, c=30)
    turned.target.errors = [BrokerUnavailable("out")] * 4
    turned.until(15)
    turned.put(later=1_000)
    claimed = turned.in_flight()

    turned.until(1_200)

    assert turned.in_flight() == claimed == 1
    turned.until(10_000)
    assert turned.target.ids == ["a", "b", "c", "later"]
    assert turned.service.failures == 4


def test_of_messages_that_are_delivered_together_those_that_are_refused_are_tried_again(turned: Turned) -> None:
    turned.put(a=100, b=120)
    turned.until(80)
    turned.put(c=110)
    turned.until(81)
    turned.clock.advance(500)
    turned.target.refuses = {"b", "c"}

    turned.until(600)
    turned.target.refuses = set()
    turned.until(600 + PARKED_AGAIN_MS)

    assert turned.target.ids == ["a", "c", "b", "b", "c"] or turned.target.ids == ["a", "c", "b", "c", "b"]
    assert (turned.service.delivered, turned.service.refused) == (3, 2)
    assert turned.in_flight() == 0


@pytest.mark.parametrize("size_bytes", [100, 400_000])
def test_large_messages_of_several_claims_are_delivered_batch_by_batch(turned: Turned, size_bytes: int) -> None:
    delivered: list[list[str]] = []

    def deliver(batch: Sequence[TimedMessage]) -> DeliveryOutcome:
        delivered.append([one.id for one in batch])
        return DeliveryOutcome()

    service = ScheduleRunner(turned.schedule, deliver=deliver, clock=turned.clock, claim_ahead_ms=AHEAD_MS)
    put(turned.schedule, NOW_MS, TimedMessage(NOW_MS + 40, "a", "t", bytes(size_bytes)))
    service.turn()
    put(turned.schedule, NOW_MS, TimedMessage(NOW_MS + 20, "b", "t", bytes(size_bytes)))
    service.turn()
    turned.clock.advance(100)
    for _ in range(4):
        service.turn()

    assert delivered == ([["b", "a"]] if size_bytes < 1_000 else [["b"], ["a"]])
