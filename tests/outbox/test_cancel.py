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

from broker.delay.front import DelayFront
from broker.delay.local_segments import LocalSegmentStore
from broker.delay.store import DelayStore
from broker.log.storage import DiskStorage
from broker.log.sync_times import TimedStorage
from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.http import HttpBroker
from messaging import Broker
from messaging.clock import SystemClock
from outbox import Outbox
from tests.broker_adapter.servers import served, serving
from tests.outbox.shop import NO_SENDER, Payment, Shop

TOPIC, GROUP = "reminders", "mail"
SOON = timedelta(milliseconds=400)


@dataclass(frozen=True)
class Brokers:
    """Where a shop publishes, and where its messages come out."""

    inward: Broker
    outward: Broker

    def came_until(self, last: str) -> list[str]:
        """The ids that come, up to one that falls due behind all others."""
        ids: list[str] = []
        while last not in ids:
            deliveries = self.outward.pull(TOPIC, GROUP, wait_ms=10_000)
            assert deliveries, "the last one has not come"
            self.outward.ack([one.receipt for one in deliveries])
            ids += [one.id for one in deliveries]
        return ids


def _delay_service(folder: Path, stack: ExitStack) -> Brokers:
    target = HttpBroker(stack.enter_context(served(folder / "target")).url)
    syncs = TimedStorage(DiskStorage(), clock_s=time.perf_counter)
    segments = LocalSegmentStore.open(folder / "delay", storage=syncs)
    stack.callback(segments.close)
    front = DelayFront(DelayStore.open(segments), target, clock=SystemClock(), syncs=syncs)
    front.start()
    stack.callback(front.close)
    server = stack.enter_context(serving(front))
    return Brokers(HttpBroker(server.url), target)


@pytest.fixture(params=["embedded", "http", "delay service"])
def brokers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Brokers]:
    """Each of the brokers that can cancel."""
    with ExitStack() as stack:
        match request.param:
            case "embedded":
                embedded = EmbeddedBroker(f"embedded:{tmp_path / 'data'}")
                made = Brokers(embedded, embedded)
            case "http":
                url = stack.enter_context(served(tmp_path / "data")).url
                made = Brokers(HttpBroker(url), HttpBroker(url))
            case _:
                made = _delay_service(tmp_path, stack)
        stack.callback(made.outward.close)
        stack.callback(made.inward.close)
        yield made


def outcomes(shop: Shop) -> dict[str, str]:
    """What the brokers answered, by kind of row; there is one of each kind that matters."""
    archive = shop.tables.archive
    with shop.engine.connect() as connection:
        return {row.id: row.outcome for row in connection.execute(select(archive.c.id, archive.c.outcome))}


def remind(box: Outbox, *ids: str, delay: timedelta = SOON) -> None:
    """Publish reminders, and wait until the broker has them."""

    @box.transactional
    def plan(_session: object) -> None:
        for one in ids:
            box.publish(TOPIC, one, message_id=one, delay=delay)

    plan()


def test_a_cancel_holds_if_and_only_if_its_transaction_commits(sqlite_shop: Shop, brokers: Brokers) -> None:
    box = sqlite_shop.box(brokers.inward)
    remind(box, "canceled", "kept", delay=timedelta(seconds=3))
    remind(box, "last", delay=timedelta(seconds=3) + SOON)

    @box.transactional
    def call_off(session: object, message_id: str, *, number: int, fails: bool) -> None:
        session.add(Payment(id=number))  # type: ignore[attr-defined]
        box.cancel(message_id)
        if fails:
            raise ZeroDivisionError

    call_off("canceled", number=1, fails=False)
    with pytest.raises(ZeroDivisionError):
        call_off("kept", number=2, fails=True)

    assert brokers.came_until("last") == ["kept", "last"]
    assert sqlite_shop.payments() == [1]


def test_a_message_canceled_in_the_transaction_that_published_it_never_comes(
    sqlite_shop: Shop, brokers: Brokers
) -> None:
    box = sqlite_shop.box(brokers.inward)

    @box.transactional
    def change_of_mind(_session: object) -> None:
        box.publish(TOPIC, "x", message_id="gone", delay=SOON)
        box.cancel("gone")

    change_of_mind()
    remind(box, "last", delay=2 * SOON)

    assert brokers.came_until("last") == ["last"]
    assert box.close(timeout_ms=20_000)
    assert "canceled" in outcomes(sqlite_shop).values()


def test_a_cancel_that_overtakes_its_publish_wins_when_the_compensator_sends_that_later(
    sqlite_shop: Shop, brokers: Brokers
) -> None:
    remind(sqlite_shop.box(brokers.inward, sender=NO_SENDER), "overtaken", "for-now", delay=SOON)
    box = sqlite_shop.box(brokers.inward)

    @box.transactional
    def call_off(_session: object) -> None:
        box.cancel("overtaken")

    call_off()
    assert box.close(timeout_ms=20_000)
    [(_, answer)] = outcomes(sqlite_shop).items()
    assert answer == "unknown"
    sqlite_shop.end_leases()
    assert sqlite_shop.scan(brokers.inward).run().accepted == 2
    remind(sqlite_shop.box(brokers.inward), "last", delay=2 * SOON)

    assert brokers.came_until("last") == ["for-now", "last"]
    assert brokers.inward.cancel(["overtaken"]) == ["canceled"]
