"""Plans the reads of a run, checked against every source before any work: order and partitions. Reads no input."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.plausible_times import EARLIEST_MS, LATEST_MS, PlausibleTimes
from spark_reconcile.core.settings import BusinessRule, RunLimits, Settings
from spark_reconcile.core.time_buckets import Span
from spark_reconcile.load.completeness_bound import Reach
from spark_reconcile.load.ledger_exports import refresh_broker_export
from spark_reconcile.load.spark_session import Size
from spark_reconcile.sources.broker_logs import survey
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, DbApiReader, reading
from spark_reconcile.sources.parquet_archives import check_archive
from spark_reconcile.sources.parquet_file_identity import local_folder
from spark_reconcile.sources.sql_statements import (
    DISCARDED,
    InputKind,
    Statement,
    business_statement,
    inbox_statement,
    outbox_statements,
    schema_of,
)

SMALL_BROKER_BYTES: Final = 128 * 1024 * 1024
MEDIUM_BROKER_BYTES: Final = 4 * 1024 * 1024 * 1024
DAY_SLACK_SECONDS: Final = 38 * 3600.0
APART_STEP_SECONDS: Final = 60
"""Clock differences are rounded up to whole steps, so that the next run allows for the same difference."""


@dataclass(frozen=True, slots=True)
class Read:
    """Statements of one database that are read together."""

    url: str
    statements: tuple[Statement, ...]
    snapshot: bool


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The reads of a run, checked against the sources; executed in order, with the broker in between."""

    inboxes: tuple[Read, ...]
    rest: tuple[Read, ...]
    broker_bytes: int
    oldest_ms: Mapping[tuple[InputKind, str], int] = field(default_factory=dict)
    """For a run on a time range: the oldest row of the archive, read or not."""
    inbox_oldest_ms: Sequence[int | None] = ()
    """By inbox, in the order of the settings: the group's oldest row in its table, read or not; None: there is none."""
    clocks: Mapping[str, int] = field(default_factory=dict)
    """By how many milliseconds databases' clocks are ahead of this machine's, if above the permitted skew."""
    reach: Reach = field(default_factory=Reach)
    """Until when each source is complete."""
    extents: Sequence[TableExtent] = ()
    """Extents of each archive and each inbox as a whole, whatever time range is read."""
    limits: RunLimits = field(default_factory=RunLimits)
    slack_seconds: float = 0.0
    """So much slack, at least, the times of business rows need."""

    @property
    def size(self) -> Size:
        """The expected amount of work."""
        if self.broker_bytes <= SMALL_BROKER_BYTES and all(read.snapshot for read in (*self.inboxes, *self.rest)):
            return Size.SMALL
        is_medium = self.broker_bytes <= MEDIUM_BROKER_BYTES and self._rows_about <= self.limits.medium_rows_max
        return Size.MEDIUM if is_medium else Size.LARGE

    @property
    def is_few(self) -> bool:
        """Whether the rows will probably be in one partition."""
        return self.size is Size.SMALL and self._rows_about <= self.limits.one_partition_rows_max

    @property
    def _rows_about(self) -> int:
        return sum(statement.rows_about for read in (*self.inboxes, *self.rest) for statement in read.statements)

    def allowing(self, settings: Settings) -> Settings:
        """Returns the settings with a grace time extended by the clock differences: wrong clocks decide no verdict."""
        apart_ms = max(map(abs, self.clocks.values()), default=0)
        if not apart_ms:
            return settings
        seconds = _in_steps(apart_ms) // 1000
        grace = settings.grace
        return replace(
            settings, grace=replace(grace, seconds=grace.seconds + seconds, clock_skew_seconds=float(seconds))
        )


def check_sources(
    settings: Settings, *, reach: Reach | None = None, span: Span | None = None, now_ms: int | None = None
) -> SourcePlan:
    """Check every source before any work; `span`: the time range that will be read, by default all times; `now_ms`: of
    the run, by default of this machine's clock, to tell the times that cannot be true.

    Raises ConfigurationError, SchemaMissing, DatabaseUnavailable or NotComparable, each with the cure.
    """
    check_archives(settings.archives)
    once = NamedSources()
    oldest: dict[tuple[InputKind, str], int] = {}
    clocks: dict[str, int] = {}
    extents: list[TableExtent] = []
    inbox_oldest: list[int | None] = []
    inboxes = []
    for inbox in settings.inboxes:
        address = DatabaseAddress.of(inbox.url or settings.database_url)
        with reading(address) as reader:
            _note_clock(reader, settings, clocks)
            schema = schema_of(settings, inbox, address)
            once.note(
                f"[[inboxes]] {inbox.group} in {address}", _group(reader, schema, inbox.group), parts=inbox.topics
            )
            behind = span and _by_clock(span, clocks[str(address)])
            statement = inbox_statement(reader, inbox, schema=schema, span=behind)
            extents.append(extent_of(reader, statement, what=inbox.group, schema=schema))
            inbox_oldest.append(_oldest_ms(reader, statement))
        inboxes.append((inbox.url or settings.database_url, statement))
    latest_ms = PlausibleTimes.at(
        max(now_ms or 0, time.time_ns() // 1_000_000), clocks=clocks, skew_ms=settings.grace.clock_skew_ms
    ).latest_ms
    rest = _rest(settings, span, oldest, clocks, once, extents, latest_ms)
    refresh_broker_export(settings)
    segments = [segment for log in ("messages", "actions") for segment in survey(settings.broker_data, log)]
    return SourcePlan(
        inboxes=tuple(_together(inboxes, settings.limits)),
        rest=tuple(_together(rest, settings.limits)),
        broker_bytes=sum(segment.size_bytes for segment in segments),
        oldest_ms=oldest,
        inbox_oldest_ms=tuple(inbox_oldest),
        clocks={name: ahead_ms for name, ahead_ms in clocks.items() if ahead_ms},
        reach=reach or Reach(),
        # Two inboxes of one group in one table, with different topics, are one table.
        extents=tuple({extent.name: extent for extent in extents}.values()),
        limits=settings.limits,
        slack_seconds=max((_slack_seconds(statement) for _, statement in rest), default=0.0),
    )


def waves(reads: Sequence[Read]) -> list[list[Read]]:
    """Groups reads that may run concurrently into waves: all snapshots, then large tables input by input."""
    ordered = sorted(reads, key=_wave)
    return [list(wave) for _, wave in groupby(ordered, key=_wave)]


def _rest(
    settings: Settings, span: Span | None, oldest: dict[tuple[InputKind, str], int], clocks: dict[str, int],
    once: NamedSources, extents: list[TableExtent], latest_ms: int,
) -> list[tuple[str, Statement]]:  # fmt: skip
    """Returns the statements of the outboxes, then those of the business tables."""
    url_statements = []
    for outbox in settings.all_outboxes:
        address = DatabaseAddress.of(outbox.url)
        with reading(address) as reader:
            _note_clock(reader, settings, clocks)
            schema = address.schema_of(outbox.schema)
            once.note(f"the outbox in {address}", ("outbox", *reader.identity(), schema))
            statements = outbox_statements(reader, schema=schema, span=span, latest_ms=latest_ms)
            extents.append(extent_of(reader, statements[-1], what="", schema=schema))
            found_ms = None if span is None else _oldest_ms(reader, statements[-1], beside=f"outcome <> '{DISCARDED}'")
            if found_ms is not None:
                oldest[InputKind.ARCHIVE, ""] = min(found_ms, oldest.get((InputKind.ARCHIVE, ""), found_ms))
            url_statements += [(outbox.url, statement) for statement in statements]
    for rule_number, rule in enumerate(settings.rules):
        for url in settings.urls_of(rule):
            with reading(DatabaseAddress.of(url)) as reader:
                _note_clock(reader, settings, clocks)
                once.note(f"rule {rule.name}: {rule.table} in {reader.address}", _table(reader, rule))
                url_statements.append(
                    (url, business_statement(reader, rule, rule_number, span=span, latest_ms=latest_ms))
                )
    return url_statements


def _slack_seconds(statement: Statement) -> float:
    """A row with a day, and no time of the day, is up to a day and a time zone apart from its message."""
    return DAY_SLACK_SECONDS if statement.is_by_day else 0.0


def _group(reader: DbApiReader, schema: str | None, group: str) -> tuple[object, ...]:
    return "inbox", *reader.identity(), schema, group


def _table(reader: DbApiReader, rule: BusinessRule) -> tuple[object, ...]:
    schema, _, table = rule.table.rpartition(".")
    database = None if reader.address.backend.is_file else schema or reader.address.database
    return "rule", rule.name, *reader.identity(), database, table


def _note_clock(reader: DbApiReader, settings: Settings, clocks: dict[str, int]) -> None:
    """Record how far a database's clock is ahead, at least; 0 within the permitted skew."""
    name = str(reader.address)
    if name not in clocks:
        before_ms, now_ms, after_ms = time.time_ns() // 1_000_000, reader.now_ms(), time.time_ns() // 1_000_000
        ahead_ms = min(0, now_ms - before_ms) + max(0, now_ms - after_ms)
        clocks[name] = ahead_ms if abs(ahead_ms) > settings.grace.clock_skew_seconds * 1000 else 0


def _by_clock(span: Span, ahead_ms: int) -> Span:
    """Returns the range extended for a clock that is behind: its rows look older than they are."""
    return msgspec.structs.replace(span, since_ms=span.since_ms - _in_steps(max(0, -ahead_ms)))


def _in_steps(apart_ms: int) -> int:
    step_ms = APART_STEP_SECONDS * 1000
    return -(-apart_ms // step_ms) * step_ms


def _oldest_ms(reader: DbApiReader, statement: Statement, *, beside: str = "") -> int | None:
    """Returns the oldest row of a source, which a time range hides: one look-up of an index's first entry. `beside`: a
    condition in SQL that it must meet.
    """
    # The first condition is the kind or the group; the others are topics and the time range.
    condition, time = statement.where[0], statement.range_by
    # A row with an impossible time is no evidence for the age of the others.
    conditions = " AND ".join(filter(None, (condition, beside, f"{time} >= ?")))
    sql = f"SELECT {time} FROM {statement.table} WHERE {conditions} ORDER BY {time} LIMIT 1"  # noqa: S608 - checked
    rows = reader.rows(sql, [*statement.parameters[: condition.count("?")], EARLIEST_MS * 1000])
    return int(rows[0][0]) // 1000 if rows else None


def _together(url_statements: Sequence[tuple[str, Statement]], limits: RunLimits) -> list[Read]:
    """Groups statements of one database into one snapshot if they are small; else one read each, in order."""
    by_url: dict[str, list[Statement]] = {}
    for url, statement in url_statements:
        by_url.setdefault(url, []).append(statement)
    reads = []
    for url, statements in by_url.items():
        if sum(statement.rows_about for statement in statements) <= limits.snapshot_rows_max:
            reads.append(Read(url, tuple(statements), snapshot=True))
        else:
            reads += [Read(url, (statement,), snapshot=False) for statement in statements]
    return reads


def _wave(read: Read) -> int:
    return -1 if read.snapshot else list(InputKind).index(read.statements[0].input_kind)


class NamedSources:
    """The sources named so far: each table by the identity of its database, independent of the spelling.

    All rows of a source that is named twice would count twice.
    """

    def __init__(self) -> None:
        self._named: dict[tuple[object, ...], list[tuple[str, frozenset[str]]]] = {}

    def note(self, name: str, table: tuple[object, ...], *, parts: Sequence[str] = ()) -> None:
        """Record `parts` of the table, or all of it. Raises ConfigurationError if any of that was named before."""
        mine = frozenset(parts)
        for other, theirs in self._named.get(table, ()):
            if not mine or not theirs or mine & theirs:
                raise ConfigurationError(
                    f"{other} and {name} are the same source: all that it holds would be counted twice; name it once"
                )
        self._named.setdefault(table, []).append((name, mine))


def check_archives(folders: Sequence[Path | str]) -> None:
    """Raises ConfigurationError for a folder that does not exist, or is named twice, and what check_archive() raises.

    For a URL only the text is compared: Spark opens it, with its own credentials.
    """
    once = NamedSources()
    for folder in folders:
        if isinstance(folder, str):
            local = local_folder(folder)
            once.note(f"[archive] {folder}", (local.resolve() if local else folder.rstrip("/"),))
            continue
        if not folder.is_dir():
            raise ConfigurationError(f"[archive]: there is no folder {folder}; name the one that holds Parquet files")
        once.note(f"[archive] {folder}", (folder.resolve(),))
    for folder in folders:
        check_archive(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableExtent:
    """The archive of one outbox, or the inbox of one group in one table, as a whole, whatever a run reads: the times of
    its first and last row in milliseconds, None if it is empty.
    Rows whose time cannot be true are its ends only where it has no others.

    `name` identifies the table among all databases, without user or password; `what`: the group, "" for an archive.
    """

    name: str
    input_kind: InputKind
    what: str
    first_ms: int | None
    last_ms: int | None

    @property
    def is_empty(self) -> bool:
        """Whether it has no row."""
        return self.first_ms is None


def extent_of(reader: DbApiReader, statement: Statement, *, what: str, schema: str | None) -> TableExtent:
    """Query the extent for a statement, without its time range: two look-ups in an index, no scan."""
    first, last = (_end_ms(reader, statement, order) for order in ("ASC", "DESC"))
    name = f"{' '.join(filter(None, (statement.input_kind, what)))} in {_address(reader.address, schema)}"
    return TableExtent(name=name, input_kind=statement.input_kind, what=what, first_ms=first, last_ms=last)


def _end_ms(reader: DbApiReader, statement: Statement, order: str) -> int | None:
    # The kind or the group; the other conditions are topics and the time range.
    condition, time = statement.where[0], statement.range_by
    given = statement.parameters[: condition.count("?")]
    for true, bounds in ((f" AND {time} >= ? AND {time} <= ?", [EARLIEST_MS * 1000, LATEST_MS * 1000]), ("", [])):
        sql = f"SELECT {time} FROM {statement.table} WHERE {condition}{true} ORDER BY {time} {order} LIMIT 1"  # noqa: S608 - checked
        if rows := reader.rows(sql, [*given, *bounds]):
            return int(rows[0][0]) // 1000
    return None


def _address(address: DatabaseAddress, schema: str | None) -> str:
    if address.backend.is_file:
        return str(Path(address.database).resolve())
    return f"{address}, schema {schema}" if schema else str(address)
