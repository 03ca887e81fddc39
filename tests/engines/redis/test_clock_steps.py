"""The clock of a Redis node steps by an hour, forward and back, while timers wait: none is lost, and none early."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from compensator.service.timer_worker import TimerWorker
from outbox_core.common.clock import SystemClock
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect, connect_timing
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import (
    DUE_HEADER,
    AckStatus,
    CancelStatus,
    Delivery,
    Message,
    NackStatus,
    PublishStatus,
)
from outbox_core.messages.timing_port import TimingStore
from tests.broker_adapter.redis.redis_server import HOST, wait_until
from tests.compensator.conftest import metrics, serve
from tests.compensator.serving import Serve, WatchedMetrics
from tests.compensator.timers.timer_workers import SOON, held, opened, publish, source_over, store_url, worker_over
from tests.engines.redis.stepped_server import SteppedServer, stepped_server
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["metrics", "serve", "sqlite_shop"]
HOUR_SECONDS = 3_600
WAIT_MS = 60_000


@pytest.fixture
def stepped() -> Iterator[SteppedServer]:
    """A durable server of the test's own."""
    with stepped_server() as server:
        yield server


# -- the broker ?store=timers -----------------------------------------------------------------------------------------


@pytest.fixture
def broker(stepped: SteppedServer) -> Iterator[Broker]:
    """The broker on it."""
    opened_broker = connect(f"redis://{HOST}:{stepped.server.port}/?store=timers&wait=0")
    yield opened_broker
    opened_broker.close()


def message(topic: str, *, delay_ms: int = 0) -> Message:
    deliver_at_ms = time.time_ns() // 1_000_000 + delay_ms if delay_ms else None
    return Message(id=new_message_id(), topic=topic, body=b"x" * 100, deliver_at_ms=deliver_at_ms)


def store(broker: Broker, *messages: Message) -> None:
    assert {result.status for result in broker.publish(list(messages))} == {PublishStatus.STORED}


def pull(broker: Broker, topic: str, count: int, **options: Any) -> list[tuple[Delivery, int]]:
    """So many deliveries, and when each came."""
    received: list[tuple[Delivery, int]] = []
    deadline = time.monotonic() + 4 * WAIT_MS / 1_000
    while len(received) < count:
        deliveries = broker.pull(topic, "g", wait_ms=WAIT_MS, **options)
        now_ms = time.time_ns() // 1_000_000
        received += [(delivery, now_ms) for delivery in deliveries]
        assert len(received) >= count or time.monotonic() < deadline, f"{len(received)} of {count} came"
    return received


def ack(broker: Broker, deliveries: Sequence[Delivery]) -> None:
    results = broker.ack([delivery.receipt for delivery in deliveries])
    assert set(results) == {AckStatus.ACKED}


def test_a_node_that_steps_an_hour_ahead_delivers_nothing_early(
    stepped: SteppedServer, broker: Broker, topic: str
) -> None:
    soon = [message(topic, delay_ms=8_000) for _ in range(20)]
    later = [message(topic, delay_ms=HOUR_SECONDS * 500) for _ in range(20)]
    broker.pull(topic, "g")
    store(broker, *soon, *later)

    stepped.step_to(HOUR_SECONDS)
    received = pull(broker, topic, len(soon))
    stepped.step_to(0)

    due_ms = {one.id: one.deliver_at_ms or 0 for one in soon}
    assert sorted(delivery.id for delivery, _ in received) == sorted(due_ms)
    assert min(at_ms - due_ms[delivery.id] for delivery, at_ms in received) >= 0
    ack(broker, [delivery for delivery, _ in received])
    assert set(broker.cancel([one.id for one in later])) == {CancelStatus.CANCELED}


def test_a_node_that_steps_an_hour_back_delivers_when_its_clock_is_right_again(
    stepped: SteppedServer, broker: Broker, topic: str
) -> None:
    soon = [message(topic, delay_ms=5_000) for _ in range(20)]
    broker.pull(topic, "g")
    store(broker, *soon)
    due_ms = max(one.deliver_at_ms or 0 for one in soon)

    stepped.step_to(-HOUR_SECONDS)
    wait_until(lambda: time.time_ns() // 1_000_000 > due_ms)
    while_behind = broker.pull(topic, "g")
    stepped.step_to(0)
    received = pull(broker, topic, len(soon))

    assert while_behind == []
    assert sorted(delivery.id for delivery, _ in received) == sorted(one.id for one in soon)
    ack(broker, [delivery for delivery, _ in received])
    assert broker.pull(topic, "g") == []


def test_deliveries_in_hand_are_settled_whatever_way_the_node_steps(
    stepped: SteppedServer, broker: Broker, topic: str
) -> None:
    messages = [message(topic) for _ in range(30)]
    store(broker, *messages)
    in_hand = [delivery for delivery, _ in pull(broker, topic, 10, max_messages=10)]

    stepped.step_to(-HOUR_SECONDS)
    ack(broker, in_hand[:5])
    nacked = broker.nack([delivery.receipt for delivery in in_hand[5:]], delay_ms=1)
    stepped.step_to(0)
    again = pull(broker, topic, 25)
    ack(broker, [delivery for delivery, _ in again])

    assert set(nacked) == {NackStatus.REQUEUED}
    assert sorted([delivery.id for delivery, _ in again] + [one.id for one in in_hand[:5]]) == sorted(
        one.id for one in messages
    )


def test_what_a_consumer_that_died_had_comes_again_at_once_when_the_node_steps_ahead(
    stepped: SteppedServer, broker: Broker, topic: str
) -> None:
    messages = [message(topic) for _ in range(10)]
    store(broker, *messages)
    lost = pull(broker, topic, 10, invisible_ms=HOUR_SECONDS * 500)

    stepped.step_to(HOUR_SECONDS)
    again = pull(broker, topic, 10)
    stepped.step_to(0)
    stale = broker.ack([delivery.receipt for delivery, _ in lost])
    ack(broker, [delivery for delivery, _ in again])

    assert sorted(delivery.id for delivery, _ in again) == sorted(one.id for one in messages)
    assert AckStatus.ACKED not in stale


# -- the timing store of the outbox -----------------------------------------------------------------------------------


@pytest.fixture
def timing(stepped: SteppedServer) -> Iterator[TimingStore]:
    """The timing store on it."""
    with opened(store_url(stepped.server)) as found:
        yield found


class DueTimes(PromptBroker):
    """A broker that notes what comes before its time."""

    def __init__(self) -> None:
        super().__init__()
        self.early: list[str] = []
        self.rule = self._note

    def _note(self, batch: Any) -> None:
        now_ms = time.time_ns() // 1_000_000
        self.early += [one.id for one in batch if int(one.headers[DUE_HEADER]) > now_ms]


def test_a_node_that_steps_ahead_makes_no_row_early(
    sqlite_shop: Shop, stepped: SteppedServer, timing: TimingStore
) -> None:
    target, url = DueTimes(), store_url(stepped.server)
    with worker_over(sqlite_shop, target, url):
        assert wait_until(lambda: all(one.complete for one in timing.figures()))
        soon = publish(sqlite_shop, target, url, count=30, delay=timedelta(seconds=5))
        later = publish(sqlite_shop, target, url, count=30, delay=timedelta(minutes=30))
        stepped.step_to(HOUR_SECONDS)
        target.wait_for(lambda seen: len(seen.stored) >= len(soon))
        assert wait_until(lambda: held(timing) == (len(later), 0))
        stepped.step_to(0)
        rows = sorted(row["id"] for row in sqlite_shop.rows())

    assert target.early == []
    assert sorted(target.ids) == sorted(one.id for one in soon)
    assert rows == sorted(one.id for one in later)
    assert target.duplicates == []


@pytest.mark.parametrize("ahead_seconds", [-HOUR_SECONDS, HOUR_SECONDS])
def test_rows_go_out_by_the_polls_while_a_node_that_stepped_has_their_timers_for_another_hour(
    sqlite_shop: Shop,
    stepped: SteppedServer,
    timing: TimingStore,
    serve: Serve,
    metrics: WatchedMetrics,
    ahead_seconds: int,
) -> None:
    target, url = DueTimes(), store_url(stepped.server)
    with source_over(sqlite_shop, target) as source:
        worker = TimerWorker(source, connect_timing(url), options=SOON, metrics=metrics, clock=SystemClock())
        worker.check()
        service = serve(sqlite_shop, target, timers=[worker])
        service.start()
        assert wait_until(lambda: all(one.complete for one in timing.figures()))
        messages = publish(sqlite_shop, target, url, count=30, delay=timedelta(seconds=5))

        stepped.step_to(ahead_seconds)
        stepped.step_to(-ahead_seconds)
        target.wait_for(lambda seen: len(seen.stored) >= len(messages))
        stepped.step_to(0)
        assert wait_until(lambda: not sqlite_shop.rows())
        assert service.stop()

    assert target.early == []
    assert sorted(target.ids) == sorted(one.id for one in messages)
    assert target.duplicates == []
