"""A group that gets none of the messages that wait says why, since when, and how many wait; the log tells it once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from outbox_broker.engine.engine import Engine
from outbox_broker.engine.stall_watch import EVENTS_PER_STEP, LOOKS_PER_STEP, Stall
from outbox_broker.group.stall import StallFacts, StallReason, decide_stall
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.polling import until

TOPIC, GROUP = "orders", "billing"
INVISIBLE_MS = 30_000
LONG_MS = 600_000
CHECK_MS = 5_000
type_of_open = Callable[..., Engine]


def publish(engine: Engine, *ids: str, key: str | None = None) -> None:
    results = engine.publisher.publish([Message(id=one, topic=TOPIC, key=key, body=b"") for one in ids])
    assert [result.status for result in results] == ["stored"] * len(ids)


def pull(engine: Engine, *, count: int = 100, group: str = GROUP, invisible_ms: int = INVISIBLE_MS) -> list[str]:
    deliveries = engine.puller.pull(TOPIC, group, max_messages=count, invisible_ms=invisible_ms)
    return [delivery.receipt for delivery in deliveries]


def stall(engine: Engine, group: str = GROUP) -> Stall | None:
    return engine.stalls.stall_of(TOPIC, group)


def reason(engine: Engine, group: str = GROUP) -> StallReason | None:
    found = stall(engine, group)
    return None if found is None else found.reason


def test_nothing_that_waits_is_no_stall(engine: Engine) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())

    assert stall(engine) is None

    publish(engine, "m1")
    engine.settler.ack(pull(engine))
    assert stall(engine) is None


def test_unknown_groups_and_topics_are_said_to_be_unknown(engine: Engine) -> None:
    with pytest.raises(KeyError):
        stall(engine)

    publish(engine, "m1")
    with pytest.raises(KeyError):
        stall(engine)


def test_a_paused_group_says_so_as_long_as_something_waits(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    engine.admin.pause(TOPIC, GROUP, paused=True)
    assert stall(engine) is None
    publish(engine, "m1", "m2")

    begun_ms = clock.now_ms()

    assert stall(engine) == Stall(StallReason.PAUSED, begun_ms, 0, waiting=2, in_flight=0, next_visible_ms=None)
    clock.advance(LONG_MS)
    assert stall(engine) == Stall(StallReason.PAUSED, begun_ms, LONG_MS, waiting=2, in_flight=0, next_visible_ms=None)
    engine.admin.pause(TOPIC, GROUP, paused=False)
    pull(engine)
    assert stall(engine) is None


def test_a_group_that_nobody_pulls_has_no_consumer(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "m1", "m2", "m3")
    engine.settler.ack(pull(engine, count=1))
    assert stall(engine) is None  # its consumer asked just now

    clock.advance(LONG_MS)

    assert reason(engine) is StallReason.NO_CONSUMER


def test_what_a_dead_consumer_held_has_no_consumer_either(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "m1")
    pull(engine)
    assert stall(engine) is None

    clock.advance(LONG_MS)

    assert reason(engine) is StallReason.NO_CONSUMER


def test_consumers_that_hold_messages_and_ask_for_no_more_are_busy(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "m1", "m2")
    pull(engine, count=1, invisible_ms=2 * LONG_MS)

    clock.advance(LONG_MS)

    found = stall(engine)
    assert found is not None
    assert (found.reason, found.waiting, found.in_flight) == (StallReason.CONSUMERS_BUSY, 1, 1)


def test_a_group_at_its_own_limit_says_so(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(group_in_hand_max=2)
    publish(engine, "m1", "m2", "m3")

    receipts = pull(engine)

    found = stall(engine)
    assert found is not None
    assert (found.reason, found.waiting, found.in_flight) == (StallReason.GROUP_IN_FLIGHT_LIMIT, 1, 2)
    assert found.next_visible_ms == clock.now_ms() + INVISIBLE_MS
    engine.settler.ack(receipts)
    assert stall(engine) is None


def test_messages_waiting_for_another_attempt_count_for_the_limit(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(group_in_hand_max=2)
    publish(engine, "m1", "m2", "m3")
    engine.settler.nack(pull(engine), delay_ms=INVISIBLE_MS, reason=None)

    assert reason(engine) is StallReason.GROUP_IN_FLIGHT_LIMIT

    clock.advance(INVISIBLE_MS)
    assert stall(engine) is None  # they may be delivered again, whatever the limit


def test_a_group_that_others_leave_no_room_says_so(open_engine: type_of_open) -> None:
    engine = open_engine(in_hand_max=2, group_in_hand_min=1)
    publish(engine, "m1", "m2", "m3")
    engine.admin.declare_group(TOPIC, "other", GroupConfig())

    held = pull(engine, group="other")
    pull(engine)

    assert reason(engine) is StallReason.BROKER_IN_FLIGHT_LIMIT
    engine.settler.ack(held)
    assert stall(engine) is None


def test_an_ordered_group_behind_one_key_says_so(engine: Engine) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(ordered=True))
    publish(engine, "m1", "m2", "m3", key="k")
    receipts = pull(engine)
    assert pull(engine) == []

    found = stall(engine)

    assert found is not None
    assert (found.reason, found.waiting, found.in_flight) == (StallReason.KEY_ORDER, 2, 1)
    engine.settler.nack(receipts, delay_ms=INVISIBLE_MS, reason="later")
    assert reason(engine) is StallReason.KEY_ORDER
    publish(engine, "n1", key="other")
    assert stall(engine) is None


def test_a_group_whose_messages_wait_for_their_next_attempt_says_until_when(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "m1")
    engine.settler.nack(pull(engine), delay_ms=LONG_MS, reason="later")

    found = stall(engine)

    assert found is not None
    assert (found.reason, found.next_visible_ms) == (StallReason.RETRY_LATER, clock.now_ms() + LONG_MS)


def test_what_a_filter_passes_over_does_not_wait(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(filter="type = 'wanted'"))
    publish(engine, "m1", "m2")

    clock.advance(LONG_MS)

    assert stall(engine) is None


def test_a_delivery_begins_the_time_anew(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(group_in_hand_max=1)
    publish(engine, "m1", "m2", "m3")
    [receipt] = pull(engine, invisible_ms=LONG_MS)
    stall(engine)
    clock.advance(INVISIBLE_MS)
    engine.settler.ack([receipt])
    pull(engine, invisible_ms=LONG_MS)

    found = stall(engine)

    assert found is not None
    assert (found.reason, found.since_ms) == (StallReason.GROUP_IN_FLIGHT_LIMIT, clock.now_ms())


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """The groups that an event was logged of."""
    return [record.__dict__["group"] for record in caplog.records if record.msg.startswith(name)]


def test_a_stall_that_lasts_is_logged_once_and_so_is_its_end(
    engine: Engine, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    engine.admin.pause(TOPIC, GROUP, paused=True)
    publish(engine, "m1")
    stall(engine)

    def told(name: str) -> bool:
        clock.advance(CHECK_MS)
        return bool(events(caplog, name))

    until(lambda: told("group_stalled"))
    for _ in range(10):
        clock.advance(CHECK_MS)
        stall(engine)
    engine.admin.pause(TOPIC, GROUP, paused=False)
    pull(engine)
    assert stall(engine) is None  # whoever looks first does not hide the end from the log
    until(lambda: told("group_stall_ended"))

    assert (events(caplog, "group_stalled"), events(caplog, "group_stall_ended")) == ([GROUP], [GROUP])
    [ended] = [record for record in caplog.records if record.msg.startswith("group_stall_ended")]
    assert ended.__dict__["reason"] == "paused"


def test_many_stalls_are_told_a_few_at_a_time(
    open_engine: type_of_open, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine()
    caplog.set_level(logging.WARNING)
    publish(engine, "m1")
    names = {f"g{number}" for number in range(3 * EVENTS_PER_STEP)}
    topics = [f"t{number}" for number in range(2 * LOOKS_PER_STEP)]  # more than a step looks at
    engine.publisher.publish([Message(id="m", topic=topic, body=b"") for topic in topics])
    for name in names:
        engine.admin.declare_group(TOPIC, name, GroupConfig())

    def all_are_told() -> bool:
        clock.advance(CHECK_MS)
        return set(events(caplog, "group_stalled")) == names

    until(all_are_told)

    assert len(events(caplog, "group_stalled")) == len(names)


def facts(**changes: object) -> StallFacts:
    """A group with a message that is ready for whoever asks, changed."""
    known: dict[str, object] = {
        "waiting": 1, "in_flight": 0, "next_visible_ms": None, "has_fresh": True, "filed": 0, "has_filed_ready": False,
        "room": 1, "room_of_all": 1, "paused": False, "is_asked_for": True,
    }  # fmt: skip
    return StallFacts(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"waiting": 0}, None),
        ({"has_fresh": False}, None),  # its publish is not synced yet
        ({"paused": True, "is_asked_for": False, "room": 0}, StallReason.PAUSED),
        ({"is_asked_for": False, "room": 0}, StallReason.GROUP_IN_FLIGHT_LIMIT),
        ({"room": 0, "room_of_all": 0}, StallReason.GROUP_IN_FLIGHT_LIMIT),
        ({"room_of_all": 0, "filed": 1}, StallReason.BROKER_IN_FLIGHT_LIMIT),
        ({"room": 0, "next_visible_ms": 10}, None),  # what is visible again needs no room
        ({"room": 0, "next_visible_ms": 11}, StallReason.GROUP_IN_FLIGHT_LIMIT),
        ({"waiting": 0, "in_flight": 1, "next_visible_ms": 10, "is_asked_for": False}, StallReason.NO_CONSUMER),
        ({"in_flight": 1, "next_visible_ms": 11, "is_asked_for": False}, StallReason.CONSUMERS_BUSY),
        ({"has_fresh": False, "filed": 2, "next_visible_ms": 11}, StallReason.KEY_ORDER),
        ({"has_fresh": False, "filed": 2, "has_filed_ready": True}, None),
        ({"has_fresh": False, "next_visible_ms": 11}, StallReason.RETRY_LATER),
    ],
)
def test_the_first_reason_that_holds_is_told(changes: dict[str, object], expected: StallReason | None) -> None:
    assert decide_stall(facts(**changes), now_ms=10) is expected


def test_a_deleted_group_is_told_no_more_and_one_made_again_begins_anew(
    engine: Engine, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publish(engine, "m1")
    for group in (GROUP, "other"):
        engine.admin.declare_group(TOPIC, group, GroupConfig())
    stall(engine)
    stall(engine, "other")
    engine.deletion.delete_group(TOPIC, GROUP)

    def other_is_told() -> bool:
        clock.advance(CHECK_MS)
        return "other" in events(caplog, "group_stalled")

    until(other_is_told)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())

    assert events(caplog, "group_stalled") == ["other"]
    found = stall(engine)
    assert found is not None
    assert found.since_ms == clock.now_ms()
