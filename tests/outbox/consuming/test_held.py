"""What is in hand: kept from others while it is handled, given back when it waits too long, known when it is lost.

Time is manual here, and no thread runs: what the extender's thread would do is called by name.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from outbox import Consumer, Telemetry, consumer, still_held
from outbox.consumers.in_flight import IDLE_WAIT_MS, InFlightDeliveries, InFlightDelivery
from outbox.telemetry import NO_TRACING
from outbox.telemetry.metrics import OutboxMetrics
from outbox_core import Delivery, ExtendStatus, ManualClock, Message
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, message

INVISIBLE_MS = 30_000
HANDLE_MS_MAX = 100_000


class Hands:
    """One consumer's hands."""

    def __init__(self, broker: WatchedBroker, clock: ManualClock, **options: Any) -> None:
        self.broker = broker
        self.clock = clock
        self.metrics = OutboxMetrics(clock=clock)
        telemetry = Telemetry(metrics=self.metrics, tracing=NO_TRACING)
        self.held = InFlightDeliveries(broker=broker, clock=clock, telemetry=telemetry)
        self.consumer: Consumer = consumer("orders", group="g", invisible_ms=INVISIBLE_MS, handle_ms_max=HANDLE_MS_MAX)(
            lambda _one: None
        )

    def pull(self) -> list[InFlightDelivery]:
        """Take all that there is in hand."""
        return self.held.hold(self.consumer, self.broker.pull("orders", "g", invisible_ms=INVISIBLE_MS))

    def pass_by(self, ms: int) -> None:
        """Let time pass, the extender looking every tenth of a second of it."""
        for _ in range(ms // 100):
            self.clock.advance(100)
            self.held.extend_due()

    def counted(self, event: str) -> float:
        """How often something happened."""
        labels = {"topic": "orders", "group": "g", "event": event}
        return self.metrics.registry.get_sample_value("outbox_consumer_events_total", labels) or 0


@pytest.fixture
def hands(timed: WatchedBroker, clock: ManualClock) -> Hands:
    """Hands on the broker whose time is manual."""
    return Hands(timed, clock)


def others(broker: WatchedBroker) -> list[tuple[str, int]]:
    """What another consumer of the group gets now: ids and attempts."""
    return [(one.id, one.attempt) for one in broker.pull("orders", "g", invisible_ms=INVISIBLE_MS)]


def test_what_is_being_handled_stays_invisible_however_long_it_takes(hands: Hands) -> None:
    hands.broker.publish([message()])
    (held,) = hands.pull()

    assert hands.held.may_begin(held)
    hands.pass_by(3 * INVISIBLE_MS)

    assert others(hands.broker) == []
    assert hands.broker.extended == 6  # each half of an invisible time
    assert hands.counted("extended") == 6


def test_what_waits_behind_a_slow_handler_is_given_back_untried(hands: Hands) -> None:
    hands.broker.publish([message(number) for number in range(3)])
    first, *waiting = hands.pull()

    hands.held.may_begin(first)
    hands.pass_by(INVISIBLE_MS - 100)
    before = others(hands.broker)
    hands.pass_by(100)

    assert before == []
    assert others(hands.broker) == [("m-1", 1), ("m-2", 1)]
    assert [hands.held.may_begin(one) for one in waiting] == [False, False]
    assert hands.counted("handed_back") == 2


def test_a_hung_handler_keeps_its_message_no_longer_than_its_bound(hands: Hands) -> None:
    hands.broker.publish([message()])
    (held,) = hands.pull()
    hands.held.may_begin(held)

    hands.pass_by(HANDLE_MS_MAX + INVISIBLE_MS)

    assert others(hands.broker) == [("m-1", 2)]
    assert hands.counted("overdue") == 1
    with hands.held.handling(held):
        assert not still_held()


def test_a_handler_is_told_that_its_message_is_somebody_elses(hands: Hands) -> None:
    hands.broker.publish([message()])
    (held,) = hands.pull()
    hands.held.may_begin(held)

    with hands.held.handling(held):
        before = still_held()
        hands.clock.advance(INVISIBLE_MS)  # as in a process that stood still
        after = still_held()
        stolen = others(hands.broker)
        hands.held.extend_due()
        told = still_held()

    assert (before, after, told) == (True, False, False)
    assert stolen == [("m-1", 2)]
    assert hands.broker.extends == [[ExtendStatus.STALE]]
    assert hands.counted("receipt_lost") == 1


def test_a_stale_receipt_is_known_before_its_time_is_over(hands: Hands) -> None:
    hands.broker.publish([message()])
    (held,) = hands.pull()
    hands.held.may_begin(held)

    hands.broker.admin.seek("orders", "g", to_offset=0)
    hands.pass_by(INVISIBLE_MS // 2)

    with hands.held.handling(held):
        assert not still_held()
    hands.pass_by(INVISIBLE_MS)
    assert len(hands.broker.extends) == 1  # asked no more


def test_what_has_run_out_unseen_is_not_begun(hands: Hands) -> None:
    hands.broker.publish([message()])
    (held,) = hands.pull()

    hands.clock.advance(INVISIBLE_MS)

    assert not hands.held.may_begin(held)


def test_an_extension_that_fails_is_tried_again(hands: Hands) -> None:
    hands.broker.publish([message()])
    (held,) = hands.pull()
    hands.held.may_begin(held)

    hands.broker.extend_fails = True
    hands.pass_by(INVISIBLE_MS - 1_000)
    tries = len(hands.broker.extends)
    hands.broker.extend_fails = False
    hands.pass_by(INVISIBLE_MS)

    assert tries == 15  # from half of the time on, once a second
    assert hands.broker.extended >= 1
    assert others(hands.broker) == []


def test_an_extension_whose_answer_comes_late_is_counted_from_its_request(hands: Hands) -> None:
    hands.broker.publish([message()])
    (held,) = hands.pull()
    hands.held.may_begin(held)
    answer = hands.broker.extend

    def answer_late(receipts: Sequence[str], *, invisible_ms: int, begun: bool) -> list[ExtendStatus]:
        statuses = answer(receipts, invisible_ms=invisible_ms, begun=begun)
        hands.clock.advance(INVISIBLE_MS // 3)
        return statuses

    hands.broker.extend = answer_late  # type: ignore[method-assign]
    hands.pass_by(INVISIBLE_MS // 2)
    hands.clock.advance(2 * INVISIBLE_MS // 3)
    with hands.held.handling(held):
        told = still_held()

    assert hands.broker.extended == 1
    assert (others(hands.broker), told) == ([("m-1", 2)], False)


def test_a_receipt_that_is_just_being_acknowledged_is_not_called_lost(hands: Hands) -> None:
    hands.broker.publish([message()])
    (held,) = hands.pull()
    hands.held.may_begin(held)
    held.settling = True
    hands.broker.ack([held.delivery.receipt])

    hands.pass_by(INVISIBLE_MS)

    assert hands.broker.extends[0] == [ExtendStatus.STALE]
    assert hands.counted("receipt_lost") == 0


def test_what_was_released_is_not_extended(hands: Hands) -> None:
    hands.broker.publish([message()])
    held = hands.pull()
    hands.held.may_begin(held[0])

    hands.held.release(held)
    hands.pass_by(INVISIBLE_MS)

    assert hands.broker.extends == []


def test_a_thousand_receipts_go_in_one_call_and_no_more(hands: Hands) -> None:
    asked: list[int] = []

    def extend(receipts: Sequence[str], *, invisible_ms: int, begun: bool) -> list[ExtendStatus]:
        asked.append(len(receipts))
        return [ExtendStatus.EXTENDED] * len(receipts)

    hands.broker.extend = extend  # type: ignore[method-assign]
    deliveries = [
        Delivery(receipt=str(n), attempt=1, message=Message(id=str(n), topic="orders", body=b"")) for n in range(1_001)
    ]
    for held in hands.held.hold(hands.consumer, deliveries):
        hands.held.may_begin(held)

    hands.pass_by(INVISIBLE_MS // 2)

    assert asked == [1000, 1]


class CountedWaits(ManualClock):
    """A clock that gives a test each wait's condition and time, once its thread has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: SimpleQueue[tuple[threading.Condition, int | None]] = SimpleQueue()

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        self.waits.put((condition, timeout_ms))
        return super().wait(condition, timeout_ms)


def test_the_extender_is_woken_by_what_is_due_before_it_looks_and_by_nothing_else(
    timed: WatchedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = CountedWaits()
    hands = Hands(timed, clock)
    timed.publish([message(number) for number in range(4)])
    hands.held.start()
    condition, idle_ms = clock.waits.get(timeout=WAIT_SECONDS)
    wakes: list[str] = []
    wake = condition.notify_all

    def pull_one(name: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(condition, "notify_all", lambda: wakes.append(name) or wake())
            hands.held.hold(hands.consumer, timed.pull("orders", "g", max_messages=1, invisible_ms=INVISIBLE_MS))

    pull_one("due before it looks")
    _, first_ms = clock.waits.get(timeout=WAIT_SECONDS)
    with condition:  # it is told before the wait begins, and free as soon as it has begun
        pass
    clock.advance(1)
    _, second_ms = clock.waits.get(timeout=WAIT_SECONDS)
    pull_one("due after it looks")
    hands.held.stop(timeout_seconds=WAIT_SECONDS)

    assert wakes == ["due before it looks"]
    assert (idle_ms, first_ms, second_ms) == (IDLE_WAIT_MS, INVISIBLE_MS // 2, INVISIBLE_MS // 2 - 1)
    assert not hands.held.is_alive()


def test_without_a_runner_a_message_is_ones_own() -> None:
    assert still_held()
