"""Redriving dead letters at a rate: so many a second, visibly, over restarts; and what a second redrive does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import InvalidMessage, StorageFailed
from outbox_core.common.rate_limit import RateLimit
from outbox_core.journal import journal
from outbox_core.journal.dead_letter_records import RedriveStopped
from outbox_core.messages.message import DeadLetter, GroupConfig, Message
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.failing_storage import FailingStorage

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

    assert engine.dead_letters.redrive(TOPIC, GROUP, per_second=3) == 7

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

    engine.dead_letters.redrive(TOPIC, GROUP)

    assert pull_count(engine) == 2


@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_a_redrive_goes_on_at_its_rate_after_a_restart(
    open_engine: type_of_open, clock: ManualClock, segment_bytes: int
) -> None:
    engine = open_engine(segment_bytes=segment_bytes)
    with_dead(engine, 300)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=100)
    for _ in range(60):  # in the smaller segments, enough to begin new ones with checkpoints
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))

    engine = open_engine(segment_bytes=segment_bytes)

    assert figures(engine)["redriving"] == 200
    assert [pull_count(engine) for _ in range(2)] == [100, 0]
    with_dead(engine, 1, first=900)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=100)
    clock.advance(1_000)
    assert pull_count(engine) == 100
    clock.advance(1_000)
    assert pull_count(engine) == 100, "the later one goes on behind"


def test_a_redriven_message_is_not_dead_and_a_second_redrive_passes_it_over(engine: Engine) -> None:
    with_dead(engine, 4)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=1)

    assert engine.dead_letters.redrive(TOPIC, GROUP) == 0
    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=["m3"]) == 0


def test_a_second_redrive_goes_on_behind_the_first(engine: Engine, clock: ManualClock) -> None:
    with_dead(engine, 4)

    engine.dead_letters.redrive(TOPIC, GROUP, ids=["m0", "m1", "m2"], per_second=2)
    engine.dead_letters.redrive(TOPIC, GROUP, ids=["m3"], per_second=2)

    assert pull_count(engine) == 2
    clock.advance(1_000)
    assert pull_count(engine) == 2


HOUR_MS = 3_600_000


def test_a_redrive_goes_on_after_a_step_of_the_clock_backwards(engine: Engine, clock: ManualClock) -> None:
    with_dead(engine, 5)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=2)
    assert pull_count(engine) == 2

    clock.step_wall(-HOUR_MS)
    assert pull_count(engine) == 0, "and no faster than its rate"

    clock.advance(1_000)
    assert pull_count(engine) == 2
    clock.advance(1_000)
    assert pull_count(engine) == 1


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted after each step"])
def test_a_redrive_keeps_its_pace_while_the_clock_steps_back_and_forth(
    open_engine: type_of_open, clock: ManualClock, restarts: bool
) -> None:
    engine = open_engine()
    with_dead(engine, 12)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=1)
    assert pull_count(engine) == 1

    for left, step_ms in zip(range(10, 0, -1), [-HOUR_MS, HOUR_MS, HOUR_MS, -2 * HOUR_MS, 0] * 2, strict=True):
        clock.step_wall(step_ms)
        assert pull_count(engine) == 0, "no faster than its rate"
        if restarts:
            engine = open_engine()
        assert figures(engine)["redriving"] == left + 1
        clock.advance(999)
        assert pull_count(engine) == 0
        clock.advance(1)
        assert pull_count(engine) == 1, "and no slower"

    assert figures(engine) == {"dead": 0, "redriving": 1, "backlog": 1}


def test_a_step_of_the_clock_moves_no_message_that_waits_for_its_own_time(engine: Engine, clock: ManualClock) -> None:
    with_dead(engine, 1)
    engine.admin.seek(TOPIC, GROUP, to_offset=1)
    engine.publisher.publish([Message(id="due", topic=TOPIC, body=b"", deliver_at_ms=clock.now_ms() + 1_000)])
    clock.advance(1_000)
    engine.publisher.cancel([])  # what is due has taken its place in the topic
    clock.step_wall(-HOUR_MS)
    assert pull_count(engine) == 0, "it is put off until it is due by the new clock"

    clock.step_wall(HOUR_MS)

    assert pull_count(engine) == 1


@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("is_stepped_first", [True, False], ids=["stepped, started", "started, stepped"])
def test_a_redrive_goes_on_after_a_step_backwards_and_a_restart(
    open_engine: type_of_open, clock: ManualClock, segment_bytes: int, is_stepped_first: bool
) -> None:
    engine = open_engine(segment_bytes=segment_bytes)
    with_dead(engine, 300)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=100)
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
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=2)
    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=2)], delay_ms=0)
    clock.advance(1_000)

    clock.step_wall(-HOUR_MS)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=2)

    engine = open_engine()
    clock.advance(1_000)  # the rate holds for both together
    assert pull_count(engine) == 2


def test_a_pull_that_waits_gets_what_a_redrive_makes_ready_after_a_step_backwards(
    engine: Engine, clock: ManualClock
) -> None:
    with_dead(engine, 2)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=1)
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


def letters(engine: Engine) -> list[DeadLetter]:
    return engine.admin.dead(TOPIC, GROUP, limit=1_000)[0]


def die(engine: Engine, clock: ManualClock, count: int) -> list[DeadLetter]:
    """So many dead letters, of three reasons and times; returns them as they are listed."""
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))
    engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x") for number in range(count)])
    for reason in ("slow", None):
        receipts = [one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=1_000)]
        for part in range(3):
            engine.settler.nack(receipts[part::3], delay_ms=0, reason=reason or f"broken {part}")
            clock.advance(1)
    return letters(engine)


@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_what_waits_for_the_rate_of_a_redrive_that_is_stopped_is_dead_as_it_was(
    open_engine: type_of_open, clock: ManualClock, folder: Path, segment_bytes: int
) -> None:
    engine = open_engine(segment_bytes=segment_bytes)
    before = die(engine, clock, 30)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=5)
    held = engine.puller.pull(TOPIC, GROUP, max_messages=3)
    clock.advance(1_000)
    for _ in range(60):  # in the smaller segments, enough to begin new ones with checkpoints
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=2))
    engine = open_engine(segment_bytes=segment_bytes)
    assert engine.admin.group_figures(TOPIC, GROUP)["redrive_left_ms"] == 4_000

    assert engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops") == 20

    for _ in range(2):
        assert letters(engine) == before[10:], "with their reasons, attempts and times"
        assert engine.admin.group_figures(TOPIC, GROUP)["in_flight"] == 3
        assert figures(engine) == {"dead": 20, "redriving": 0, "backlog": 7}, "what is ready stays so"
        assert engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops") == 0
        engine = open_engine(segment_bytes=segment_bytes)
    assert engine.settler.ack([one.receipt for one in held]) == ["acked"] * 3
    clock.advance(HOUR_MS)
    assert pull_count(engine) == 7
    [stopped] = [one for one in actions_of(folder) if isinstance(one, RedriveStopped)]
    assert (stopped.by, stopped.at_ms, stopped.entries) == ("ops", clock.now_ms() - HOUR_MS, [(10, 20)])


def test_a_redrive_after_a_stop_begins_with_the_next_second(engine: Engine, clock: ManualClock) -> None:
    with_dead(engine, 10)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=2)
    assert pull_count(engine) == 2
    clock.advance(500)
    engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops")

    assert engine.dead_letters.redrive(TOPIC, GROUP, per_second=3) == 8

    assert pull_count(engine) == 0, "the second is used up"
    clock.advance(500)
    assert [pull_count(engine) for _ in range(2)] == [3, 0]


def test_a_stop_that_comes_while_a_redrive_is_written_ends_it(folder: Path) -> None:
    class StoppingClock(ManualClock):
        """Has somebody stop the redrive at the moment in which its third part is to be written."""

        stop: Callable[[], object] | None = None

        def now_ms(self) -> int:
            stop, group = self.stop, engine.context.state.group(TOPIC, GROUP) if self.stop else None
            if stop is not None and group is not None and group.unsettled.redriven == 2:
                self.stop = None
                stop()
            return super().now_ms()

    stopping_clock = StoppingClock()
    with closing(Engine.open(folder, clock=stopping_clock, options=EngineOptions(redrive_batch_max=1))) as engine:
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x") for number in range(9)])
        held = [one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=9)]
        engine.settler.ack(held[1::2])
        engine.settler.nack(held[::2])
        stopping_clock.stop = lambda: engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops")

        assert engine.dead_letters.redrive(TOPIC, GROUP, per_second=1) == 3

        assert [one.id for one in letters(engine)] == ["m2", "m6", "m8"], "and what comes after the third part"


@pytest.mark.parametrize("attempt", range(3))
def test_a_stop_beside_deliveries_leaves_each_message_delivered_or_dead(
    open_engine: type_of_open, clock: ManualClock, attempt: int
) -> None:
    engine = open_engine()
    with_dead(engine, 300)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=10)
    delivered: list[str] = []
    first, is_stopped = threading.Event(), threading.Event()

    def consume() -> None:
        while True:
            was_stopped = is_stopped.is_set()
            clock.advance(200)
            found = engine.puller.pull(TOPIC, GROUP, max_messages=7)
            engine.settler.ack([one.receipt for one in found])
            delivered.extend(one.id for one in found)
            if len(delivered) > 50 * attempt:
                first.set()
            if was_stopped and not found:
                return

    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    assert first.wait(120)
    stopped = engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops")
    is_stopped.set()
    for consumer in consumers:
        consumer.join(120)

    dead = [one.id for one in letters(engine)]
    assert len(dead) == stopped
    assert sorted(delivered + dead) == sorted(f"m{number}" for number in range(300))


def test_a_stop_that_finds_no_room_on_the_disk_stops_nothing(open_engine: type_of_open) -> None:
    storage = FailingStorage()
    engine = open_engine(storage=storage)
    with_dead(engine, 5)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=1)
    storage.room_bytes = 3

    with pytest.raises(StorageFailed):
        engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops")

    storage.mend()
    assert figures(engine) == {"dead": 0, "redriving": 4, "backlog": 5}
    assert engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops") == 4


def test_a_seek_forgets_how_redriven_messages_died(engine: Engine) -> None:
    with_dead(engine, 4)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=1)
    engine.admin.seek(TOPIC, GROUP, to_offset=0)

    assert engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops") == 0

    assert pull_count(engine) == 4
    assert engine.context.state.dead_letter_memory.size_bytes == 0


def test_a_redrive_of_many_is_written_in_parts(open_engine: type_of_open) -> None:
    engine = open_engine(redrive_batch_max=3)
    with_dead(engine, 8)

    assert engine.dead_letters.redrive(TOPIC, GROUP, per_second=5) == 8

    assert pull_count(open_engine()) == 5


def test_a_redrive_of_many_takes_a_thousand_runs_at_a_time(engine: Engine, folder: Path) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"") for number in range(5_000)])
    held = [one.receipt for _ in range(5) for one in engine.puller.pull(TOPIC, GROUP, max_messages=1_000)]
    engine.settler.ack(held[::2])
    engine.settler.nack(held[1::2])

    assert engine.dead_letters.redrive(TOPIC, GROUP, per_second=400) == 2_500

    assert figures(engine) == {"dead": 0, "redriving": 2_100, "backlog": 2_500}
    redriven = [one for one in actions_of(folder) if isinstance(one, journal.Redriven)]
    assert [len(one.entries) for one in redriven] == [1_000, 1_000, 500]


def test_an_id_that_is_dead_twice_is_redriven_twice(open_engine: type_of_open) -> None:
    engine = open_engine(dedup_messages_max=1, dead_search_messages_max=1)
    for first in (0, 1, 0):
        with_dead(engine, 1, first=first)

    assert engine.dead_letters.redrive(TOPIC, GROUP, ids=["m0"]) == 2

    assert [one.id for one in engine.admin.dead(TOPIC, GROUP)[0]] == ["m1"]


@pytest.mark.parametrize("rate", [0, -1, 1_000_001])
def test_a_rate_that_is_none_is_refused(engine: Engine, rate: int) -> None:
    with_dead(engine, 1)

    with pytest.raises(InvalidMessage, match="per_second"):
        engine.dead_letters.redrive(TOPIC, GROUP, per_second=rate)


def test_a_seek_ends_a_redrive_of_what_lies_ahead(engine: Engine) -> None:
    with_dead(engine, 4)
    engine.dead_letters.redrive(TOPIC, GROUP, per_second=1)

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
