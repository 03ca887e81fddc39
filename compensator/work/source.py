"""A source: one message schema on one database instance, and the queries on its tables. It has no schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL

from compensator.admission.gate import AdmissionGate
from compensator.retention.retention import Retention
from compensator.work.claim_and_relay import Batches
from compensator.work.due_tables import DuePoll, DueTables
from compensator.work.low_water_mark import LowWaterMarks, PollResult
from compensator.work.pending_row_reader import PendingRowReader
from compensator.work.source_schedule import PacingOptions
from outbox.store.database import database_errors
from outbox.store.databases.supported import database_named
from outbox_core.assignment.resource import Resource
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError, SchemaMissing
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

TABLES_ASKED_EVERY_MS: Final = 60_000
COUNTED_ROWS_MAX: Final = 10_000
"""A gauge counts at most so many rows of one table."""
_IN_NAMES: Final = "".join(chr(code) for code in range(ord(" "), ord("~") + 1) if chr(code) != "%")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """How many rows are pending, of those retrying, and parked, each table counted up to COUNTED_ROWS_MAX; and for how
    long the oldest pending message has been wanted.
    """

    pending: int
    retrying: int
    parked: int
    oldest_due_age_us: int = 0


class Source:
    """The parts of one source. Safe in any thread, though a service assigns it to one worker at a time."""

    def __init__(
        self,
        name: Resource,
        *,
        schema: str | None,
        broker: str,
        work: Engine,
        reads: Engine,
        batches: Batches,
        gate: AdmissionGate,
        clock: Clock,
        retention: Retention | None = None,
        look_ahead_ms: int = PacingOptions().look_ahead_ms,
    ) -> None:
        """`schema`: as the user names it. `broker`: its displayed name. `reads` is made by autocommit_engine.
        `look_ahead_ms`: the next poll is no later than that.
        """
        self.name = name.name
        self.source_name = name
        self.broker = broker
        self.batches = batches
        self.gate = gate
        self.retention = retention
        self.pending_rows = PendingRowReader(name.name, schema=schema, reads=reads)
        self._work = work
        self._reads = reads
        self._clock = clock
        self._look_ahead_ms = look_ahead_ms
        self._tables: DueTables | None = None
        self._listed_at_ms = 0
        self._low_water = LowWaterMarks()

    def poll(self) -> DuePoll:
        """Poll the tables; returns those with pending rows that fall due before the next poll, the longest due first; a
        full scan returns all that have pending rows. Raises DatabaseUnavailable, SchemaMissing.
        """
        tables = self._known_tables()
        try:
            with database_errors(self._reads.url), self._reads.connect() as connection:
                return self._poll(connection, tables)
        except OutboxError as error:
            self._low_water = LowWaterMarks()  # after a fail-over the rows may differ
            if isinstance(error, SchemaMissing):
                self._tables = None  # a table was dropped: list the tables again at the next poll
            raise

    def counts(self) -> SourceCounts:
        """Count pending, retrying and parked rows, up to a limit; a few statements.

        Raises DatabaseUnavailable, SchemaMissing.
        """
        tables = self._known_tables()
        with database_errors(self._reads.url), self._reads.connect() as connection:
            counted = tables.count(connection, rows_max=COUNTED_ROWS_MAX)
        return SourceCounts(
            pending=sum(table_counts.pending for table_counts in counted),
            retrying=sum(table_counts.retrying for table_counts in counted),
            parked=sum(table_counts.parked for table_counts in counted),
            oldest_due_age_us=max((table_counts.oldest_due_age_us for table_counts in counted), default=0),
        )

    def _poll(self, connection: Connection, tables: DueTables) -> DuePoll:
        """Poll from the marks on, or by a full scan: at once if the database's clock was stepped back below a mark."""
        began_ms = self._clock.monotonic_ms()
        from_us = self._low_water.begin(now_ms=began_ms)
        poll = tables.poll(connection, from_us=from_us, ahead_us=self._look_ahead_ms * 1_000)
        if from_us and self._low_water.hides(poll.now_us):
            logger.warning("database_clock_stepped_back", extra={"source": self.name})
            self._low_water = LowWaterMarks()
            poll = tables.poll(connection)
        ended_ms = self._clock.monotonic_ms()
        first_due_us = {table_due.table: table_due.due_at_us for table_due in poll.due}
        result = PollResult(
            now_us=poll.now_us, first_due_us=first_due_us, took_ms=ended_ms - began_ms, ended_ms=ended_ms
        )
        self._low_water = self._low_water.after(result, tables=tables.tables, whole=poll.whole)
        return poll

    def _known_tables(self) -> DueTables:
        """The message tables, listed again every minute, so that new splits are found."""
        now_ms = self._clock.monotonic_ms()
        due_tables = self._tables
        if due_tables is not None and now_ms - self._listed_at_ms < TABLES_ASKED_EVERY_MS:
            return due_tables
        names = self.pending_rows.tables()
        if due_tables is None or due_tables.tables != tuple(names):
            logger.info("message_tables_found", extra={"source": self.name, "tables": len(names)})
            due_tables = DueTables(dialect=self._reads.dialect, schema=self.pending_rows.namespace.schema, tables=names)
        self._tables, self._listed_at_ms = due_tables, now_ms
        return due_tables


def source_name(url: URL, schema: str | None, *, zone: str | None = None) -> Resource:
    """Returns `host:port/schema`, or the database without a schema, the same in every instance that names the database
    so; for a file, the kind of database and the file. What is not printable ASCII in it is percent-encoded, since
    leases name it.
    """
    default_port = database_named(url.get_backend_name()).default_port
    if default_port is None:
        return Resource(quote(f"{url.get_backend_name()}:{url.database or ''}", safe=_IN_NAMES), zone)
    where = f"{url.host or 'localhost'}:{url.port or default_port}/{schema or url.database or ''}"
    return Resource(quote(where, safe=_IN_NAMES), zone)
