"""Measures how late scheduled rows are sent with a timing store, and by the polls of the compensator alone.

    python -m benchmarks.delay.timing_store [--rate 1000] [--seconds 20] [--timers 1000000] [--quick]

`lateness_ms`: from a row's due time to the return of publish(), of rows of 500 bytes that are due one after the other
at the rate; the broker is `outbox broker serve` on this machine, and each commit and publish is synced. `polls` is the
service with its defaults; `timing` the same with a worker on Redis (appendonly, everysec), which also polls; the rows'
timers are added before. `rebuild`: how long an empty Redis takes to have a timer for each of so many pending rows,
without a bound and with the default one, and its bytes a timer.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final

from sqlalchemy import Engine, text

from benchmarks.harness import backlog, report, servers
from broker_adapter.http import HttpBroker
from compensator.admission.circuit_breaker import BreakerOptions
from compensator.admission.gate import Gates
from compensator.service.metrics import CompensatorMetrics
from compensator.service.service import CompensatorService, ServiceOptions
from compensator.service.timer_worker import TimerWorker, TimerWorkerOptions
from compensator.work.claim_and_relay import Batches, ClaimOptions
from compensator.work.engines import InstanceEngines
from compensator.work.source import Source, source_name
from compensator.work.timer_rebuild import RebuildOptions, rebuild_timers
from outbox.delivery.relay import RelayPolicy
from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox_core.common.clock import SystemClock
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.message import Message, PublishResult
from outbox_core.messages.timing_port import TimedRow, Timer, TimingStore
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server

AHEAD_SECONDS: Final = 10
"""From the filling of the table to the first due time."""
WAIT_SECONDS: Final = 300
UNBOUNDED: Final = 10**9
HOUR_MS: Final = 3_600_000


class LatenessBroker(HttpBroker):
    """The broker, noting how late each message was when it was accepted."""

    def __init__(self, url: str, *, expected: int) -> None:
        super().__init__(url)
        self._expected = expected
        self.late_ms: list[float] = []
        self.done = threading.Event()

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        results = super().publish(batch)
        now_ms = time.time_ns() / 1_000_000
        self.late_ms += [now_ms - (message.deliver_at_ms or 0) for message in batch]
        if len(self.late_ms) >= self._expected:
            self.done.set()
        return results


def main() -> None:
    """Measure, and print."""
    parser = report.arguments(__doc__, rounds=1)
    parser.add_argument("--rate", type=int, default=1_000, help="rows that are due each second")
    parser.add_argument("--seconds", type=int, default=20, help="for so long")
    parser.add_argument("--timers", type=int, default=1_000_000, help="rows of the rebuild")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rate, chosen.seconds, chosen.timers = 50, 2, 2_000
    with servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database:
        server = database.settings()
        upgrade(database.url, schema=database.schema)
        results: dict[str, Any] = {"lateness_ms": {}}
        for name in ("timing", "polls"):
            results["lateness_ms"][name] = lateness(database, chosen, with_store=name == "timing")
        results["rebuild"] = rebuilds(database, chosen)
    report.emit("delay.timing_store", chosen=chosen, server=server, results=results)


def lateness(database: servers.Database, chosen: argparse.Namespace, *, with_store: bool) -> Mapping[str, float]:
    """How late rows were."""
    rows = chosen.rate * chosen.seconds
    engine = background_engine(open_engine(database.url))
    with servers.broker() as process, redis_server(appendfsync="everysec") as redis, _store(redis) as store:
        timers = scheduled(engine, database.schema, rows=rows, rate=chosen.rate)
        broker = LatenessBroker(process.url, expected=rows)
        with _source(database, broker) as (source, gates):
            workers = []
            if with_store:
                assert store.end_rebuild(store.begin_rebuild(range(store.slots)))
                for begin in range(0, rows, 1_000):
                    store.add(timers[begin : begin + 1_000])
                workers = [_worker(source, redis)]
            service = CompensatorService(
                [source], gates=gates, options=ServiceOptions(), metrics=CompensatorMetrics(), timers=workers
            )
            service.start()
            if not broker.done.wait(AHEAD_SECONDS + chosen.seconds + WAIT_SECONDS):
                raise RuntimeError(f"{len(broker.late_ms)} of {rows} rows were sent")
            service.stop()
    backlog.empty(engine, f"{database.schema}.message")
    engine.dispose()
    return _figures(broker.late_ms)


def scheduled(engine: Engine, schema: str, *, rows: int, rate: int) -> list[Timer]:
    """Rows that are due one after the other from some seconds on, and their timers."""
    backlog.fill(engine, schema, rows=rows)
    first_ms = time.time_ns() // 1_000_000 + AHEAD_SECONDS * 1_000
    step_us = 1_000_000 // rate
    with engine.begin() as connection:
        connection.execute(text("SET @place = -1"))
        connection.execute(
            text(
                f"UPDATE {schema}.message SET due_at_us = :first + (@place \\:= @place + 1) * {step_us} "
                "ORDER BY created_at_us, id"
            ),
            {"first": first_ms * 1_000},
        )
        connection.execute(text(f"UPDATE {schema}.message SET deliver_at_ms = due_at_us DIV 1000"))
        found = connection.execute(text(f"SELECT id, due_at_us FROM {schema}.message")).all()
    return [Timer(TimedRow("message", row.id), -(-row.due_at_us // 1_000)) for row in found]


def rebuilds(database: servers.Database, chosen: argparse.Namespace) -> Mapping[str, Any]:
    """Rebuilds of an empty Redis, without a bound and with the default one."""
    engine = background_engine(open_engine(database.url))
    backlog.fill(engine, database.schema, rows=chosen.timers, due_for_us=-2 * backlog.HOUR_US)
    found: dict[str, Any] = {"rows": chosen.timers}
    for name, rate in {"unbounded": UNBOUNDED, "default": RebuildOptions().rows_per_second}.items():
        with redis_server(appendfsync="everysec") as redis, _store(redis) as store:
            broker = HttpBroker("http://127.0.0.1:1")
            before = _memory(redis)
            with _source(database, broker) as (source, _):
                began = time.perf_counter()
                complete = rebuild_timers(
                    source.pending_rows,
                    store,
                    range(store.slots),
                    options=RebuildOptions(rows_per_second=rate),
                    clock=SystemClock(),
                    stopping=threading.Event(),
                )
                seconds = time.perf_counter() - began
            held = sum(one.timers for one in store.figures())
            if not complete or held != chosen.timers:
                raise RuntimeError(f"the rebuild has {held} timers")
            found[name] = {
                "seconds": round(seconds, 2),
                "rows_per_second": round(chosen.timers / seconds),
                "bytes_a_timer": round((_memory(redis) - before) / chosen.timers),
            }
    backlog.empty(engine, f"{database.schema}.message")
    engine.dispose()
    return found


def _memory(redis: RedisServer) -> int:
    with contextlib.closing(redis.client) as client:
        return int(client.info("memory")["used_memory"])


@contextlib.contextmanager
def _store(redis: RedisServer) -> Iterator[TimingStore]:
    store = connect_timing(_url(redis))
    try:
        store.prepare()
        yield store
    finally:
        store.close()


def _worker(source: Source, redis: RedisServer) -> TimerWorker:
    store = connect_timing(_url(redis))
    return TimerWorker(source, store, options=TimerWorkerOptions(), metrics=CompensatorMetrics(), clock=SystemClock())


def _url(redis: RedisServer) -> str:
    return f"redis://{HOST}:{redis.port}/?name=bench"


@contextlib.contextmanager
def _source(database: servers.Database, broker: HttpBroker) -> Iterator[tuple[Source, Gates]]:
    engines, clock = InstanceEngines(database.url), SystemClock()
    gates = Gates(clock=clock, random=Random(0), breaker=BreakerOptions())
    resource = source_name(engines.work.url, database.schema)
    batches = Batches(
        engine=engines.work,
        store=MessageStore(dialect=engines.work.dialect, schema=database.schema),
        broker=broker,
        policy=RelayPolicy(),
        options=ClaimOptions(),
        source=resource.name,
    )
    try:
        yield (
            Source(
                resource,
                schema=database.schema, broker="broker", work=engines.work, reads=engines.reads, batches=batches,
                gate=gates.gate("broker"), clock=clock,
            ),
            gates,
        )  # fmt: skip
    finally:
        engines.close()
        broker.close()


def _figures(late_ms: Sequence[float]) -> Mapping[str, float]:
    cuts = statistics.quantiles(late_ms, n=1_000, method="inclusive")
    return {
        "rows": len(late_ms),
        "p50": round(cuts[499], 1),
        "p99": round(cuts[989], 1),
        "p99.9": round(cuts[998], 1),
        "max": round(max(late_ms), 1),
        "early": sum(ms < 0 for ms in late_ms),
    }


if __name__ == "__main__":
    main()
