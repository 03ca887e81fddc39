"""A source: one message schema on one instance, and everything that is asked of its tables. It has no schedule."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from compensator.assignment import SourceName
from compensator.batches import Batches
from compensator.due_tables import DueTables, TableDue
from compensator.gate import Gate
from compensator.retention import Retention
from messaging.clock import Clock
from messaging.errors import SchemaMissing
from outbox.database import MYSQL_DIALECTS, database_errors
from outbox.schema import message_table_names

logger = logging.getLogger(__name__)

TABLES_ASKED_EVERY_MS: Final = 60_000
COUNTED_ROWS_MAX: Final = 10_000
"""Rows of one table that a gauge counts up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """How many rows are pending and parked, each table counted up to COUNTED_ROWS_MAX."""

    pending: int
    parked: int


class Source:
    """One source's parts. Safe in any thread, though a service gives it one worker at a time."""

    def __init__(
        self,
        name: SourceName,
        *,
        schema: str | None,
        broker: str,
        work: Engine,
        looks: Engine,
        batches: Batches,
        gate: Gate,
        clock: Clock,
        retention: Retention | None = None,
    ) -> None:
        """`schema`: as it applies on the dialect. `broker`: its name, for people. `looks` is made by looking_engine."""
        self.name = name.name
        self.source_name = name
        self.broker = broker
        self.batches = batches
        self.gate = gate
        self.retention = retention
        self._schema = schema
        self._work = work
        self._looks = looks
        self._clock = clock
        self._tables: DueTables | None = None
        self._asked_at_ms = 0

    def look(self) -> list[TableDue]:
        """Its tables that have pending rows, the longest due first. Raises DatabaseUnavailable, SchemaMissing."""
        tables = self._known_tables()
        try:
            with database_errors(self._looks.url), self._looks.connect() as connection:
                return tables.look(connection)
        except SchemaMissing:
            self._tables = None  # a table went away: ask again at the next look
            raise

    def counts(self) -> SourceCounts:
        """How it stands, by bounded counts; a few statements. Raises DatabaseUnavailable, SchemaMissing."""
        tables = self._known_tables()
        with database_errors(self._looks.url), self._looks.connect() as connection:
            found = tables.count(connection, rows_max=COUNTED_ROWS_MAX)
        return SourceCounts(pending=sum(one.pending for one in found), parked=sum(one.parked for one in found))

    def _known_tables(self) -> DueTables:
        """Its message tables, asked again every minute: splits that are made meanwhile are found."""
        now_ms = self._clock.monotonic_ms()
        known = self._tables
        if known is not None and now_ms - self._asked_at_ms < TABLES_ASKED_EVERY_MS:
            return known
        with database_errors(self._looks.url), self._looks.connect() as connection:
            names = message_table_names(connection, self._schema)
        if not names:
            shown = self._looks.url.render_as_string(hide_password=True)
            raise SchemaMissing(f"there is no message table in {shown} ({self.name}); run: outbox db upgrade --url URL")
        if known is None or known.tables != tuple(names):
            logger.info("message_tables_found", extra={"source": self.name, "tables": len(names)})
            known = DueTables(dialect=self._looks.dialect, schema=self._schema, tables=names)
        self._tables, self._asked_at_ms = known, now_ms
        return known


def source_name(url: URL, schema: str | None, *, zone: str | None = None) -> SourceName:
    """`host:port/schema`, the same in every instance that names the database so; for SQLite the file."""
    if url.get_backend_name() not in MYSQL_DIALECTS:
        return SourceName(f"{url.get_backend_name()}:{url.database or ''}", zone)
    return SourceName(f"{url.host or 'localhost'}:{url.port or 3306}/{schema or ''}", zone)
