"""Where looks begin: where the last one saw that nothing is left, and all the same every row is found in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event

from compensator.work.engines import InstanceEngines
from compensator.work.source import MARGIN_US, WHOLE_EVERY_MS, WHOLE_SHARE, LowWaterMarks, PollResult
from outbox_core import ManualClock
from outbox_core.common.errors import BrokerUnavailable
from tests.compensator.serving import HOUR_US, Asked, Sources, turns_of
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop
from tests.traps.test_server_clock import ServerClock

NOW_US = 1_800_000_000_000_000
HOUR_S = 3_600
STEPS_S = (-HOUR_S, HOUR_S, -3, 3)
TABLES = ("one", "two")


def walked(
    *, now_us: int = NOW_US, took_ms: int = 0, ended_ms: int = 0, due: Mapping[str, int] | None = None
) -> PollResult:
    """What a look saw."""
    return PollResult(now_us=now_us, first_due_us=due or {}, took_ms=took_ms, ended_ms=ended_ms)


def after_whole(seen: PollResult) -> LowWaterMarks:
    """After a first look."""
    return LowWaterMarks().after(seen, tables=TABLES, whole=True)


def test_the_first_look_is_a_whole_one() -> None:
    assert LowWaterMarks().begin(now_ms=0) == {}


def test_the_next_one_begins_at_the_first_row_that_is_due_or_a_margin_behind_the_databases_clock() -> None:
    backlog_us = NOW_US - HOUR_US

    low_water = after_whole(walked(due={"one": backlog_us}))

    assert low_water.begin(now_ms=1) == {"one": backlog_us, "two": NOW_US - MARGIN_US}


def test_a_row_that_falls_due_later_or_just_now_moves_no_mark_above_the_margin() -> None:
    low_water = after_whole(walked(due={"one": NOW_US + HOUR_US, "two": NOW_US - 1}))

    assert low_water.begin(now_ms=1) == dict.fromkeys(TABLES, NOW_US - MARGIN_US)


@pytest.mark.parametrize("took_ms", [0, 100, WHOLE_EVERY_MS])
def test_a_whole_walk_comes_every_few_seconds_and_takes_a_twentieth_of_the_time_at_most(took_ms: int) -> None:
    due_ms = max(WHOLE_EVERY_MS, WHOLE_SHARE * took_ms)
    low_water = after_whole(walked(took_ms=took_ms, ended_ms=7))

    later = low_water.after(walked(ended_ms=8, took_ms=50_000), tables=TABLES, whole=False)

    assert later.begin(now_ms=7 + due_ms - 1) != {}
    assert later.begin(now_ms=7 + due_ms) == {}


@given(
    clocks=st.lists(st.integers(0, 10 * MARGIN_US), min_size=1),
    dues=st.lists(st.none() | st.integers(-MARGIN_US, 11 * MARGIN_US)),
)
def test_no_mark_is_ever_above_the_databases_clock_less_the_margin(clocks: list[int], dues: list[int | None]) -> None:
    low_water = LowWaterMarks()

    for number, now_us in enumerate(clocks):
        due_us = dues[number] if number < len(dues) else None
        seen = walked(now_us=now_us, due={} if due_us is None else {"one": due_us})
        low_water = low_water.after(seen, tables=TABLES, whole=number == 0)

        assert all(mark <= now_us - MARGIN_US for mark in low_water.marks_us.values())
        assert not low_water.hides(now_us)


def test_a_clock_that_has_stepped_back_below_a_mark_is_noticed() -> None:
    low_water = after_whole(walked())

    assert not low_water.hides(NOW_US - MARGIN_US)
    assert low_water.hides(NOW_US - MARGIN_US - 1)


# -- on a real database --------------------------------------------------------------------------------------------


@pytest.fixture
def server_clock(mysql_shop: Shop) -> ServerClock:
    """What time it is for the sessions of the compensator's engines, once they are given to run_on()."""
    return ServerClock(mysql_shop.other_engine())


@pytest.fixture
def engines(mysql_shop: Shop, server_clock: ServerClock) -> Iterator[InstanceEngines]:
    """A compensator's engines, whose sessions go by the server clock of the test."""
    made = InstanceEngines(mysql_shop.engine.url)
    for engine in (made.work, made.reads, mysql_shop.engine):
        event.listen(engine.pool, "checkout", server_clock.set)
    yield made
    made.close()


def test_a_row_that_committed_late_is_found_at_once_or_by_the_next_whole_walk(
    shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    turns = turns_of(sources(shop, broker), clock=clock)
    turns.take(going_on=lambda: True)
    late, later = shop.add_due(1, prefix="late"), shop.add_due(1, prefix="later", due_for_us=HOUR_US)

    turns.take(going_on=lambda: True)
    at_once = list(broker.ids)
    clock.advance(WHOLE_EVERY_MS)
    turns.take(going_on=lambda: True)

    assert at_once == late
    assert broker.ids == [*late, *later]


def test_a_backlog_below_the_mark_is_gone_on_with_at_once(
    shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    turns = turns_of(sources(shop, broker), clock=clock, batch_rows=10, batches_max=2)
    turns.take(going_on=lambda: True)
    ids = shop.add_due(70, due_for_us=HOUR_US)
    clock.advance(WHOLE_EVERY_MS)

    for _ in range(4):
        turns.take(going_on=lambda: True)

    assert broker.ids == ids


def test_a_clock_that_steps_back_costs_one_more_statement_and_hides_nothing(
    mysql_shop: Shop,
    broker: RecordingBroker,
    sources: Sources,
    clock: ManualClock,
    server_clock: ServerClock,
    engines: InstanceEngines,
) -> None:
    source = sources(mysql_shop, broker, engines=engines)
    source.poll()
    asked = Asked(engines.reads)

    server_clock.now_s -= HOUR_S
    [row_id] = mysql_shop.add_due(1)
    found = source.poll().due
    source.poll()

    assert [one.due_in_us < 0 for one in found] == [True]
    assert len(asked.statements) == 3
    assert [row["id"] for row in mysql_shop.rows()] == [row_id]


@pytest.mark.parametrize("round_number", range(3))
def test_every_row_is_found_whatever_commits_late_comes_back_or_steps(
    mysql_shop: Shop,
    sources: Sources,
    clock: ManualClock,
    server_clock: ServerClock,
    engines: InstanceEngines,
    random_seed: int,
    round_number: int,
) -> None:
    random, broker = Random(random_seed + round_number), RecordingBroker()
    turns = turns_of(sources(mysql_shop, broker, engines=engines, lease_ms=2_000), clock=clock)
    published: list[str] = []
    latest_s = server_clock.now_s

    def pass_time(seconds: float) -> None:
        server_clock.now_s += seconds
        clock.advance(int(seconds * 1_000))

    for number in range(80):
        match random.randrange(7):
            case 0 | 1:
                late_us = random.choice([-HOUR_US, -3_000_000, 0, 6_000_000, HOUR_US])
                published += mysql_shop.add_due(random.randrange(1, 4), prefix=f"{number:02d}", due_for_us=late_us)
            case 2:
                server_clock.now_s += random.choice(STEPS_S)
            case 3:
                broker.rule = None if broker.rule else _out
            case 4:
                _be_a_rival(mysql_shop, random)
            case 5:
                pass_time(random.choice([0.5, 4, 20]))
            case _:
                turns.take(going_on=lambda: True)
        latest_s = max(latest_s, server_clock.now_s)
    broker.rule = None
    server_clock.now_s = latest_s  # set right again: steps back may add up to more than the time that passes below
    for _ in range(30):
        pass_time(HOUR_S / 4)
        turns.take(going_on=lambda: True)

    assert sorted(set(broker.ids)) == sorted(published)
    assert mysql_shop.rows() == []


def _out(_batch: object) -> None:
    raise BrokerUnavailable("down")


def _be_a_rival(shop: Shop, random: Random) -> None:
    """Another compensator claims some rows, and dies, or gives them back, at once or for later."""
    token = f"{random.getrandbits(64):032x}"
    with shop.engine.begin() as connection:
        ids = shop.store.due_ids(connection, limit=2)
        shop.store.claim(connection, ids, token=token, lease_us=random.choice([0, 2_000_000]))
        match random.randrange(3):
            case 0:
                shop.store.release(connection, ids, token=token, delay_us=0, error=None)
            case 1:
                shop.store.reschedule(connection, ids, token=token, delay_us=3_000_000, error="down")
            case _:
                pass
