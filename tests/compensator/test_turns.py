"""What a turn takes, and of which tables: batches filled from many of them, no table kept waiting by a full one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from sqlalchemy import Connection, select, update

from compensator.admission.rate_limiter import RateOptions
from compensator.service.source_upkeep import Upkeep, UpkeepOptions
from compensator.work.engines import InstanceEngines
from compensator.work.source import TABLES_ASKED_EVERY_MS
from compensator.work.source_schedule import DatabaseFailure, HeldBack, MoreRowsDue, NoRowsDue, PacingOptions
from compensator.work.source_turn import TurnReport
from outbox.store.bounded_counts import RETRYING_ATTEMPTS
from outbox_core import ManualClock, Message
from outbox_core.common.errors import BrokerThrottled, SchemaMissing
from tests.compensator.serving import (
    Asked,
    Simulation,
    Sources,
    WatchedMetrics,
    rows_left,
    split,
    turns_of,
)
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop

TEN_MINUTES_MS = 600_000
# As many as a source can have; MySQL takes a minute of a processor to make a thousand.
IDLE_TABLES = {"mariadb": 1_024, "mysql": 128}


def test_a_full_batch_goes_on_at_once(
    sqlite_shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    sqlite_shop.add_due(250)
    simulation = Simulation([sources(sqlite_shop, broker)], clock, batch_rows=10, batches_max=3)

    outcomes = [simulation.step().outcome for _ in range(9)]

    assert outcomes[:8] == [MoreRowsDue()] * 8
    assert isinstance(outcomes[8], NoRowsDue)
    assert clock.monotonic_ms() == 0, "time passed while there was work"
    assert len(broker.stored) == 250


def test_an_idle_source_costs_less_than_a_fifth_of_a_statement_a_second_with_gauges_and_all(
    shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock, metrics: WatchedMetrics
) -> None:
    engines = InstanceEngines(shop.engine.url)
    source = sources(shop, broker, engines=engines)
    upkeep = Upkeep(metrics, options=UpkeepOptions(), clock=clock, stopping=threading.Event())
    simulation = Simulation([source], clock)
    simulation.run_until(60_000)
    upkeep.count([source])
    asked = Asked(engines.work, engines.reads)

    began_ms = clock.monotonic_ms()
    while clock.monotonic_ms() < began_ms + TEN_MINUTES_MS:
        simulation.step()
        upkeep.count([source])

    seconds = (clock.monotonic_ms() - began_ms) / 1_000
    assert seconds / 10 <= len(asked.statements) <= 0.2 * seconds


def test_rows_that_the_broker_has_refused_for_a_minute_are_a_gauge_until_nothing_is_pending(
    shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock, metrics: WatchedMetrics
) -> None:
    tried, _ = shop.add_due(2)
    message = shop.tables.message
    with shop.engine.begin() as connection:
        connection.execute(update(message).where(message.c.id == tried).values(attempts=RETRYING_ATTEMPTS))
    source = sources(shop, broker)
    Upkeep(metrics, options=UpkeepOptions(), clock=clock, stopping=threading.Event()).count([source])

    counted = metrics.value("outbox_retrying_messages", source=source.name)
    turn = TurnReport(outcome=NoRowsDue(found=False), oldest_due_us=0, pending=False)
    metrics.record_turn(source.name, turn, seconds=0.1, now_seconds=1.0)

    assert counted == 1
    assert metrics.value("outbox_retrying_messages", source=source.name) == 0


def test_a_look_at_an_idle_source_is_one_round_trip(
    mysql_shop: Shop, broker: RecordingBroker, sources: Sources
) -> None:
    source = sources(mysql_shop, broker)
    source.poll()

    with mysql_shop.engine.connect() as connection:
        before = questions(connection)
        for _ in range(20):
            assert source.poll().due == []
        after = questions(connection)

    assert after - before == 20 + 1  # the last one is the question itself


def questions(connection: Connection) -> int:
    """How many statements all clients have sent to the server; pings are not among them."""
    [(_, figure)] = connection.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'Questions'")
    return int(figure)


@pytest.mark.slow
def test_idle_tables_of_a_source_cost_one_statement_a_look_however_many_they_are(
    mysql_shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    names = split(mysql_shop, range(IDLE_TABLES[mysql_shop.database.name]))
    engines = InstanceEngines(mysql_shop.engine.url)
    simulation = Simulation([sources(mysql_shop, broker, engines=engines)], clock)
    simulation.step()
    asked = Asked(engines.work, engines.reads)

    looks = [simulation.step() for _ in range(5)]
    idle = len(asked.statements)
    mysql_shop.add_due(2, table=names[77])
    simulation.step()

    assert clock.monotonic_ms() < TABLES_ASKED_EVERY_MS
    assert idle == len(looks)
    assert len(broker.stored) == 2


def test_a_row_is_sent_as_soon_as_its_lease_ends_though_the_source_was_idle(
    shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    pacing = PacingOptions(idle_ms=60_000)
    simulation = Simulation([sources(shop, broker, pacing=pacing)], clock, pacing=pacing)
    simulation.run_until(TEN_MINUTES_MS)
    store, row = shop.store, shop.add_due(1)
    with shop.engine.begin() as connection:  # as if its sender had died just now, 40 seconds before the lease ends
        store.claim(connection, row, token="e" * 32, lease_us=40_000_000)

    seen_at_ms = clock.monotonic_ms()
    seen = simulation.step()
    assert isinstance(seen.outcome, NoRowsDue)
    assert seen.outcome.next_due_ms is not None
    assert 0 < seen.outcome.next_due_ms <= 40_000
    looked_ms = simulation.turns[-1][0]
    simulation.step()
    next_ms = simulation.turns[-1][0]

    assert looked_ms - seen_at_ms <= 75_000
    assert next_ms - looked_ms <= seen.outcome.next_due_ms + 51


def test_a_batch_is_filled_from_many_tables(
    mysql_shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    names = split(mysql_shop, range(20))
    for name in names:
        mysql_shop.add_due(3, prefix=name, table=name)

    turn = Simulation([sources(mysql_shop, broker)], clock).step()

    assert (turn.report.batches, turn.report.accepted, len(broker.batches)) == (1, 60, 1)
    assert rows_left(mysql_shop, names) == 0
    assert mysql_shop.archived() == 60


def test_a_table_with_a_long_backlog_keeps_no_other_waiting(
    mysql_shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    full, other = split(mysql_shop, range(2))
    mysql_shop.add_due(500, prefix="full", table=full)
    late = mysql_shop.add_due(3, prefix="other", table=other)
    simulation = Simulation([sources(mysql_shop, broker)], clock, batch_rows=50, batches_max=1)

    simulation.step()
    simulation.step()

    assert set(late) <= set(broker.ids)
    assert len(broker.ids) <= 100


def test_tables_that_are_made_meanwhile_are_served_a_minute_later(
    mysql_shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    simulation = Simulation([sources(mysql_shop, broker)], clock)
    simulation.step()

    names = split(mysql_shop, [5])
    mysql_shop.add_due(2, table=names[0])
    simulation.run_until(TABLES_ASKED_EVERY_MS + 10_000)

    assert len(broker.stored) == 2


def test_a_table_that_went_away_fails_one_look_and_no_more(
    mysql_shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    [gone] = split(mysql_shop, [3])
    source = sources(mysql_shop, broker)
    source.poll()

    mysql_shop.execute(f"DROP TABLE {mysql_shop.database.schema}.{gone}")
    with pytest.raises(SchemaMissing):
        source.poll()

    assert source.poll().due == []


def test_a_rate_limit_is_kept_from_batch_to_batch(
    sqlite_shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    sqlite_shop.add_due(500)
    source = sources(sqlite_shop, broker, limit=RateOptions(rows_per_second=100))
    simulation = Simulation([source], clock)

    while len(broker.stored) < 500:
        simulation.step()

    # A second's worth at once, then a hundred a second.
    assert 4_000 <= clock.monotonic_ms() <= 4_400
    assert any(isinstance(turn.outcome, HeldBack) for _, _, turn in simulation.turns)


def test_no_row_is_claimed_beyond_the_rate(
    sqlite_shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock
) -> None:
    sqlite_shop.add_due(100)
    source = sources(sqlite_shop, broker, limit=RateOptions(rows_per_second=30))

    turn = turns_of(source, clock=clock, batch_rows=50).take(going_on=lambda: True)

    assert turn.report.claimed == 30
    assert [row["attempts"] for row in sqlite_shop.rows()].count(1) == 70


def test_one_row_at_fault_is_put_off_alone_and_the_rest_of_its_batch_is_sent(
    shop: Shop, sources: Sources, clock: ManualClock
) -> None:
    ids = shop.add_due(40)
    poison = ids[13]

    def rule(batch: Sequence[Message]) -> None:
        if any(message.id == poison for message in batch):
            raise RuntimeError("a defect of an adapter")

    broker = RecordingBroker(rule)

    turn = Simulation([sources(shop, broker)], clock).step()

    [left] = shop.rows()
    assert (left["id"], left["state"], left["token"]) == (poison, "pending", None)
    assert "delivery_defect" in left["last_error"]
    assert (turn.report.accepted, turn.report.retried) == (39, 1)
    assert 1 <= turn.report.defects <= 7


def test_an_adapter_that_fails_for_everything_is_asked_a_bounded_number_of_times_and_ever_more_seldom(
    sqlite_shop: Shop, sources: Sources, clock: ManualClock
) -> None:
    sqlite_shop.add_due(400)

    def rule(_batch: Sequence[Message]) -> None:
        raise RuntimeError("a defect of an adapter")

    broker = RecordingBroker(rule)
    simulation = Simulation([sources(sqlite_shop, broker)], clock, batch_rows=200, batches_max=1)

    first, second = simulation.step(), simulation.step()

    assert (first.outcome, second.outcome) == (DatabaseFailure(), DatabaseFailure())
    assert len(broker.batches) <= 2 * 32 + 2 * 200
    assert clock.monotonic_ms() > 0
    with sqlite_shop.engine.connect() as connection:
        message = sqlite_shop.tables.message
        assert set(connection.scalars(select(message.c.state))) == {"pending"}
        assert set(connection.scalars(select(message.c.token))) == {None}


def test_pacing_by_default_is_a_second_and_five() -> None:
    assert (PacingOptions().interval_ms, PacingOptions().idle_ms) == (1_000, 5_000)


def ask_for_an_hours_pause(_batch: Sequence[Message]) -> None:
    raise BrokerThrottled("slow down", retry_after_ms=3_600_000)


def test_a_source_whose_database_failed_is_polled_at_each_turn_until_it_answers_though_its_broker_asks_for_a_pause(
    sqlite_shop: Shop, sources: Sources, clock: ManualClock
) -> None:
    sqlite_shop.add_due(1)
    turns = turns_of(sources(sqlite_shop, RecordingBroker(ask_for_an_hours_pause)), clock=clock)

    def age_us() -> int | None:
        return turns.take(going_on=lambda: True).oldest_due_us

    assert age_us() is not None
    assert age_us() is None, "it was polled just now"

    sqlite_shop.execute("ALTER TABLE outbox_message RENAME TO hidden")
    clock.advance(60_000)
    for _ in range(2):
        with pytest.raises(SchemaMissing):
            age_us()

    sqlite_shop.execute("ALTER TABLE hidden RENAME TO outbox_message")
    assert age_us() is not None
    assert age_us() is None


def test_a_source_that_another_instance_served_is_polled_anew_though_its_broker_asks_for_a_pause(
    sqlite_shop: Shop, sources: Sources, clock: ManualClock
) -> None:
    sqlite_shop.add_due(1)
    turns = turns_of(sources(sqlite_shop, RecordingBroker(ask_for_an_hours_pause)), clock=clock)
    known = [turns.take(going_on=lambda: True).oldest_due_us is not None for _ in range(2)]

    turns.forget_poll()

    assert known == [True, False]
    assert turns.take(going_on=lambda: True).oldest_due_us is not None
