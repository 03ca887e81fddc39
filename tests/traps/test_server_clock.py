"""A database server whose clock steps by an hour, back or on: nothing is lost or parked, and the delay is bounded.

The clock is moved for the sessions (`SET timestamp`, which UTC_TIMESTAMP(6) follows): a test says what time it is.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from compensator.core.batch_totals import BatchTotals
from outbox import Outbox, RelayPolicy, SenderLimits
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import background_engine
from outbox_core.common.errors import BrokerUnavailable
from tests.fixtures.table_scan import Scan
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Payment, Shop

HOUR_S = 3_600
LEASE_S = 60
MOST_S = HOUR_S + 2 * LEASE_S  # the bound: the step, and the lease that was running
STEPS = [-HOUR_S, HOUR_S]


class ServerClock:
    """What time it is for every session of an engine, from its next checkout on."""

    def __init__(self, engine: Engine) -> None:
        self.now_s = 1_800_000_000.0
        event.listen(engine.pool, "checkout", self.set)

    def set(self, raw: Any, *_: object) -> None:
        """Let a driver's connection have this time; a listener of a pool's checkout."""
        raw.query(f"SET timestamp = {self.now_s:.6f}")


class Stage:
    """A shop on a clock that the test moves; its sender is dead, its compensator passes when told to."""

    def __init__(self, shop: Shop, broker: RecordingBroker) -> None:
        self.shop = shop
        self.broker = broker
        self.engine = shop.other_engine()
        self.clock = ServerClock(self.engine)
        limits = SenderLimits(queue_rows_max=0, lease_ms=LEASE_S * 1_000, lease_margin_ms=1_000)
        self.box: Outbox = shop.box(broker, engine=self.engine, sender=limits, ordered={"ordered"})
        self.published = 0

    def publish(self, topic: str = "topic") -> None:
        """One committed message; its id is its number."""
        self.published += 1
        with Session(self.engine) as session, session.begin():
            session.add(Payment(id=self.published))
            self.box.publish(topic, "", key="k", message_id=f"{self.published:04d}", session=session)

    def scan(self) -> BatchTotals:
        """A compensator's pass."""
        background = background_engine(self.engine)
        try:
            return Scan(
                engine=background,
                store=self.shop.store,
                broker=self.broker,
                policy=RelayPolicy(outage_delay_ms=5_000),
                lease_ms=LEASE_S * 1_000,
            ).run()
        finally:
            background.dispose()

    def assert_all_sent(self) -> None:
        """Each once in the broker and once in the archive, whatever was repeated; nothing is left or parked."""
        assert sorted(self.broker.ids) == [f"{number:04d}" for number in range(1, self.published + 1)]
        assert self.shop.rows() == []
        assert self.shop.archived() == self.published


@pytest.fixture
def stage(mysql_shop: Shop, broker: RecordingBroker) -> Stage:
    """Before anything happened."""
    return Stage(mysql_shop, broker)


@pytest.mark.parametrize("step_s", STEPS)
def test_a_step_after_the_commit_delays_a_row_by_the_step_and_its_lease_at_most(stage: Stage, step_s: int) -> None:
    stage.publish()

    stage.clock.now_s += step_s
    claimed_after_step = stage.scan().claimed
    stage.clock.now_s += MOST_S
    stage.scan()

    assert claimed_after_step == (1 if step_s > 0 else 0)
    stage.assert_all_sent()


@pytest.mark.parametrize("step_s", STEPS)
def test_a_step_while_a_batch_is_sent_changes_nothing_for_its_owner(stage: Stage, step_s: int) -> None:
    stage.publish()
    stage.clock.now_s += LEASE_S + 1
    stage.broker.rule = lambda _batch: _step(stage, step_s)

    report = stage.scan()

    assert (report.accepted, report.stale) == (1, 0)
    stage.assert_all_sent()


def _step(stage: Stage, step_s: int) -> None:
    stage.clock.now_s += step_s


def test_a_step_on_lets_another_take_over_and_the_first_owner_changes_nothing(stage: Stage) -> None:
    stage.publish()
    stage.clock.now_s += LEASE_S + 1
    others: list[BatchTotals] = []

    def step_and_pass(_batch: object) -> None:
        stage.broker.rule = None
        stage.clock.now_s += HOUR_S
        others.append(stage.scan())

    stage.broker.rule = step_and_pass
    first = stage.scan()

    assert (others[0].accepted, others[0].stale) == (1, 0)
    assert first.stale == 1
    assert stage.broker.duplicates == ["0001"]
    stage.assert_all_sent()


@pytest.mark.parametrize("step_s", STEPS)
def test_a_step_during_an_outage_parks_nothing_and_counts_no_attempt(stage: Stage, step_s: int) -> None:
    def out(_batch: object) -> None:
        raise BrokerUnavailable("down")

    stage.publish()
    stage.clock.now_s += LEASE_S + 1
    stage.broker.rule = out
    stage.scan()
    stage.clock.now_s += step_s
    stage.scan()
    stage.broker.rule = None
    [row] = stage.shop.rows()
    stage.clock.now_s += MOST_S
    stage.scan()

    assert (row["state"], row["attempts"]) == ("pending", 1)
    stage.assert_all_sent()


@pytest.mark.parametrize("step_s", STEPS)
def test_an_ordered_key_keeps_its_order_over_a_step(stage: Stage, step_s: int) -> None:
    for number in range(6):
        if number == 3:
            stage.clock.now_s += step_s
        stage.publish("ordered")

    for _ in range(12):  # the younger ones are held until the older ones are gone
        stage.clock.now_s += MOST_S / 4
        stage.scan()

    assert stage.broker.ids == sorted(stage.broker.ids)
    stage.assert_all_sent()


@pytest.mark.parametrize("step_s", STEPS)
def test_a_step_moves_the_end_of_retention_by_the_step_and_no_more(stage: Stage, step_s: int) -> None:
    stage.publish()
    stage.clock.now_s += LEASE_S + 1
    stage.scan()
    archive = ArchiveStore(dialect=stage.engine.dialect, schema=stage.shop.database.schema)

    def purge(after_s: float) -> int:
        stage.clock.now_s += after_s
        with stage.engine.begin() as connection:
            return archive.purge(connection, older_than_us=10 * HOUR_S * 1_000_000, limit=10)

    gone = [purge(step_s), purge(8.5 * HOUR_S), purge(3 * HOUR_S)]

    assert gone == [0, 0, 1]


@pytest.mark.parametrize("round_number", range(3))
def test_any_sequence_of_commits_passes_outages_and_steps_sends_everything(
    stage: Stage, random_seed: int, round_number: int
) -> None:
    random = Random(random_seed + round_number)
    down = False

    def rule(_batch: object) -> None:
        if down:
            raise BrokerUnavailable("down")
        if random.random() < 0.2:
            stage.clock.now_s += random.choice(STEPS)

    stage.broker.rule = rule
    for _ in range(40):
        match random.randrange(5):
            case 0 | 1:
                stage.publish(random.choice(["topic", "ordered"]))
            case 2:
                stage.clock.now_s += random.choice([*STEPS, LEASE_S, 1])
            case 3:
                down = not down
            case _:
                stage.scan()
    stage.broker.rule = None
    for _ in range(60):
        stage.clock.now_s += HOUR_S / 2
        stage.scan()

    stage.assert_all_sent()
