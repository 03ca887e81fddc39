"""What consumers hold unsettled is bounded, by group and in all; who got less for it is woken when there is room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.message import Delivery, GroupConfig, Message

TOPIC, GROUP = "orders", "billing"
type_of_open = Callable[..., Engine]


def publish(engine: Engine, count: int) -> None:
    engine.publisher.publish(
        [Message(id=f"m{number}", topic=TOPIC, body=b"", key=str(number % 3)) for number in range(count)]
    )


def pull(engine: Engine, group: str = GROUP, *, count: int = 100, invisible_ms: int = 1_000) -> list[Delivery]:
    return engine.puller.pull(TOPIC, group, max_messages=count, invisible_ms=invisible_ms)


def ack(engine: Engine, deliveries: list[Delivery]) -> None:
    engine.settler.ack([one.receipt for one in deliveries])


def test_a_group_that_holds_all_it_may_gets_nothing_new_until_it_settles(open_engine: type_of_open) -> None:
    engine = open_engine(group_in_hand_max=5)
    publish(engine, 20)

    held = pull(engine)
    assert [len(held), len(pull(engine)), len(pull(engine, "other"))] == [5, 0, 5]

    ack(engine, held[:2])
    assert [one.id for one in pull(engine)] == ["m5", "m6"]


def test_what_a_full_group_was_handed_before_comes_back_to_it(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(group_in_hand_max=3)
    publish(engine, 10)
    first = pull(engine)

    clock.advance(1_000)

    again = [delivery.id for _ in range(3) for delivery in pull(engine)]  # one by one: they expired together
    assert again == [delivery.id for delivery in first]


def test_all_groups_together_hold_no_more_than_they_may(open_engine: type_of_open) -> None:
    engine = open_engine(group_in_hand_min=0, in_hand_max=8)
    publish(engine, 20)

    held = {name: pull(engine, name, count=5) for name in ("a", "b", "c")}
    assert [len(one) for one in held.values()] == [5, 3, 0]

    ack(engine, held["a"])
    assert len(pull(engine, "c")) == 5


def test_no_group_is_kept_waiting_by_what_all_others_hold(open_engine: type_of_open) -> None:
    engine = open_engine(in_hand_max=8, group_in_hand_min=3)
    publish(engine, 20)
    held = [len(pull(engine, name)) for name in ("hog", "greedy")]

    late = pull(engine, "late")

    assert [*held, len(late), len(pull(engine, "late"))] == [8, 3, 3, 0]
    ack(engine, late[:2])
    assert len(pull(engine, "late")) == 2


def test_the_bounds_hold_after_a_restart(open_engine: type_of_open) -> None:
    engine = open_engine(group_in_hand_min=0, in_hand_max=8)
    publish(engine, 20)
    pull(engine, count=6)

    engine = open_engine(group_in_hand_min=0, in_hand_max=8)

    assert len(pull(engine, "other")) == 2


def test_a_settlement_wakes_the_groups_that_got_less_than_there_is(open_engine: type_of_open) -> None:
    engine = open_engine(group_in_hand_min=0, in_hand_max=5, group_in_hand_max=4)
    publish(engine, 20)
    held = pull(engine, "a")
    pull(engine, "b")
    woken: list[str] = []
    for name in ("a", "b", "c"):
        engine.wakeups.subscribe(TOPIC, name, lambda name=name: woken.append(name))  # type: ignore[misc]

    ack(engine, held[:1])
    assert sorted(woken) == ["a", "b"]

    woken.clear()
    ack(engine, held[1:2])
    assert woken == [], "nobody has asked since"


@pytest.mark.parametrize("how", ["nack", "seek"])
def test_a_death_and_a_seek_make_room_too(open_engine: type_of_open, how: str) -> None:
    engine = open_engine(group_in_hand_min=0, in_hand_max=3)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    publish(engine, 9)
    held = pull(engine)
    assert pull(engine, "other") == []
    woken: list[int] = []
    engine.wakeups.subscribe(TOPIC, "other", lambda: woken.append(1))

    if how == "nack":
        engine.settler.nack([one.receipt for one in held])
    else:
        engine.admin.seek(TOPIC, GROUP, to_offset=9)

    assert woken
    assert len(pull(engine, "other")) == 3


def test_what_was_redriven_and_is_not_ready_yet_takes_no_room(open_engine: type_of_open) -> None:
    engine = open_engine(group_in_hand_min=0, in_hand_max=6, group_in_hand_max=5)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    publish(engine, 12)
    for _ in range(2):
        engine.settler.nack([one.receipt for one in pull(engine)])
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=1)

    assert [one.id for one in pull(engine)] == ["m0", "m10", "m11"], "the first of ten is ready"
    engine = open_engine(group_in_hand_min=0, in_hand_max=6, group_in_hand_max=5)
    assert [len(pull(engine, name)) for name in ("other", "third")] == [3, 0]


def test_what_comes_back_is_counted_before_anything_new_is_handed_out(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(group_in_hand_min=0, in_hand_max=5)
    publish(engine, 20)
    engine.settler.nack([one.receipt for one in pull(engine, count=4)], delay_ms=50)
    clock.advance(50)

    assert [one.id for one in pull(engine)] == ["m0", "m1", "m2", "m3", "m4"]
    assert pull(engine, "other") == []


def test_what_waits_for_another_attempt_takes_room_of_its_own_group_alone(open_engine: type_of_open) -> None:
    engine = open_engine(group_in_hand_min=0, in_hand_max=5, group_in_hand_max=5)
    publish(engine, 20)
    held = pull(engine)
    assert pull(engine, "other") == []
    woken: list[int] = []
    engine.wakeups.subscribe(TOPIC, "other", lambda: woken.append(1))

    assert engine.settler.nack([one.receipt for one in held], delay_ms=1_000_000) == ["requeued"] * 5

    assert woken
    assert [len(pull(engine, name)) for name in (GROUP, "other", "third")] == [0, 5, 0]


def test_what_should_be_dead_and_finds_no_room_makes_room_in_hand_for_others(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(group_in_hand_min=0, in_hand_max=3, group_in_hand_max=3, dead_letters_bytes_max=1)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    publish(engine, 20)
    engine.settler.nack([one.receipt for one in pull(engine, count=1)])
    assert sum(len(pull(engine, count=1)) for _ in range(3)) == 3
    assert pull(engine, "other") == []
    woken: list[int] = []
    engine.wakeups.subscribe(TOPIC, "other", lambda: woken.append(1))

    clock.advance(1_000)
    assert pull(engine) == []

    assert woken
    assert len(pull(engine, "other")) == 3


def test_an_ordered_group_is_bounded_and_goes_on(open_engine: type_of_open) -> None:
    engine = open_engine(group_in_hand_max=2)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(ordered=True))
    publish(engine, 30)
    order: list[int] = []

    while held := pull(engine):
        assert len(held) <= 2
        order += [int(one.id[1:]) for one in held]
        ack(engine, held)

    assert sorted(order) == list(range(30))
    assert all([one for one in order if one % 3 == key] == list(range(key, 30, 3)) for key in range(3))


@pytest.mark.parametrize("name", ["in_hand_max", "group_in_hand_max", "dead_letters_bytes_max"])
def test_a_bound_of_nothing_is_refused(open_engine: type_of_open, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        open_engine(**{name: 0})
