"""Builds a compensator's parts from its configuration. No logic, and no I/O except for secret files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from sqlalchemy.engine import URL

from compensator.admission.circuit_breaker import BreakerOptions
from compensator.admission.gate import Gates
from compensator.admission.rate_limiter import RateOptions
from compensator.assignment import Assignment, UnleasedAssignment, open_assignment, open_zookeeper_assignment
from compensator.assignment.assignment_factory import ZOOKEEPER_LEASES
from compensator.core.config import CompensatorConfig, CompensatorTable, SourceTable
from compensator.retention.retention import Retention, RetentionOptions
from compensator.service.metrics import CompensatorMetrics
from compensator.service.service import ServiceOptions
from compensator.service.timer_worker import TimerWorker, TimerWorkerOptions
from compensator.work.claim_and_relay import Batches, ClaimOptions
from compensator.work.engines import InstanceEngines
from compensator.work.source import Source, source_name
from compensator.work.source_schedule import PacingOptions
from compensator.work.source_turn import TurnOptions
from compensator.work.timer_rebuild import RebuildOptions
from compensator.work.timer_turn import TimerTurnOptions
from outbox.consumers.inbox_table import InboxStore
from outbox.delivery.relay import RelayPolicy
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database_url import database_url
from outbox.store.message_table import MessageStore
from outbox.store.order_table import OrderStore
from outbox.telemetry import Telemetry
from outbox.telemetry.metrics import OutboxMetrics
from outbox_core import Broker, connect
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.url_parts import shown_url, split_url
from outbox_core.runtime.config_files import read_secret
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperTable

ZOOKEEPER: Final = "zookeeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A compensator's sources, their brokers, shared objects and metrics, and what must be closed at the end."""

    sources: Sequence[Source]
    brokers: Sequence[Broker]
    timers: Sequence[TimerWorker]
    gates: Gates
    assignment: Assignment
    options: ServiceOptions
    metrics: CompensatorMetrics
    closing: ExitStack

    def close(self) -> None:
        """Close brokers and connections. Idempotent."""
        self.closing.close()


def wire(config: CompensatorConfig, *, clock: Clock) -> Parts:
    """Build a compensator's parts. Raises ConfigurationError for settings that cannot work."""
    with ExitStack() as closing:
        builder = _Builder(config, clock=clock, closing=closing)
        sources = [source for table in config.source_tables() for source in builder.sources(table)]
        _refuse_twins(sources)
        return Parts(
            sources=sources,
            brokers=builder.brokers,
            timers=builder.timers,
            gates=builder.gates,
            assignment=_assignment(config, several=len(sources) > 1),
            options=service_options(config),
            metrics=builder.metrics,
            closing=closing.pop_all(),
        )


def service_options(config: CompensatorConfig) -> ServiceOptions:
    """The options of the service."""
    settings = config.compensator
    return ServiceOptions(
        workers=settings.workers,
        pacing=PacingOptions(interval_ms=settings.interval, idle_ms=max(settings.interval, settings.idle_interval)),
        turn=TurnOptions(batch_rows=settings.batch_rows),
        stop_timeout_ms=settings.stop_timeout,
    )


class _Builder:
    """Builds sources; database instances and brokers that several sources name are built once."""

    def __init__(self, config: CompensatorConfig, *, clock: Clock, closing: ExitStack) -> None:
        self._config = config
        self._clock = clock
        self._closing = closing
        self._engines: dict[URL, InstanceEngines] = {}
        self._brokers: dict[tuple[str, Path | None], Broker] = {}
        self.timers: list[TimerWorker] = []
        self._stores: set[str] = set()
        self.metrics = CompensatorMetrics()
        self._telemetry = Telemetry(metrics=OutboxMetrics(registry=self.metrics.registry, clock=clock))
        settings = config.compensator
        breaker = BreakerOptions(probe_rows=settings.probe_rows, drain_rows_per_second=settings.drain_rate)
        self.gates = Gates(clock=clock, random=Random(), breaker=breaker, limit=_limit(settings.rate_limit))

    @property
    def brokers(self) -> list[Broker]:
        """The brokers of all sources that were built."""
        return list(self._brokers.values())

    def sources(self, table: SourceTable) -> list[Source]:
        """A source for each schema of a database instance."""
        url = database_url(table.url, password_file=table.password_file)
        if url not in self._engines:
            self._engines[url] = InstanceEngines(url)
            self._closing.callback(self._engines[url].close)
        schemas: list[str | None] = [*table.schemas] or [None]
        sources = [self._source(table, url, schema) for schema in schemas]
        timing = table.timing or self._config.timing.store
        if timing is not None:
            self.timers += [self._timer_worker(source, timing) for source in sources]
        return sources

    def _timer_worker(self, source: Source, url: str) -> TimerWorker:
        if url in self._stores:
            raise ConfigurationError(
                f"two sources have the timing store {shown_url(url)}: give each a store of its own, by another ?name= "
                "in `timing` of its [[compensator.sources]]"
            )
        self._stores.add(url)
        store = connect_timing(url)
        self._closing.callback(store.close)
        timing = self._config.timing
        options = TimerWorkerOptions(
            turn=TimerTurnOptions(batch_rows=self._config.compensator.batch_rows),
            rebuild=RebuildOptions(rows_per_second=timing.rebuild_rows_per_second),
        )
        return TimerWorker(source, store, options=options, metrics=self.metrics, clock=self._clock)

    def _source(self, table: SourceTable, url: URL, schema: str | None) -> Source:
        engines = self._engines[url]
        broker_url, broker = self._broker(table)
        broker_name = shown_url(broker_url)
        resource = source_name(url, schema, zone=table.zone)
        return Source(
            resource,
            schema=schema,
            broker=broker_name,
            work=engines.work,
            reads=engines.reads,
            batches=self._batches(engines, schema, broker, source=resource.name),
            gate=self.gates.gate(broker_name, limit=_limit(table.rate_limit)),
            clock=self._clock,
            retention=self._retention(engines, schema),
            look_ahead_ms=service_options(self._config).pacing.look_ahead_ms,
        )

    def _batches(self, engines: InstanceEngines, schema: str | None, broker: Broker, *, source: str) -> Batches:
        settings = self._config.compensator
        return Batches(
            engine=engines.work,
            store=MessageStore(dialect=engines.work.dialect, schema=schema),
            broker=broker,
            policy=RelayPolicy(keep_archive=settings.archive),
            options=ClaimOptions(batch_rows=settings.batch_rows, lease_ms=settings.lease),
            source=source,
            telemetry=self._telemetry,
            clock=self._clock,
        )

    def _retention(self, engines: InstanceEngines, schema: str | None) -> Retention:
        settings, dialect = self._config.compensator, engines.work.dialect
        return Retention(
            engine=engines.work,
            archive=ArchiveStore(dialect=dialect, schema=schema),
            inbox=InboxStore(dialect=dialect, schema=schema),
            order=OrderStore(dialect=dialect, schema=schema),
            options=RetentionOptions(
                archive_days=settings.archive_days,
                inbox_days=settings.inbox_days,
                order_head_days=settings.order_head_days,
                judged_file=settings.judged_file,
            ),
            clock=self._clock,
        )

    def _broker(self, table: SourceTable) -> tuple[str, Broker]:
        own = table.broker is not None
        url = table.broker or self._config.broker.url
        token_file = table.token_file or (None if own else self._config.broker.token_file)
        if url is None:
            raise ConfigurationError("no broker is named: give --broker, OUTBOX_BROKER__URL or `broker` of the source")
        if (url, token_file) not in self._brokers:
            options = {} if token_file is None else {"token": read_secret(token_file, what="token")}
            broker = connect(url, **options)
            self._closing.callback(broker.close)
            self._brokers[(url, token_file)] = broker
        return url, self._brokers[(url, token_file)]


def _assignment(config: CompensatorConfig, *, several: bool) -> Assignment:
    """Leases if configured, and by default if there are several sources, or leases in ZooKeeper."""
    settings = config.compensator
    zookeeper_url = _zookeeper_url(settings)
    if not (several or zookeeper_url if settings.leases is None else settings.leases):
        return UnleasedAssignment()
    if zookeeper_url is not None:
        return open_zookeeper_assignment(zookeeper_url, zone=settings.zone, security=settings.zookeeper_security)
    first_source = config.source_tables()[0]
    url = database_url(
        settings.lease_url or first_source.url, password_file=None if settings.lease_url else first_source.password_file
    )
    schema = settings.lease_schema or (
        first_source.schemas[0] if first_source.schemas and not settings.lease_url else None
    )
    return open_assignment(url, schema=schema, zone=settings.zone)


def _zookeeper_url(settings: CompensatorTable) -> str | None:
    """Returns `lease_url` if it is an address in ZooKeeper. Raises ConfigurationError for settings of another kind."""
    if settings.lease_url is not None and split_url(settings.lease_url).scheme == ZOOKEEPER:
        if settings.lease_schema is not None:
            raise ConfigurationError("lease_schema is of leases in a database: in ZooKeeper lease_url has a path")
        return settings.lease_url
    set_here = sorted(settings.model_fields_set & ZooKeeperTable.model_fields.keys())
    if set_here:
        raise ConfigurationError(f"{set_here[0]} is of leases in ZooKeeper: set lease_url to {ZOOKEEPER_LEASES}")
    return None


def _refuse_twins(sources: Sequence[Source]) -> None:
    names: set[str] = set()
    for source in sources:
        if source.name in names:
            raise ConfigurationError(f"the source {source.name} is named twice; name each schema of an instance once")
        names.add(source.name)


def _limit(rows_per_second: float | None) -> RateOptions | None:
    return None if rows_per_second is None else RateOptions(rows_per_second=rows_per_second)
