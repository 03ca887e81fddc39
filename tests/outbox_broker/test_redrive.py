"""Redriving dead letters at a rate: so many a second, visibly, over restarts; and what a second redrive does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import InvalidMessage
from outbox_core.common.rate_limit import RateLimit
from outbox_core.messages.message import GroupConfig, Message

TOPIC, GROUP = "orders", "billing"
type_of_open = Callable[..., Engine]


def with_dead(engine: Engine, count: int, *, first: int = 0) -> None:
    """A group with so many dead letters, m0 and on."""
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    engine.publisher.publish(
        [Message(id=f"m{number}", topic=TOPIC, body=b"x") for number in range(first, first + count)]
    )
    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=1_000)], delay_ms=0)


def pull_count(engine: Engine) -> int:
    found = engine.puller.pull(TOPIC, GROUP, max_messages=1_000)
    engine.settler.ack([one.receipt for one in found])
    return len(found)


def figures(engine: Engine) -> dict[str, Any]:
    return {name: engine.admin.group_figures(TOPIC, GROUP)[name] for name in ("dead", "redriving", "backlog")}


def test_so_many_a_second_are_ready_and_the_rest_is_told(engine: Engine, clock: ManualClock) -> None:
    with_dead(engine, 7)

    assert engine.admin.redrive(TOPIC, GROUP, per_second=3) == 7

    assert figures(engine) == {"dead": 0, "redriving": 4, "backlog": 7}
    assert [pull_count(engine) for _ in range(2)] == [3, 0]
    clock.advance(999)
    assert pull_count(engine) == 0
    clock.advance(1)
    assert pull_count(engine) == 3
    assert figures(engine) == {"dead": 0, "redriving": 1, "backlog": 1}
    clock.advance(1_000)
    assert pull_count(engine) == 1
    assert figures(engine) == {"dead": 0, "redriving": 0, "backlog": 0}


def test_the_rate_is_the_operator_s_where_the_request_names_none(open_engine: type_of_open) -> None:
    engine = open_engine(redrive_per_second=2)
    with_dead(engine, 5)

    engine.admin.redrive(TOPIC, GROUP)

    assert pull_count(engine) == 2


@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_a_redrive_goes_on_at_its_rate_after_a_restart(
    open_engine: type_of_open, clock: ManualClock, segment_bytes: int
) -> None:
    engine = open_engine(segment_bytes=segment_bytes)
    with_dead(engine, 300)
    engine.admin.redrive(TOPIC, GROUP, per_second=100)
    for _ in range(60):  # in the smaller segments, enough to begin new ones with checkpoints
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))

    engine = open_engine(segment_bytes=segment_bytes)

    assert figures(engine)["redriving"] == 200
    assert [pull_count(engine) for _ in range(2)] == [100, 0]
    with_dead(engine, 1, first=900)
    engine.admin.redrive(TOPIC, GROUP, per_second=100)
    clock.advance(1_000)
    assert pull_count(engine) == 100
    clock.advance(1_000)
    assert pull_count(engine) == 100, "the later one goes on behind"


def test_a_redriven_message_is_not_dead_and_a_second_redrive_passes_it_over(engine: Engine) -> None:
    with_dead(engine, 4)
    engine.admin.redrive(TOPIC, GROUP, per_second=1)

    assert engine.admin.redrive(TOPIC, GROUP) == 0
    assert engine.admin.redrive(TOPIC, GROUP, ids=["m3"]) == 0


def test_a_second_redrive_goes_on_behind_the_first(engine: Engine, clock: ManualClock) -> None:
    with_dead(engine, 4)

    engine.admin.redrive(TOPIC, GROUP, ids=["m0", "m1", "m2"], per_second=2)
    engine.admin.redrive(TOPIC, GROUP, ids=["m3"], per_second=2)

    assert pull_count(engine) == 2
    clock.advance(1_000)
    assert pull_count(engine) == 2


HOUR_MS = 3_600_000


def test_a_redrive_goes_on_after_a_step_of_the_clock_backwards(engine: Engine, clock: ManualClock) -> None:
    with_dead(engine, 5)
    engine.admin.redrive(TOPIC, GROUP, per_second=2)
    assert pull_count(engine) == 2

    clock.step_wall(-HOUR_MS)
    assert pull_count(engine) == 0, "and no faster than its rate"

    clock.advance(1_000)
    assert pull_count(engine) == 2
    clock.advance(1_000)
    assert pull_count(engine) == 1


@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("is_stepped_first", [True, False], ids=["stepped, started", "started, stepped"])
def test_a_redrive_goes_on_after_a_step_backwards_and_a_restart(
    open_engine: type_of_open, clock: ManualClock, segment_bytes: int, is_stepped_first: bool
) -> None:
    engine = open_engine(segment_bytes=segment_bytes)
    with_dead(engine, 300)
    engine.admin.redrive(TOPIC, GROUP, per_second=100)
    assert pull_count(engine) == 100
    for _ in range(60):  # in the smaller segments, enough to begin new ones with checkpoints
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))

    if is_stepped_first:
        clock.step_wall(-HOUR_MS)
        assert pull_count(engine) == 0
    engine = open_engine(segment_bytes=segment_bytes)
    if not is_stepped_first:
        clock.step_wall(-HOUR_MS)
    assert pull_count(engine) == 0

    clock.advance(1_000)
    assert pull_count(engine) == 100
    clock.advance(1_000)
    assert pull_count(engine) == 100


def test_a_redrive_begins_within_its_second_though_an_earlier_one_was_before_the_clock_stepped_back(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    with_dead(engine, 2)
    engine.admin.redrive(TOPIC, GROUP, per_second=2)
    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=2)], delay_ms=0)
    clock.advance(1_000)

    clock.step_wall(-HOUR_MS)
    engine.admin.redrive(TOPIC, GROUP, per_second=2)

    engine = open_engine()
    clock.advance(1_000)  # the rate holds for both together
    assert pull_count(engine) == 2


def test_a_pull_that_waits_gets_what_a_redrive_makes_ready_after_a_step_backwards(
    engine: Engine, clock: ManualClock
) -> None:
    with_dead(engine, 2)
    engine.admin.redrive(TOPIC, GROUP, per_second=1)
    assert pull_count(engine) == 1
    woken = threading.Event()
    unsubscribe = engine.wakeups.subscribe(TOPIC, GROUP, woken.set)

    clock.step_wall(-HOUR_MS)
    assert pull_count(engine) == 0
    woken.clear()
    clock.advance(1_000)

    assert woken.wait(60)
    assert pull_count(engine) == 1
    unsubscribe()


def test_a_redrive_of_many_is_written_in_parts(open_engine: type_of_open) -> None:
    engine = open_engine(redrive_batch_max=3)
    with_dead(engine, 8)

    assert engine.admin.redrive(TOPIC, GROUP, per_second=5) == 8

    assert pull_count(open_engine()) == 5


@pytest.mark.parametrize("rate", [0, -1, 1_000_001])
def test_a_rate_that_is_none_is_refused(engine: Engine, rate: int) -> None:
    with_dead(engine, 1)

    with pytest.raises(InvalidMessage, match="per_second"):
        engine.admin.redrive(TOPIC, GROUP, per_second=rate)


def test_a_seek_ends_a_redrive_of_what_lies_ahead(engine: Engine) -> None:
    with_dead(engine, 4)
    engine.admin.redrive(TOPIC, GROUP, per_second=1)

    engine.admin.seek(TOPIC, GROUP, to_offset=0)

    assert figures(engine) == {"dead": 0, "redriving": 0, "backlog": 4}
    assert pull_count(engine) == 4


def test_a_pace_gives_away_no_more_than_its_rate_in_any_second() -> None:
    pace = RateLimit()

    times = (0, 0, 0, 500, 1_600, 1_700, 1_800, 9_000)
    given = [pace.next_ms(now_ms, per_second=2, count_max=1)[0] for now_ms in times]

    assert given == [0, 0, 1_000, 1_000, 2_000, 2_000, 3_000, 9_000]
    assert [pace.next_ms(9_000, per_second=2, count_max=9) for _ in range(2)] == [(9_000, 1), (10_000, 2)]
    assert pace.next_ms(9_000, per_second=None, count_max=9) == (9_000, 9)
