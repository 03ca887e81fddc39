"""Timer workers over shops and a real Redis, for the tests of this folder. Not fixtures."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import timedelta

from sqlalchemy import update

from compensator.service.metrics import CompensatorMetrics
from compensator.service.timer_worker import TimerWorker, TimerWorkerOptions
from compensator.work.source import Source
from outbox_core import Broker, Message, SystemClock
from outbox_core.common.backoff import Backoff
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import TimedRow, Timer, TimingStore
from tests.broker_adapter.redis.redis_server import HOST, RedisServer
from tests.compensator.serving import QUICK_BREAKER, gates_of, source_of
from tests.outbox.shop import Shop

SLOTS = 4
HOUR = timedelta(hours=1)
PATIENCE_MS = 60_000
SOON = TimerWorkerOptions(
    idle_ms=200, held_ms=20, rebuild_again_ms=50, failure=Backoff(initial_ms=50, max_ms=200, jitter=0)
)


def store_url(server: RedisServer) -> str:
    """The timing store on a server."""
    return f"redis://{HOST}:{server.port}/?name=shop&slots={SLOTS}&timeout_ms=2000"


def patient(url: str) -> str:
    """The same store with more time to answer, for what no test expects to fail."""
    return re.sub(r"timeout_ms=\d+", f"timeout_ms={PATIENCE_MS}", url)


@contextlib.contextmanager
def opened(url: str) -> Iterator[TimingStore]:
    """A store of the test's own, which waits for answers for longer than those that are under test."""
    store = connect_timing(patient(url))
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def source_over(shop: Shop, broker: Broker) -> Iterator[Source]:
    """A source over a shop, with gates of its own."""
    gates = gates_of(SystemClock(), breaker=QUICK_BREAKER)
    source, engines = source_of(shop, broker, gates=gates)
    try:
        yield source
    finally:
        engines.close()


@contextlib.contextmanager
def worker_over(
    shop: Shop,
    broker: Broker,
    url: str,
    *,
    options: TimerWorkerOptions = SOON,
    metrics: CompensatorMetrics | None = None,
    slots: int | None = None,
) -> Iterator[TimerWorker]:
    """A worker that runs for the length of a block, with all slots or the first of them."""
    with source_over(shop, broker) as source:
        worker = TimerWorker(
            source, connect_timing(url), options=options, metrics=CompensatorMetrics(), clock=SystemClock()
        )
        worker.assign({resource.name for resource in worker.resources[:slots]})
        worker.start()
        try:
            yield worker
        finally:
            assert worker.stop(timeout_ms=60_000)


def timer(shop: Shop, row_id: str, *, in_ms: int = 0) -> Timer:
    """A timer of a row of the shop's table."""
    return Timer(TimedRow(shop.store.table.name, row_id), time.time_ns() // 1_000_000 + in_ms)


def held(store: TimingStore) -> tuple[int, int]:
    """How many timers a store has, and how many of them are due."""
    figures = store.figures()
    return sum(one.timers for one in figures), sum(one.due for one in figures)


def move(shop: Shop, *, in_ms: int) -> None:
    """Set when all rows are due, without their timers."""
    message = shop.tables.message
    due_ms = time.time_ns() // 1_000_000 - 2 + in_ms
    with shop.engine.begin() as connection:
        connection.execute(update(message).values(due_at_us=due_ms * 1_000, deliver_at_ms=due_ms))


def publish(shop: Shop, broker: Broker, url: str, *, count: int = 1, delay: timedelta = HOUR) -> list[Message]:
    """Schedule messages, and have their timers added."""
    box = shop.box(broker, timing=patient(url))
    with box.begin():
        messages = [box.publish("reminder", {"n": number}, delay=delay) for number in range(count)]
    assert box.close()
    return messages
