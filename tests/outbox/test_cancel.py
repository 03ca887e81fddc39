"""box.cancel() with the business transaction, against the project's brokers and the delay service in front of one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.http import HttpBroker
from outbox import Outbox
from outbox.testing import AdvancingClock
from outbox_broker.delay_service.delay_proxy import DelayProxy
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import DiskStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.segments.local import LocalSegments
from outbox_core import Broker
from tests.broker_adapter.servers import serving
from tests.outbox.shop import NO_SENDER, Payment, Shop

TOPIC, GROUP = "reminders", "mail"
LATER = timedelta(hours=1)


@dataclass(frozen=True)
class Brokers:
    """Where a shop publishes, and where its messages come out."""

    inward: Broker
    outward: Broker
    clock: AdvancingClock

    def come_when_due(self, last: str) -> list[str]:
        """Let all fall due; the ids that come, up to the one that is due behind all others."""
        self.clock.advance(3 * LATER)
        ids: list[str] = []
        while last not in ids:
            deliveries = self.outward.pull(TOPIC, GROUP, wait_ms=60_000)
            assert deliveries, "the last one has not come"
            self.outward.ack([one.receipt for one in deliveries])
            ids += [one.id for one in deliveries]
        return ids


def _served(folder: Path, clock: AdvancingClock, stack: ExitStack) -> str:
    engine = Engine.open(folder, clock=clock)
    stack.callback(engine.close)
    return stack.enter_context(serving(engine)).url


def _delay_service(folder: Path, clock: AdvancingClock, stack: ExitStack) -> Brokers:
    target = HttpBroker(_served(folder / "target", clock, stack))
    syncs = TimedStorage(DiskStorage(), clock_s=time.perf_counter)
    segments = LocalSegments.open(folder / "delay", storage=syncs)
    stack.callback(segments.close)
    front = DelayProxy(DelayStore.open(segments), target, clock=clock, syncs=syncs)
    front.start()
    stack.callback(front.close)
    server = stack.enter_context(serving(front.served()))
    return Brokers(HttpBroker(server.url), target, clock)


@pytest.fixture(params=["embedded", "http", "delay service"])
def brokers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Brokers]:
    """Each of the brokers that can cancel."""
    clock = AdvancingClock()
    with ExitStack() as stack:
        match request.param:
            case "embedded":
                embedded = EmbeddedBroker(f"embedded:{tmp_path / 'data'}", clock=clock)
                made = Brokers(embedded, embedded, clock)
            case "http":
                url = _served(tmp_path / "data", clock, stack)
                made = Brokers(HttpBroker(url), HttpBroker(url), clock)
            case _:
                made = _delay_service(tmp_path, clock, stack)
        stack.callback(made.outward.close)
        stack.callback(made.inward.close)
        yield made


def outcomes(shop: Shop) -> dict[str, str]:
    """What the brokers answered, by kind of row; there is one of each kind that matters."""
    archive = shop.tables.archive
    with shop.engine.connect() as connection:
        return {row.id: row.outcome for row in connection.execute(select(archive.c.id, archive.c.outcome))}


def remind(box: Outbox, *ids: str, delay: timedelta = LATER) -> None:
    """Publish reminders."""

    @box.transactional
    def plan(_session: object) -> None:
        for one in ids:
            box.publish(TOPIC, one, message_id=one, delay=delay)

    plan()


def test_a_cancel_holds_if_and_only_if_its_transaction_commits(sqlite_shop: Shop, brokers: Brokers) -> None:
    box = sqlite_shop.box(brokers.inward)
    remind(box, "canceled", "kept")
    remind(box, "last", delay=2 * LATER)

    @box.transactional
    def call_off(session: object, message_id: str, *, number: int, fails: bool) -> None:
        session.add(Payment(id=number))  # type: ignore[attr-defined]
        box.cancel(message_id)
        if fails:
            raise ZeroDivisionError

    call_off("canceled", number=1, fails=False)
    with pytest.raises(ZeroDivisionError):
        call_off("kept", number=2, fails=True)
    assert box.close(timeout_ms=60_000)

    assert brokers.come_when_due("last") == ["kept", "last"]
    assert sqlite_shop.payments() == [1]


def test_a_message_canceled_in_the_transaction_that_published_it_never_comes(
    sqlite_shop: Shop, brokers: Brokers
) -> None:
    box = sqlite_shop.box(brokers.inward)

    @box.transactional
    def change_of_mind(_session: object) -> None:
        box.publish(TOPIC, "x", message_id="gone", delay=LATER)
        box.cancel("gone")

    change_of_mind()
    remind(box, "last", delay=2 * LATER)
    assert box.close(timeout_ms=60_000)

    assert brokers.come_when_due("last") == ["last"]
    assert "canceled" in outcomes(sqlite_shop).values()


def test_a_cancel_that_overtakes_its_publish_wins_when_the_compensator_sends_that_later(
    sqlite_shop: Shop, brokers: Brokers
) -> None:
    remind(sqlite_shop.box(brokers.inward, sender=NO_SENDER), "overtaken", "for-now")
    box = sqlite_shop.box(brokers.inward)

    @box.transactional
    def call_off(_session: object) -> None:
        box.cancel("overtaken")

    call_off()
    assert box.close(timeout_ms=60_000)
    [(_, answer)] = outcomes(sqlite_shop).items()
    assert answer == "unknown"
    sqlite_shop.end_leases()
    assert sqlite_shop.scan(brokers.inward).run().accepted == 2
    last_box = sqlite_shop.box(brokers.inward)
    remind(last_box, "last", delay=2 * LATER)
    assert last_box.close(timeout_ms=60_000)

    assert brokers.come_when_due("last") == ["for-now", "last"]
    assert brokers.inward.cancel(["overtaken"]) == ["canceled"]
