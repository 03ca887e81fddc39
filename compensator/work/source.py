"""A source: one message schema on one database instance, and the queries on its tables. It has no schedule.

Its polls begin at a low-water mark of each table, seldom at the front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL

from compensator.admission.gate import AdmissionGate
from compensator.retention.retention import Retention
from compensator.work.claim_and_relay import Batches
from compensator.work.due_tables import DuePoll, DueTables
from compensator.work.source_schedule import PacingOptions
from outbox.store.database import database_errors
from outbox.store.database_identity import StrangerCheck
from outbox.store.databases.supported import database_named
from outbox.store.pending_due_times import DuePosition, PendingDueTimes
from outbox.store.schema import message_table_names
from outbox.store.table_placement import MessageTable, table_namespace, tables_missing
from outbox_core.assignment.even_assignment import Resource
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError, SchemaMissing
from outbox_core.common.table_namespace import TableNamespace
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


MARGIN_US: Final = 5_000_000
"""How far behind the database's clock a mark stays: a commit so late, or a step back so small, hides no row."""
WHOLE_EVERY_MS: Final = 10_000
WHOLE_SHARE: Final = 20
"""Full scans take at most 1/20 of the time, however long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollResult:
    """Result of a poll: the database's clock, and for each table that has pending rows the first one's due time.

    `took_ms`: how long it took; `ended_ms`: its end, by the monotonic clock.
    """

    now_us: int
    first_due_us: Mapping[str, int]
    took_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True)
class LowWaterMarks:
    """The marks of one source's tables, and the time of the next full scan. Without marks, a poll begins at 0.

    InnoDB keeps the index entries of deleted rows as long as any transaction that was open at the delete, and a scan of
    the index from its front steps over all of them: 100,000 of them cost a tenth of a second, for a poll that finds
    nothing. So a poll begins at the due time before which the last one saw no rows, and a batch where the last one
    ended.

    No due row stays hidden below a mark. A mark is never above the database's clock less a margin, and a row's due time
    is written ahead of that clock: by its INSERT, a claim, a retry, a release or an operator. A row can still be below
    a mark if its transaction committed later than the row's lease and the margin, or after a step of the clock: the
    next full scan finds it.
    """

    marks_us: Mapping[str, int] = field(default_factory=dict)
    whole_from_ms: int | None = None

    def begin(self, *, now_ms: int) -> Mapping[str, int]:
        """The due time from which to scan each table; 0 for tables without one. Empty: a full scan."""
        whole = self.whole_from_ms is None or now_ms >= self.whole_from_ms
        return {} if whole else self.marks_us

    def hides(self, now_us: int) -> bool:
        """Whether the database's clock was stepped back below a mark: new rows may be below it."""
        return any(mark_us > now_us for mark_us in self.marks_us.values())

    def after(self, polled: PollResult, *, tables: tuple[str, ...], whole: bool) -> LowWaterMarks:
        """Returns the marks after a poll of these tables."""
        least_us = polled.now_us - MARGIN_US
        marks_us = {table: min(polled.first_due_us.get(table, least_us), least_us) for table in tables}
        wait_ms = max(WHOLE_EVERY_MS, WHOLE_SHARE * polled.took_ms)
        return LowWaterMarks(marks_us, polled.ended_ms + wait_ms if whole else self.whole_from_ms)


class PendingRowReader:
    """Reads the pending rows of one schema's message tables, with which a timing store is compared. Thread-safe. All
    methods raise DatabaseUnavailable and SchemaMissing.
    """

    def __init__(self, name: str, *, schema: str | None, reads: Engine) -> None:
        """`name`: of the source, for logs. `schema`: as the user names it. `reads`: by autocommit_engine."""
        self.name = name
        self._schema = schema
        self._reads = reads
        self._strangers = StrangerCheck(reads.dialect, [schema])

    @property
    def namespace(self) -> TableNamespace:
        """Where the tables are; the engine has connected."""
        return table_namespace(self._reads.dialect, self._schema)

    def tables(self) -> Sequence[str]:
        """The names of the message tables, at least one."""
        with database_errors(self._reads.url), self._reads.connect() as connection:
            names = message_table_names(connection, self.namespace)
            if not names:
                raise tables_missing(connection, self._schema)
            self._strangers.run(connection)
        return names

    def count(self, *, rows_max: int) -> int | None:
        """How many rows of all tables are pending; None: more than `rows_max`."""
        rows = 0
        for table in self.tables():
            with database_errors(self._reads.url), self._reads.connect() as connection:
                table_rows = self._rows(table).count(connection, rows_max=rows_max - rows)
            if table_rows is None:
                return None
            rows += table_rows
        return rows

    def pending_page(self, table: str, *, after: DuePosition, limit: int) -> list[DuePosition]:
        """Pending rows of a table behind a position, the first due first."""
        with database_errors(self._reads.url), self._reads.connect() as connection:
            return self._rows(table).page(connection, after=after, limit=limit)

    def pending(self, table: str, ids: Sequence[str]) -> set[str]:
        """Those of these rows of a table that are pending."""
        with database_errors(self._reads.url), self._reads.connect() as connection:
            return set(self._rows(table).due_in_us(connection, ids))

    def _rows(self, table: str) -> PendingDueTimes:
        return PendingDueTimes(dialect=self._reads.dialect, table=MessageTable(self.namespace.schema, table))
