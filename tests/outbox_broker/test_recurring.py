"""Recurring messages of an engine: each occurrence is published once, whatever stops, dies or steps meanwhile."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import InUse, InvalidMessage
from outbox_core.journal.recurring_records import FiredRecurring
from outbox_core.messages.limits import HEADERS_MAX, RECURRING_BODY_BYTES_MAX
from outbox_core.messages.message import Delivery, GroupConfig, Message
from outbox_core.messages.recurring_message import RecurringMessage, occurrence_id
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.polling import until

TOPIC, GROUP = "reports", "mail"
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
NOON_MS = int(datetime(2027, 3, 1, 12, tzinfo=UTC).timestamp()) * 1000
SIX_MS = NOON_MS + 18 * HOUR_MS
"""The first 06:00 UTC after that noon."""
DAILY = RecurringMessage(topic=TOPIC, cron="0 6 * * *", body=b"report")
type_of_open = Callable[..., Engine]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON_MS)


def come(engine: Engine, count: int) -> list[Delivery]:
    """Wait for messages of the topic, and take them."""
    deliveries: list[Delivery] = []

    def has_come() -> bool:
        deliveries.extend(engine.puller.pull(TOPIC, GROUP, max_messages=1_000))
        return len(deliveries) >= count

    until(has_come)
    engine.settler.ack([one.receipt for one in deliveries])
    return deliveries


def times(deliveries: list[Delivery]) -> list[str]:
    return [one.headers["outbox-recurring-at"] for one in deliveries]


def with_daily(engine: Engine, *, name: str = "daily", message: RecurringMessage = DAILY) -> None:
    engine.recurring.add(name, message)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())


def test_an_occurrence_is_a_message_that_names_it(engine: Engine, clock: ManualClock) -> None:
    message = RecurringMessage(
        topic=TOPIC, cron="0 6 * * *", tz="Europe/Berlin", key="all", headers={"kind": "pdf"}, body=b"\x00\xff"
    )
    with_daily(engine, message=message)

    clock.advance(17 * HOUR_MS + 5_000)

    [delivery] = come(engine, 1)
    assert (delivery.key, delivery.body, delivery.created_at_ms) == ("all", b"\x00\xff", clock.now_ms())
    assert delivery.headers == {
        "kind": "pdf", "outbox-recurring": "daily", "outbox-recurring-at": "2027-03-02T05:00:00Z",
    }  # fmt: skip
    assert delivery.id == occurrence_id("daily", generation=1, at_ms=SIX_MS - HOUR_MS)


def test_it_comes_each_time_and_tells_when_it_comes_next(engine: Engine, clock: ManualClock) -> None:
    with_daily(engine)
    assert engine.recurring.view("daily", runs=2).next_ms == [SIX_MS, SIX_MS + DAY_MS]

    clock.advance(18 * HOUR_MS)
    assert times(come(engine, 1)) == ["2027-03-02T06:00:00Z"]
    clock.advance(DAY_MS)
    assert times(come(engine, 1)) == ["2027-03-03T06:00:00Z"]

    until(lambda: engine.recurring.view("daily").fired_to_ms == SIX_MS + DAY_MS)
    assert engine.recurring.view("daily").next_ms == [SIX_MS + 2 * DAY_MS]
    assert engine.counters()["recurring_fired", TOPIC, ""] == 2
    assert engine.counters()["recurring_missed", TOPIC, ""] == 0


@pytest.mark.parametrize(("catch_up", "expected"), [(1, [5]), (3, [3, 4, 5]), (100, [2, 3, 4, 5])])
def test_of_those_missed_while_the_broker_was_down_the_newest_come(
    open_engine: type_of_open, clock: ManualClock, catch_up: int, expected: list[int]
) -> None:
    engine = open_engine()
    with_daily(engine, message=RecurringMessage(topic=TOPIC, cron="0 6 * * *", catch_up=catch_up))
    engine.close()

    clock.advance(4 * DAY_MS)
    engine = open_engine()

    assert times(come(engine, len(expected))) == [f"2027-03-0{day}T06:00:00Z" for day in expected]
    until(lambda: engine.counters().get(("recurring_fired", TOPIC, "")) == len(expected))
    assert engine.counters()["recurring_missed", TOPIC, ""] == 4 - len(expected)


def test_one_that_is_paused_does_not_come_and_comes_once_when_it_is_resumed(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    with_daily(engine)
    engine.recurring.pause("daily", paused=True)
    engine.recurring.pause("daily", paused=True)

    clock.advance(3 * DAY_MS)
    engine = open_engine()
    passed_by = RecurringMessage(topic="probe", cron="* * * * *")
    engine.recurring.add("z-probe", passed_by)
    clock.advance(MINUTE_MS)
    until(lambda: engine.admin.topic_figures("probe")["stored"] == 1)
    assert engine.admin.topic_figures(TOPIC)["stored"] == 0
    assert engine.recurring.view("daily").next_ms == []

    engine.recurring.pause("daily", paused=False)
    assert times(come(engine, 1)) == ["2027-03-04T06:00:00Z"]


def test_one_that_was_deleted_and_added_again_brings_nothing_of_before(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    with_daily(engine)
    clock.advance(18 * HOUR_MS)
    [first] = come(engine, 1)

    engine.recurring.delete("daily")
    clock.advance(5 * DAY_MS)
    engine = open_engine()
    with pytest.raises(KeyError):
        engine.recurring.view("daily")
    with_daily(engine)
    clock.advance(DAY_MS)

    [again] = come(engine, 1)
    assert times([again]) == ["2027-03-08T06:00:00Z"]
    assert engine.recurring.view("daily").generation == 2
    assert first.id != again.id


def test_a_clock_that_is_put_back_brings_no_occurrence_again(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine()
    with_daily(engine)
    clock.advance(18 * HOUR_MS)
    ids = [one.id for one in come(engine, 1)]
    until(lambda: engine.recurring.view("daily").fired_to_ms == SIX_MS)

    clock.step_wall(-12 * HOUR_MS)
    clock.advance(6 * HOUR_MS)
    engine = open_engine()
    clock.advance(6 * HOUR_MS)  # 06:00 comes again
    clock.advance(DAY_MS)

    ids += [one.id for one in come(engine, 1)]
    assert ids == [occurrence_id("daily", generation=1, at_ms=SIX_MS + day * DAY_MS) for day in (0, 1)]
    engine.close()
    fired = [action for action in actions_of(engine.context.folder) if isinstance(action, FiredRecurring)]
    assert [action.times_ms for action in fired] == [[SIX_MS], [SIX_MS + DAY_MS]]


def test_of_those_that_a_step_of_the_clock_passes_the_newest_comes(engine: Engine, clock: ManualClock) -> None:
    with_daily(engine)

    clock.step_wall(10 * DAY_MS)

    assert times(come(engine, 1)) == ["2027-03-11T06:00:00Z"]
    until(lambda: engine.counters().get(("recurring_missed", TOPIC, "")) == 9)


@pytest.mark.parametrize("within", ["messages", "actions"])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_on_a_disk_that_is_full_for_a_while_each_occurrence_comes_once(
    open_engine: type_of_open, clock: ManualClock, within: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = FailingStorage(within=within)
    engine = open_engine(storage=storage)
    with_daily(engine)

    storage.fail(call, errno.ENOSPC)
    clock.advance(18 * HOUR_MS)
    until(lambda: engine.recurring.view("daily").failure is not None)
    clock.advance(2_000)
    storage.mend()
    if call == "sync":  # a failed sync is final: the broker is opened again
        engine = open_engine()
    clock.advance(2_000)

    [first] = come(engine, 1)
    until(lambda: engine.recurring.view("daily").fired_to_ms == SIX_MS)
    until(lambda: engine.recurring.view("daily").failure is None)
    clock.advance(DAY_MS)
    [second] = come(engine, 1)
    assert times([first, second]) == ["2027-03-02T06:00:00Z", "2027-03-03T06:00:00Z"]
    told = [record for record in caplog.records if event_name(record) == "recurring_failed"]
    assert {record.levelno for record in told} == {logging.WARNING}


def test_a_cordoned_broker_brings_nothing_and_then_the_newest(engine: Engine, clock: ManualClock) -> None:
    with_daily(engine)
    engine.operations.cordon.begin(reason="moving")

    clock.advance(2 * DAY_MS)
    until(lambda: engine.recurring.view("daily").failure is not None)
    assert "cordoned (moving)" in str(engine.recurring.view("daily").failure)
    assert engine.admin.topic_figures(TOPIC)["stored"] == 0
    engine.operations.cordon.end()
    clock.advance(1_000)

    assert times(come(engine, 1)) == ["2027-03-03T06:00:00Z"]


@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_all_is_known_after_checkpoints_and_restarts(
    open_engine: type_of_open, clock: ManualClock, segment_bytes: int
) -> None:
    engine = open_engine(segment_bytes=segment_bytes)
    engine.recurring.add("gone", DAILY)
    engine.recurring.delete("gone")
    with_daily(engine)
    engine.recurring.add("paused", DAILY)
    engine.recurring.pause("paused", paused=True)
    clock.advance(18 * HOUR_MS)
    come(engine, 1)
    until(lambda: engine.recurring.view("daily").fired_to_ms == SIX_MS)
    views = [engine.recurring.view(name) for name in engine.recurring.names()]

    for _ in range(3):
        engine.writer.write_checkpoint()
        for _ in range(40):  # in the smaller segments, enough to drop those before
            engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))
    engine.retention.check()
    engine = open_engine(segment_bytes=segment_bytes)

    assert [engine.recurring.view(name) for name in engine.recurring.names()] == views
    engine.recurring.add("new", DAILY)
    assert engine.recurring.view("new").generation == 4


def test_what_is_added_again_just_so_is_left_alone_and_another_one_refused(engine: Engine, clock: ManualClock) -> None:
    with_daily(engine)
    before = engine.recurring.view("daily")
    clock.advance(HOUR_MS)

    engine.recurring.add("daily", RecurringMessage(topic=TOPIC, cron="0 6 * * *", body=b"report"))
    with pytest.raises(InUse, match="delete it first"):
        engine.recurring.add("daily", RecurringMessage(topic=TOPIC, cron="0 7 * * *", body=b"report"))

    assert engine.recurring.view("daily") == before


@pytest.mark.parametrize(
    ("name", "message", "reason"),
    [
        ("da/ily", DAILY, "recurring message 'da/ily'"),
        ("..", DAILY, "recurring message"),
        ("n" * 256, DAILY, "recurring message"),
        ("daily", RecurringMessage(topic="a/b", cron="0 6 * * *"), "topic"),
        ("daily", RecurringMessage(topic=TOPIC, cron="0 6 * *"), "five fields"),
        ("daily", RecurringMessage(topic=TOPIC, cron="0 6 * * *", tz="Mars/Olympus"), "no time zone"),
        ("daily", RecurringMessage(topic=TOPIC, cron="0 6 * * *", key=""), "key"),
        ("daily", RecurringMessage(topic=TOPIC, cron="0 6 * * *", catch_up=0), "catch_up"),
        ("daily", RecurringMessage(topic=TOPIC, cron="0 6 * * *", catch_up=101), "catch_up"),
        (
            "daily",
            RecurringMessage(topic=TOPIC, cron="* * * * *", headers={"Outbox-Recurring": "x"}),
            "sets the header",
        ),
        ("daily", RecurringMessage(topic=TOPIC, cron="* * * * *", headers={"a b": "x"}), "header name"),
        (
            "daily",
            RecurringMessage(topic=TOPIC, cron="* * * * *", headers={f"h{n}": "" for n in range(HEADERS_MAX - 1)}),
            "65 headers",
        ),
        ("daily", RecurringMessage(topic=TOPIC, cron="* * * * *", body=bytes(RECURRING_BODY_BYTES_MAX + 1)), "65,537"),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_anything_is_written(
    engine: Engine, name: str, message: RecurringMessage, reason: str
) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        engine.recurring.add(name, message)

    assert engine.recurring.names() == []
    assert engine.admin.topics() == []


def test_there_are_only_so_many(open_engine: type_of_open) -> None:
    engine = open_engine(recurring_messages_max=2)
    engine.recurring.add("a", DAILY)
    engine.recurring.add("b", DAILY)

    with pytest.raises(InvalidMessage, match="2 recurring messages already"):
        engine.recurring.add("c", DAILY)
    engine.recurring.add("b", DAILY)
    engine.recurring.delete("a")
    engine.recurring.add("c", DAILY)


def test_a_topic_of_one_is_deleted_by_force_alone_and_does_not_come_back(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    engine.recurring.add("daily", DAILY)
    assert engine.admin.topics() == [TOPIC]
    with pytest.raises(InUse, match="1 recurring messages"):
        engine.deletion.delete_topic(TOPIC)

    engine.deletion.delete_topic(TOPIC, force=True)

    assert engine.recurring.names() == []
    engine = open_engine()
    clock.advance(DAY_MS)
    engine.recurring.add("probe", RecurringMessage(topic="probe", cron="* * * * *"))
    clock.advance(MINUTE_MS)
    until(lambda: engine.admin.topic_figures("probe")["stored"] == 1)
    assert engine.admin.topics() == ["probe"]


def test_an_occurrence_that_somebody_published_already_is_not_published_again(
    engine: Engine, clock: ManualClock
) -> None:
    with_daily(engine)
    engine.publisher.publish(
        [Message(id=occurrence_id("daily", generation=1, at_ms=SIX_MS), topic=TOPIC, body=b"by a")]
    )

    clock.advance(18 * HOUR_MS)
    until(lambda: engine.recurring.view("daily").fired_to_ms == SIX_MS)

    assert [one.body for one in come(engine, 1)] == [b"by a"]


def test_what_happens_is_told_by_an_event_each(
    engine: Engine, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with_daily(engine)
    engine.recurring.pause("daily", paused=True)
    engine.recurring.pause("daily", paused=False)
    clock.advance(3 * DAY_MS)
    until(lambda: any(event_name(record) == "recurring_missed" for record in caplog.records))
    engine.recurring.delete("daily")

    events = [event for event in map(event_name, caplog.records) if event.startswith("recurring_")]
    assert events == [
        "recurring_added", "recurring_paused", "recurring_resumed", "recurring_fired", "recurring_missed",
        "recurring_deleted",
    ]  # fmt: skip
