"""The thread that turns a schedule, in front of a real broker: outages, refusals, restarts, lateness, waking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from broker_adapter.embedded import EmbeddedBroker
from outbox_broker.delay_service.delay_proxy import COUNTERS_MAX, DelayProxy
from outbox_broker.delay_service.target_publisher import PARKED_AGAIN_MS
from outbox_broker.schedule.delay_store import DelayStore, TimedMessage
from outbox_broker.schedule.lateness import Lateness
from outbox_broker.schedule.schedule_runner import DeliveryOutcome, ScheduleRunner
from outbox_broker.schedule.service_thread import PAUSE_MS_MAX
from outbox_core import Message
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import BrokerRefused, BrokerThrottled, BrokerUnavailable, InvalidMessage, NotSupported
from outbox_core.messages.limits import CLOCK_DIFFERENCE_MS_MAX, DELAY_ACCEPTED_MS_MAX, DELAY_MAX_MS, HEADERS_MAX
from outbox_core.messages.message import DUE_HEADER, PublishResult, PublishStatus
from tests.outbox_broker.delay.conftest import (
    DAY_MS,
    NOW_MS,
    Opened,
    existing,
    flush,
    put,
    recorded,
    timed,
)
from tests.outbox_broker.polling import until


def put_off(message: TimedMessage) -> TimedMessage:
    return structs.replace(message, due_ms=message.due_ms + PARKED_AGAIN_MS)


class Target:
    """Takes batches, or does what it is told instead."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.errors: list[Exception] = []
        self.refuses: set[str] = set()
        self.took = threading.Event()

    def __call__(self, batch: Sequence[TimedMessage]) -> DeliveryOutcome:
        if self.errors:
            raise self.errors.pop(0)
        self.batches.append([one.id for one in batch])
        self.took.set()
        return DeliveryOutcome(again=[put_off(one) for one in batch if one.id in self.refuses])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def schedule(opened: Opened) -> DelayStore:
    return opened.open()


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def service(schedule: DelayStore, target: Target, clock: ManualClock) -> Iterator[ScheduleRunner]:
    """A service, not started."""
    one = ScheduleRunner(schedule, deliver=target, clock=clock)
    yield one
    one.stop()


def test_it_waits_until_the_next_due_time_and_never_longer_than_a_slice(
    service: ScheduleRunner, schedule: DelayStore, clock: ManualClock, target: Target
) -> None:
    assert service.turn() == PAUSE_MS_MAX
    put(schedule, NOW_MS, timed("a", NOW_MS + 300), timed("b", NOW_MS + 5_000))

    assert service.turn() == 300
    clock.advance(299)
    assert service.turn() == 1
    assert target.batches == []
    clock.advance(1)
    assert service.turn() == 0
    assert target.batches == [["a"]]
    assert service.turn() == PAUSE_MS_MAX


def test_a_batch_that_the_target_cannot_take_now_waits_and_grows_no_duplicates(
    service: ScheduleRunner, schedule: DelayStore, clock: ManualClock, target: Target
) -> None:
    put(schedule, NOW_MS, timed("a", NOW_MS), timed("b", NOW_MS + 10))
    target.errors = [BrokerUnavailable("out"), BrokerThrottled("later", retry_after_ms=700), BrokerUnavailable("out")]
    waits = [service.turn()]

    while not target.batches:
        clock.advance(waits[-1])
        waits.append(service.turn())

    assert waits[:4] == [100, 700, 400, 0]
    assert target.batches == [["a"]]
    service.turn()
    assert target.batches == [["a"], ["b"]]
    assert (service.delivered, service.failures) == (2, 3)
    assert service.lateness.worst_ms == 100 + 700 + 400


def test_housekeeping_goes_on_while_the_target_is_out(
    service: ScheduleRunner, schedule: DelayStore, opened: Opened, clock: ManualClock, target: Target
) -> None:
    put(schedule, NOW_MS, timed("a", NOW_MS), timed("far", NOW_MS + 30 * DAY_MS))
    flush(schedule, NOW_MS)
    target.errors = [BrokerUnavailable("out")] * 1_000

    clock.advance(29 * DAY_MS)
    for _ in range(20):
        clock.advance(service.turn())
        service.keep()

    assert all(bucket.level > 0 or bucket.start_ms <= clock.now_ms() for bucket in recorded(opened).buckets)


def test_what_the_target_refuses_is_kept_and_tried_again_later_also_after_a_restart(
    opened: Opened, service: ScheduleRunner, schedule: DelayStore, clock: ManualClock, target: Target
) -> None:
    put(schedule, NOW_MS, timed("good", NOW_MS), timed("bad", NOW_MS))
    target.refuses = {"bad"}

    service.turn()
    schedule.close()

    assert (service.delivered, service.refused) == (1, 1)
    assert sum(count for _, count in service.lateness.counts()) == 1, "what is refused is not late, but refused"
    schedule = opened.open()
    found = schedule.queries.find("bad")
    assert found is not None
    assert found.due_ms == NOW_MS + PARKED_AGAIN_MS
    assert schedule.cancel(["bad", "good"], now_ms=NOW_MS) == ["canceled", "too_late"]
    assert schedule.due(NOW_MS + DAY_MS) is None


def test_a_message_that_is_due_earlier_than_all_else_wakes_the_thread(
    service: ScheduleRunner, schedule: DelayStore, clock: ManualClock, target: Target
) -> None:
    service.start()
    service.start()

    put(schedule, NOW_MS, timed("a", NOW_MS))
    service.wake()
    assert target.took.wait(120)
    target.took.clear()
    put(schedule, NOW_MS, timed("b", NOW_MS + 400))
    service.wake()
    clock.advance(400)
    assert target.took.wait(120)

    service.stop()
    service.stop()
    assert target.batches == [["a"], ["b"]]


def test_a_defect_in_the_target_ends_no_thread_and_the_batch_that_met_it_is_delivered_again(
    service: ScheduleRunner, schedule: DelayStore, clock: ManualClock, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    target.errors = [ZeroDivisionError("a defect")]
    put(schedule, NOW_MS, timed("a", NOW_MS), timed("b", NOW_MS + 1))

    service.start()
    until(lambda: not target.errors)  # the first batch is of what is due before time passes
    while len(target.batches) < 2:
        target.took.wait(0.01)
        clock.advance(PAUSE_MS_MAX)

    assert target.batches == [["a"], ["b"]]
    assert "delay_service_failed" in caplog.text


def test_lateness_is_counted_by_bounds() -> None:
    late = Lateness()
    for late_ms in [0] * 90 + [15] * 9 + [70_000]:
        late.add(late_ms)

    assert sum(count for _, count in late.counts()) == 100
    assert (late.quantile_ms(0.5), late.quantile_ms(0.99), late.quantile_ms(1)) == (1, 20, 70_000)


# -- in front of a broker ------------------------------------------------------------------------------------------


@pytest.fixture
def broker(tmp_path: Path, clock: ManualClock) -> Iterator[EmbeddedBroker]:
    """The target."""
    one = EmbeddedBroker(f"embedded:{tmp_path / 'target'}", clock=clock)
    yield one
    one.close()


def message(message_id: str, *, ahead_ms: int | None = None) -> Message:
    due_ms = None if ahead_ms is None else NOW_MS + ahead_ms
    return Message(
        id=message_id, topic="orders", body=message_id.encode(), key="k", headers={"h": "v"}, deliver_at_ms=due_ms
    )


def turned(front: DelayProxy) -> None:
    """Everything that can be done now."""
    while front.service.turn() == 0:
        pass


def test_a_front_delivers_to_a_broker_what_is_due_whole_and_once(
    opened: Opened, broker: EmbeddedBroker, clock: ManualClock
) -> None:
    front = opened.front(broker, clock=clock)

    of_a_clock_ahead = message("ahead", ahead_ms=DELAY_MAX_MS + CLOCK_DIFFERENCE_MS_MAX)
    assert front.publish([of_a_clock_ahead])[0].status == "stored"
    results = front.publish([message("now"), message("later", ahead_ms=500), message("far", ahead_ms=732 * DAY_MS)])
    assert [result.status for result in results] == ["stored", "stored", "rejected"]
    assert "731 days" in str(results[2].error)
    turned(front)
    assert front.publish([message("now"), message("later", ahead_ms=500)])[1].status == PublishStatus.DUPLICATE

    [delivery] = broker.pull("orders", "billing")
    assert (delivery.id, delivery.body, delivery.key, dict(delivery.headers)) == ("now", b"now", "k", {"h": "v"})
    clock.advance(499)
    turned(front)
    assert broker.pull("orders", "billing") == []
    clock.advance(1)
    turned(front)
    assert [one.id for one in broker.pull("orders", "billing")] == ["later"]
    front.close()


def test_a_front_answers_what_producers_and_operators_ask_and_refuses_the_rest(
    opened: Opened, broker: EmbeddedBroker, clock: ManualClock
) -> None:
    front = opened.front(broker, clock=clock)
    front.publish([message("a", ahead_ms=90_000), message("b", ahead_ms=90_000)])

    assert front.scheduled("orders", bucket="day") == [(NOW_MS // DAY_MS * DAY_MS, 2)]
    assert front.scheduled_message("a") == {"id": "a", "topic": "orders", "deliver_at_ms": NOW_MS + 90_000}
    assert front.scheduled_message("nobody") is None
    assert front.cancel(["a", "nobody"]) == ["canceled", "unknown"]
    assert front.topics() == ["orders"]
    assert {"stored": 0, "scheduled": 1}.items() <= front.topic_figures("orders").items()
    assert front.log_figures()["scheduled"] == 1
    assert front.counters()["published_stored", "orders", ""] == 2
    with pytest.raises(InvalidMessage):
        front.scheduled(bucket="year")
    served = front.served()
    with pytest.raises(NotSupported, match="target broker"):
        served.needed(served.broker)
    with pytest.raises(NotSupported, match="target broker"):
        served.subscribe("orders", "billing", lambda: None)
    front.check_ready()
    front.close()


def test_topics_that_clients_invent_do_not_make_the_figures_grow_without_end(
    opened: Opened, broker: EmbeddedBroker, clock: ManualClock
) -> None:
    front = opened.front(broker, clock=clock)
    front.publish([message("kept", ahead_ms=1)])

    for names in (["orders"], [f"refused-{number}" for number in range(10)]):
        too_late = [message(name, ahead_ms=DELAY_ACCEPTED_MS_MAX + 1) for name in names]
        front.publish([structs.replace(refused, topic=refused.id) for refused in too_late])
    counted = dict(front.counters())
    for first in range(0, COUNTERS_MAX, 1_000):
        names = [f"topic-{first + number}" for number in range(1_000)]
        front.publish([structs.replace(message(name, ahead_ms=1), topic=name) for name in names])

    assert counted == {
        ("published_stored", "orders", ""): 1,
        ("published_rejected_delay", "orders", ""): 1,
        ("published_rejected_delay", "~others", ""): 10,
    }
    assert len(front.counters()) == COUNTERS_MAX + 1
    assert front.counters()["published_stored", "~others", ""] == 3
    front.close()


def test_one_message_that_a_target_refuses_does_not_keep_the_others(
    opened: Opened,
    broker: EmbeddedBroker,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish: Callable[[Sequence[Message]], list[PublishResult]] = broker.publish

    def refusing(batch: Sequence[Message]) -> list[PublishResult]:
        if any(one.id == "bad" for one in batch):
            raise BrokerRefused("never")
        return publish(batch)

    monkeypatch.setattr(broker, "publish", refusing)
    front = opened.front(broker, clock=clock)

    front.publish([message("a"), message("bad"), message("b")])
    turned(front)

    assert [one.id for one in broker.pull("orders", "billing")] == ["a", "b"]
    assert front.scheduled_message("bad") is not None
    front.close()


def test_one_message_that_cannot_be_decoded_does_not_keep_the_others(
    opened: Opened, broker: EmbeddedBroker, clock: ManualClock
) -> None:
    front = opened.front(broker, clock=clock)
    put(existing(opened), NOW_MS, TimedMessage(NOW_MS, "unreadable", "orders", b"\xc1"))

    front.publish([message("a"), message("b")])
    turned(front)

    assert [one.id for one in broker.pull("orders", "billing")] == ["a", "b"]
    assert front.scheduled_message("unreadable") is not None
    front.close()


def test_the_due_time_that_was_asked_for_goes_along_as_a_header(
    opened: Opened, broker: EmbeddedBroker, clock: ManualClock
) -> None:
    front = opened.front(broker, clock=clock)
    crowded = {f"h{number}": "v" for number in range(HEADERS_MAX)}
    undated = msgspec.msgpack.encode([["undated", "orders", None, {"h": "v"}, b"x", NOW_MS]])
    put(existing(opened), NOW_MS, TimedMessage(NOW_MS + 500, "undated", "orders", undated))

    front.publish([message("now"), message("later", ahead_ms=500), message("past", ahead_ms=-5)])
    front.publish(
        [
            structs.replace(message("copied", ahead_ms=500), headers={DUE_HEADER: "1"}),
            structs.replace(message("passed-on"), headers={DUE_HEADER: "1"}),
            structs.replace(message("crowded", ahead_ms=500), headers=crowded),
        ]
    )
    clock.advance(700)
    turned(front)
    front.close()

    headers = {one.id: dict(one.headers) for one in broker.pull("orders", "billing")}
    due = {DUE_HEADER: str(NOW_MS + 500)}
    assert headers == {
        "now": {"h": "v"}, "later": {"h": "v", **due}, "past": {"h": "v", DUE_HEADER: str(NOW_MS - 5)}, "copied": due,
        "passed-on": {DUE_HEADER: "1"}, "crowded": crowded, "undated": {"h": "v"},
    }  # fmt: skip


def test_a_message_that_was_refused_at_first_tells_its_own_due_time_not_that_of_the_attempt(
    opened: Opened, broker: EmbeddedBroker, clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refusing(_batch: Sequence[Message]) -> list[PublishResult]:
        raise BrokerRefused("not yet")

    front = opened.front(broker, clock=clock)
    front.publish([message("later", ahead_ms=500)])
    clock.advance(500)
    with monkeypatch.context() as patched:
        patched.setattr(broker, "publish", refusing)
        turned(front)

    clock.advance(PARKED_AGAIN_MS)
    turned(front)
    front.retry_refused(["later"])
    front.close()

    [delivery] = broker.pull("orders", "billing")
    assert delivery.headers[DUE_HEADER] == str(NOW_MS + 500)
