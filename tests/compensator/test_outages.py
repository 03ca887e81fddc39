"""A broker that is out: nothing is claimed for it, no attempt is burnt, one small batch finds out when it is back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker
from compensator.admission.circuit_breaker import BreakerOptions
from compensator.admission.gate import Gates
from compensator.work.engines import InstanceEngines
from compensator.work.source import Source
from compensator.work.source_schedule import HeldBack
from outbox_core import ManualClock, Message
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import BrokerThrottled, BrokerUnavailable, SchemaMissing
from tests.broker_adapter.servers import ServerProcess
from tests.compensator.serving import Asked, Serve, Simulation, WatchedMetrics, gates_of, source_of
from tests.fixtures.databases import sqlite_database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop, open_shop

EXACT = BreakerOptions(backoff=Backoff(initial_ms=10_000, max_ms=60_000, jitter=0), probe_rows=3)
PROBE_MS = 10_000


class Outage:
    """A broker that is out while `on`, or for so many calls."""

    def __init__(self, *, calls: int | None = None) -> None:
        self.on = True
        self._calls_left = calls
        self.error: Exception = BrokerUnavailable("down")
        self.broker = RecordingBroker(self._rule)

    def _rule(self, _batch: Sequence[Message]) -> None:
        if self.on and self._calls_left != 0:
            self._calls_left = None if self._calls_left is None else self._calls_left - 1
            raise self.error


class Town:
    """Several shops whose messages go to one broker, on a clock of their own."""

    def __init__(self, folder: Path, closing: ExitStack, *, shops: int) -> None:
        self.clock = ManualClock()
        self.outage = Outage()
        gates = gates_of(self.clock, breaker=EXACT)
        self.shops = [self._shop(folder / str(number), closing) for number in range(shops)]
        made = [self._source(shop, gates, closing) for shop in self.shops]
        self.engines = [engines for _, engines in made]
        self.simulation = Simulation([source for source, _ in made], self.clock, batch_rows=50)

    def _shop(self, folder: Path, closing: ExitStack) -> Shop:
        folder.mkdir()
        return closing.enter_context(open_shop(sqlite_database(folder)))

    def _source(self, shop: Shop, gates: Gates, closing: ExitStack) -> tuple[Source, InstanceEngines]:
        source, engines = source_of(shop, self.outage.broker, gates=gates, clock=self.clock)
        closing.callback(engines.close)
        return source, engines

    @property
    def batches(self) -> list[int]:
        """How many messages each call of the broker had."""
        return [len(batch) for batch in self.outage.broker.batches]

    def attempts(self) -> list[int]:
        return [row["attempts"] for shop in self.shops for row in shop.rows()]


@pytest.fixture
def town(tmp_path: Path) -> object:
    with ExitStack() as closing:
        yield Town(tmp_path, closing, shops=3)


def test_an_outage_costs_one_batch_and_no_attempt_however_long_it_lasts(town: Town) -> None:
    for shop in town.shops:
        shop.add_due(200)

    town.simulation.run_until(PROBE_MS - 1)
    batches = list(town.batches)
    attempts = town.attempts()

    assert batches == [50]
    assert set(attempts) == {1}, "an attempt was burnt for the outage"
    assert all(isinstance(turn.outcome, HeldBack) for _, _, turn in town.simulation.turns)


def test_while_it_is_open_no_database_is_asked_again(town: Town) -> None:
    for shop in town.shops:
        shop.add_due(200)
    for _ in town.shops:
        town.simulation.step()
    asked = Asked(*(engine for made in town.engines for engine in (made.work, made.reads)))

    town.simulation.run_until(PROBE_MS - 1)

    assert asked.statements == []


def test_each_probe_is_one_small_batch_of_one_source(town: Town) -> None:
    for shop in town.shops:
        shop.add_due(200)

    town.simulation.run_until(PROBE_MS * (1 + 2 + 4) + 3)  # the first outage, and two probes that fail

    assert town.batches == [50, 3, 3, 3]
    assert set(town.attempts()) == {1}


def test_when_the_broker_is_back_everything_is_sent_at_the_stated_rate(town: Town) -> None:
    ids = [f"{number}-{row:04d}" for number in range(3) for row in range(1_000)]
    for number, shop in enumerate(town.shops):
        shop.add_due(1_000, prefix=str(number))
    town.simulation.run_until(PROBE_MS - 1)
    town.outage.on = False
    for shop in town.shops:
        shop.end_leases()

    stored: dict[int, int] = {}
    while len(town.outage.broker.stored) < len(ids):
        town.simulation.step()
        stored[town.clock.monotonic_ms()] = len(town.outage.broker.stored)

    back_ms = min(stored)
    first_second = max(count for at_ms, count in stored.items() if at_ms < back_ms + 1_000)
    assert sorted(town.outage.broker.ids) == ids
    assert town.outage.broker.duplicates == []
    assert first_second <= 1_000 + 100 + EXACT.probe_rows
    assert max(stored) - back_ms <= 3_000
    assert [shop.rows() for shop in town.shops] == [[], [], []]


def test_a_broker_that_asks_for_a_pause_gets_it(town: Town) -> None:
    town.outage.error = BrokerThrottled("slow down", retry_after_ms=45_000)
    town.shops[0].add_due(10)

    town.simulation.run_until(44_999)

    assert town.batches == [10]


def test_a_long_pause_hides_neither_how_old_the_oldest_rows_are_nor_that_a_database_fails(town: Town) -> None:
    town.outage.error = BrokerThrottled("slow down", retry_after_ms=3_600_000)
    for shop in town.shops:
        shop.add_due(200)
    town.simulation.run_until(10 * 60_000)
    polled = [(name, turn.oldest_due_us) for _, name, turn in town.simulation.turns if turn.oldest_due_us is not None]

    assert set(Counter(name for name, _ in polled).values()) == {1 + 10}, "each source is polled once a minute"
    assert all(age_us for _, age_us in polled)
    assert town.batches == [50]

    town.shops[0].execute("ALTER TABLE outbox_message RENAME TO hidden")
    with pytest.raises(SchemaMissing):
        town.simulation.run_until(11 * 60_000)


def test_sources_of_another_broker_are_not_held_up(tmp_path: Path, serve: Serve, metrics: WatchedMetrics) -> None:
    with ExitStack() as closing:
        out, well = Outage(), RecordingBroker()
        shops = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            shops.append(closing.enter_context(open_shop(sqlite_database(tmp_path / name))))
        breaker = BreakerOptions(backoff=Backoff(initial_ms=3_600_000, max_ms=3_600_000))
        for shop in shops:
            shop.add_due(300)

        service = serve(shops, [out.broker, well], breaker=breaker)
        service.start()
        well.wait_for(lambda it: len(it.stored) == 300)
        metrics.wait_for(lambda it: it.breakers == ["open"])
        brokers = {check.name: check.observed for check in service.health().checks}["brokers"]

        assert service.stop()
        assert brokers == f"broker {id(out.broker)}: circuit breaker open", "others are out, too"
        assert len(out.broker.batches) == 1


def test_all_sources_go_on_together_when_the_probe_of_one_has_been_taken(
    tmp_path: Path, serve: Serve, metrics: WatchedMetrics
) -> None:
    with ExitStack() as closing:
        outage = Outage(calls=3)
        shops = []
        for number in range(6):
            (tmp_path / str(number)).mkdir()
            shops.append(closing.enter_context(open_shop(sqlite_database(tmp_path / str(number)))))
        for number, shop in enumerate(shops):
            shop.add_due(40, prefix=str(number))
        service = serve(shops, outage.broker)
        service.start()
        # A turn is told of once its rows are put off: from then on nothing puts them off again.
        metrics.wait_for(lambda it: sum(turn.report.outage is not None for _, turn in it.turns) == 3)

        for shop in shops:
            shop.end_delays()
        outage.broker.wait_for(lambda it: len(it.stored) == 6 * 40)
        metrics.wait_for(lambda it: it.accepted == 6 * 40)

        assert service.stop()
        assert outage.broker.duplicates == []
        assert [shop.rows() for shop in shops] == [[]] * 6


@pytest.mark.processes
def test_a_real_broker_may_be_killed_and_come_back(
    mysql_shop: Shop, tmp_path: Path, serve: Serve, metrics: WatchedMetrics
) -> None:
    server = ServerProcess(tmp_path / "broker-data")
    server.start()
    broker = HttpBroker(server.url)
    try:
        mysql_shop.add_due(20, prefix="before")
        service = serve(mysql_shop, broker)
        service.start()
        metrics.wait_for(lambda it: it.accepted == 20)

        server.kill()
        ids = mysql_shop.add_due(300, prefix="during")
        metrics.wait_for(lambda it: it.breakers.count("open") >= 3)
        parked = [row for row in mysql_shop.rows() if row["state"] != "pending" or row["attempts"] > 2]
        server.start()
        mysql_shop.end_delays()
        metrics.wait_for(lambda it: it.accepted == 20 + len(ids))

        assert service.stop()
        assert parked == []
        assert mysql_shop.rows() == []
    finally:
        broker.close()
        server.kill()
