"""Instances that share one lease schema, and what its tables say. Not a fixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, select, update

from compensator.assignment import LeasedAssignment, LeaseOptions
from compensator.assignment.assignment_factory import lease_engine
from compensator.assignment.lease_registry import LeaseRegistry, LeaseStore
from outbox_core.assignment.even_assignment import Resource
from tests.outbox.shop import Shop

LONG = LeaseOptions(beat_ms=60_000, lease_ms=600_000)
"""A lease that no slow machine outlives: deaths are written into the table."""


def names(count: int, *, zone: str | None = None, prefix: str = "source") -> list[Resource]:
    """So many sources."""
    return [Resource(f"{prefix}-{number:04d}", zone) for number in range(count)]


class Fleet:
    """Instances on one database; each is an assignment with an engine of its own."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self._engines: list[Engine] = []

    def instance(self, *, zone: str | None = None, options: LeaseOptions = LONG) -> LeasedAssignment:
        """One more, which has not joined yet."""
        engine = lease_engine(self.shop.database.url, wait_ms_max=options.lease_ms // 3)
        self._engines.append(engine)
        return LeasedAssignment(LeaseRegistry(engine=engine, store=self.store(), zone=zone, options=options))

    def store(self) -> LeaseStore:
        """The statements that every instance here uses; a connection to run them on comes from any engine."""
        return LeaseStore(dialect=self.shop.engine.dialect, schema=self.shop.database.schema)

    def settle(
        self, instances: Sequence[LeasedAssignment], sources: Sequence[Resource], *, beats: int = 4
    ) -> list[frozenset[str]]:
        """Let each beat in turn, until nothing can change any more; returns what each has in the end."""
        found: list[frozenset[str]] = []
        for _ in range(beats):
            found = [one.beat(sources) for one in instances]
        return found

    def die(self, instance: LeasedAssignment) -> None:
        """Let an instance's time be over by the database's clock, as if it had not beaten for long."""
        table = self.shop.tables.instance
        with self.shop.engine.begin() as connection:
            connection.execute(update(table).where(table.c.id == instance.instance).values(alive_until_us=1))

    def instances(self) -> dict[str, dict[str, Any]]:
        """The instance table by id."""
        with self.shop.engine.connect() as connection:
            rows = connection.execute(select(self.shop.tables.instance)).mappings()
            return {row["id"]: dict(row) for row in rows}

    def leases(self) -> dict[str, dict[str, Any]]:
        """The lease table by source."""
        with self.shop.engine.connect() as connection:
            rows = connection.execute(select(self.shop.tables.lease)).mappings()
            return {row["source"]: dict(row) for row in rows}

    def holders(self) -> dict[str, str]:
        """The instance of each lease that somebody has, by source."""
        return {name: row["instance"] for name, row in self.leases().items() if row["instance"] is not None}

    def engine_of(self, number: int) -> Engine:
        """The engine of the instance that was made as number so and so."""
        return self._engines[number]

    def close(self) -> None:
        """Close all engines."""
        for engine in self._engines:
            engine.dispose()
