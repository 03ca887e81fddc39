"""Services over shops, metrics that a test can wait on, counts of what was asked of a database. Not fixtures."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from sqlalchemy import Engine, event, func, select
from sqlalchemy.engine import URL

from compensator.admission.circuit_breaker import BreakerOptions, BreakerState
from compensator.admission.gate import Gates
from compensator.admission.rate_limiter import RateOptions
from compensator.core.batch_totals import BatchTotals
from compensator.retention.retention import Retention
from compensator.service.health import CheckStatus
from compensator.service.metrics import CompensatorMetrics
from compensator.service.service import CompensatorService, ServiceOptions
from compensator.work.claim_and_relay import Batches, ClaimOptions
from compensator.work.engines import InstanceEngines
from compensator.work.source import Source, SourceCounts, source_name
from compensator.work.source_schedule import PacingOptions, TurnQueue
from compensator.work.source_turn import TurnOptions, TurnReport, Turns
from outbox import RelayPolicy, Telemetry
from outbox.store.message_table import MessageStore
from outbox.store.schema import message_table, split_message_table_name
from outbox.telemetry import NO_TELEMETRY
from outbox_core import Broker, Clock, ManualClock, SystemClock
from outbox_core.common.backoff import Backoff
from tests.outbox.shop import Shop

SECOND_US = 1_000_000
HOUR_US = 3_600_000_000
WAIT_SECONDS = 300
OFTEN = PacingOptions(interval_ms=20, idle_ms=20, jitter=0, failure=Backoff(initial_ms=20, max_ms=20))
QUICK_BREAKER = BreakerOptions(
    backoff=Backoff(initial_ms=20, max_ms=20), probe_rows=2, drain_rows_per_second=10_000, drain_step_ms=10
)


Serve = Callable[..., CompensatorService]
"""What the fixture `serve` is: shops and brokers, and the options of serving(); returns a service."""
Sources = Callable[..., Source]
"""What the fixture `sources` is: a shop, a broker, and the options of source_of(); returns a source."""


class WatchedMetrics(CompensatorMetrics):
    """Metrics that a test can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self._told = threading.Condition()
        self.turns: list[tuple[str, TurnReport]] = []
        self.failures: Counter[str] = Counter()
        self.counts: dict[str, SourceCounts] = {}
        self.breakers: list[BreakerState] = []
        self.beats: list[tuple[int, int]] = []
        """Of each beat, how many in a row failed, and how many sources were ours."""

    @property
    def reports(self) -> list[BatchTotals]:
        """What the turns came to, those that were held back before a look left out."""
        return [turn.report for _, turn in self.turns if turn.oldest_due_us is not None]

    @property
    def accepted(self) -> int:
        """How many rows brokers took."""
        return sum(turn.report.accepted for _, turn in self.turns)

    def record_turn(self, source: str, turn: TurnReport, *, seconds: float, now_seconds: float) -> None:
        super().record_turn(source, turn, seconds=seconds, now_seconds=now_seconds)
        self._tell(lambda: self.turns.append((source, turn)))

    def record_failed_turn(self, source: str) -> None:
        super().record_failed_turn(source)
        self._tell(lambda: self.failures.update([source]))

    def set_counts(self, source: str, counts: SourceCounts, *, now_seconds: float) -> None:
        super().set_counts(source, counts, now_seconds=now_seconds)
        self._tell(lambda: self.counts.update({source: counts}))

    def note_breaker(self, _broker: str, state: BreakerState) -> None:
        """Note a breaker's change of state."""
        self._tell(lambda: self.breakers.append(state))

    def record_beat(self, *, failed: int, sources: int) -> None:
        super().record_beat(failed=failed, sources=sources)
        self._tell(lambda: self.beats.append((failed, sources)))

    def wait_for(self, condition: Callable[[WatchedMetrics], bool]) -> None:
        """Wait until what turns came to makes the condition true."""
        with self._told:
            assert self._told.wait_for(lambda: condition(self), WAIT_SECONDS)

    def value(self, name: str, **labels: str) -> float | None:
        """What a scrape would show."""
        return self.registry.get_sample_value(name, labels)

    def _tell(self, note: Callable[[], object]) -> None:
        with self._told:
            note()
            self._told.notify_all()


class Asked:
    """Counts the statements that engines are given from now on."""

    def __init__(self, *engines: Engine) -> None:
        self.statements: list[str] = []
        for engine in engines:
            event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, _conn: object, _cursor: object, statement: str, *_: object) -> None:
        self.statements.append(statement)


def advance_until(clock: ManualClock, condition: Callable[[], bool]) -> None:
    """Let time pass in small steps until something has come of it."""
    pause = threading.Event()
    for _ in range(60_000):
        if condition():
            return
        clock.advance(20)
        pause.wait(0.005)
    raise TimeoutError("nothing came of it")


def wait_until_stopping(service: CompensatorService) -> None:
    """Wait until somebody's stop() has been heard."""
    pause, deadline_s = threading.Event(), time.monotonic() + WAIT_SECONDS
    while {check.name: check.status for check in service.health().checks}["running"] is CheckStatus.OK:
        assert time.monotonic() < deadline_s, "nobody stopped the service"
        pause.wait(0.002)


def name_of(shop: Shop) -> str:
    """The name of the source that a shop is."""
    return source_name(shop.engine.url, shop.tables.metadata.schema).name


def gates_of(clock: Clock, *, breaker: BreakerOptions | None = None, limit: RateOptions | None = None) -> Gates:
    """Gates whose breakers draw the same delays in each run."""
    return Gates(clock=clock, random=Random(0), breaker=breaker or BreakerOptions(), limit=limit)


def source_of(shop: Shop, broker: Broker, **options: Any) -> tuple[Source, InstanceEngines]:
    """A source over a shop's database, and its engines, which the caller closes; `options` of source_at()."""
    return source_at(shop.engine.url, shop.tables.metadata.schema, broker, **{"store": shop.store, **options})


def source_at(
    url: URL,
    schema: str | None,
    broker: Broker,
    *,
    gates: Gates | None = None,
    store: MessageStore | None = None,
    clock: Clock | None = None,
    lease_ms: int = 60_000,
    broker_name: str = "the broker",
    limit: RateOptions | None = None,
    retention: Retention | None = None,
    engines: InstanceEngines | None = None,
    telemetry: Telemetry = NO_TELEMETRY,
    pacing: PacingOptions | None = None,
) -> tuple[Source, InstanceEngines]:
    """A source over a database that may not be there, and its engines, which the caller closes."""
    clock = clock or SystemClock()
    engines = engines or InstanceEngines(url)
    resource = source_name(url, schema)
    batches = Batches(
        engine=engines.work,
        store=store or MessageStore(dialect=engines.work.dialect, schema=schema),
        broker=broker,
        policy=RelayPolicy(outage_delay_ms=60_000),
        options=ClaimOptions(lease_ms=lease_ms),
        source=resource.name,
        telemetry=telemetry,
        clock=clock,
    )
    source = Source(
        resource,
        schema=schema,
        broker=broker_name,
        work=engines.work,
        reads=engines.reads,
        batches=batches,
        gate=(gates or gates_of(clock)).gate(broker_name, limit=limit),
        clock=clock,
        retention=retention,
        look_ahead_ms=(pacing or PacingOptions()).look_ahead_ms,
    )
    return source, engines


def turns_of(source: Source, *, clock: Clock, **options: int) -> Turns:
    """The turns of a source; `options` of TurnOptions."""
    return Turns(source, options=TurnOptions(**options), clock=clock)


def serving(
    shops: Sequence[Shop],
    brokers: Sequence[Broker],
    *,
    metrics: CompensatorMetrics,
    pacing: PacingOptions = OFTEN,
    breaker: BreakerOptions = QUICK_BREAKER,
    batch_rows: int = 10,
    limit: RateOptions | None = None,
    clock: Clock | None = None,
    extra: Sequence[Source] = (),
    engines: Sequence[InstanceEngines] = (),
    **options: Any,
) -> tuple[CompensatorService, Callable[[], None]]:
    """A service over these shops, and what closes its connections. Equal brokers share a breaker. `engines`: one of
    each shop, where a test wants to know them.
    """
    clock = clock or SystemClock()
    gates = gates_of(clock, breaker=breaker, limit=limit)
    if isinstance(metrics, WatchedMetrics):
        gates.listen(metrics.note_breaker)
    made = [
        source_of(shop, broker, gates=gates, clock=clock, broker_name=f"broker {id(broker)}", engines=own_engines)
        for shop, broker, own_engines in zip(shops, brokers, engines or [None] * len(shops), strict=True)
    ]
    own = {name: options.pop(name) for name in ("assignment", "timers") if name in options}
    service = CompensatorService(
        [*extra, *(source for source, _ in made)],
        gates=gates,
        options=ServiceOptions(pacing=pacing, turn=TurnOptions(batch_rows=batch_rows), **options),
        metrics=metrics,
        clock=clock,
        random=Random(0),
        **own,
    )

    def close() -> None:
        for _, engines in made:
            engines.close()

    return service, close


def split(shop: Shop, numbers: Sequence[int]) -> list[str]:
    """Make these of the tables that messages are split over (MySQL and MariaDB); returns their names."""
    names = [split_message_table_name(shop.database.namespace, number) for number in numbers]
    plain = shop.store.table
    schema = plain.schema
    with shop.engine.begin() as connection:
        for name in names:
            connection.exec_driver_sql(f"CREATE TABLE {schema}.{name} LIKE {schema}.{plain.name}")
            connection.exec_driver_sql(
                f"ALTER TABLE {schema}.{name} RENAME INDEX ix_{plain.name}_state_due TO ix_{name}_state_due"
            )
    return names


def rows_left(shop: Shop, tables: Sequence[str]) -> int:
    """How many rows these tables have."""
    with shop.engine.connect() as connection:
        counts = [
            connection.scalar(select(func.count()).select_from(message_table(shop.database.namespace.schema, name)))
            for name in tables
        ]
    return sum(count or 0 for count in counts)


class Simulation:
    """The service's loop on a clock that only it moves, in this thread: what happens when is exact."""

    def __init__(
        self,
        sources: Sequence[Source],
        clock: ManualClock,
        *,
        pacing: PacingOptions | None = None,
        **turn: int,
    ) -> None:
        """`turn`: options of TurnOptions."""
        self.clock = clock
        self.turns: list[tuple[int, str, TurnReport]] = []
        self._queue = TurnQueue(pacing or PacingOptions(), suspects_max=1, random=Random(0))
        self._turns = {source.name: turns_of(source, clock=clock, **turn) for source in sources}
        self._queue.keep(self._turns, now_ms=clock.monotonic_ms())

    def step(self) -> TurnReport:
        """Wait for the next turn, and take it."""
        while (name := self._queue.take(now_ms=self.clock.monotonic_ms())) is None:
            wait_ms = self._queue.wait_ms(now_ms=self.clock.monotonic_ms())
            assert wait_ms, "nobody has a turn to come"
            self.clock.advance(wait_ms)
        turn = self._turns[name].take(going_on=lambda: True)
        self.turns.append((self.clock.monotonic_ms(), name, turn))
        self._queue.done(name, turn.outcome, now_ms=self.clock.monotonic_ms())
        return turn

    def run_until(self, ms: int) -> None:
        """Take all turns that come before this time or at it, and let it be then."""
        while (now_ms := self.clock.monotonic_ms()) <= ms:
            wait_ms = self._queue.wait_ms(now_ms=now_ms)
            if wait_ms is None or now_ms + wait_ms > ms:
                self.clock.advance(ms - now_ms)
                return
            self.step()
