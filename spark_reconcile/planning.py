"""What will be read, checked against every source before any work, in which order and how parted. Reads no leg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from messaging.errors import ConfigurationError
from spark_reconcile.settings import Settings
from spark_reconcile.sources.database import Place, Reader, reading
from spark_reconcile.sources.segments import survey
from spark_reconcile.sources.statements import (
    Leg,
    Span,
    Statement,
    business_statement,
    inbox_statement,
    outbox_statements,
    schema_of,
)

SNAPSHOT_ROWS_MAX: Final = 500_000
"""Up to so many rows a database is read in one consistent snapshot; above, in parallel ranges, table after table."""
SMALL_BROKER_BYTES: Final = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Read:
    """Statements of one database that are read together."""

    url: str
    statements: tuple[Statement, ...]
    snapshot: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be read, checked against the sources; reads are done in order, the broker in between."""

    inboxes: tuple[Read, ...]
    rest: tuple[Read, ...]
    broker_bytes: int
    oldest_ms: Mapping[tuple[Leg, str], int] = field(default_factory=dict)
    """Of a run that reads a span: the oldest row of the archive and of each group's inbox, read or not."""

    @property
    def small(self) -> bool:
        """Whether starting up will take longer than working."""
        return self.broker_bytes <= SMALL_BROKER_BYTES and all(read.snapshot for read in (*self.inboxes, *self.rest))


def check_sources(settings: Settings, *, span: Span | None = None) -> Plan:
    """Look at every source before any work; `span`: the times that will be read, all of them by default.

    Raises ConfigurationError, SchemaMissing, DatabaseUnavailable or NotComparable, each with the cure.
    """
    for folder in settings.archives:
        if not folder.is_dir():
            raise ConfigurationError(f"[archive]: there is no folder {folder}; name the one that holds Parquet files")
    oldest: dict[tuple[Leg, str], int] = {}
    inboxes = []
    for inbox in settings.inboxes:
        place = Place.of(inbox.url or settings.database_url)
        with reading(place) as reader:
            statement = inbox_statement(reader, inbox, schema=schema_of(settings, inbox, place), span=span)
            if span is not None:
                _note_oldest(reader, statement, inbox.group, oldest)
        inboxes.append((inbox.url or settings.database_url, statement))
    rest = _rest(settings, span, oldest)
    segments = [one for log in ("messages", "actions") for one in survey(settings.broker_data, log)]
    return Plan(
        inboxes=tuple(_together(inboxes)),
        rest=tuple(_together(rest)),
        broker_bytes=sum(one.size_bytes for one in segments),
        oldest_ms=oldest,
    )


def waves(reads: Sequence[Read]) -> list[list[Read]]:
    """Reads that may be done at the same time, wave after wave: all snapshots, then large tables leg by leg."""
    ordered = sorted(reads, key=_wave)
    return [list(wave) for _, wave in groupby(ordered, key=_wave)]


def _rest(settings: Settings, span: Span | None, oldest: dict[tuple[Leg, str], int]) -> list[tuple[str, Statement]]:
    """The outboxes' statements, then the business's."""
    found = []
    for outbox in settings.all_outboxes:
        place = Place.of(outbox.url)
        with reading(place) as reader:
            statements = outbox_statements(reader, schema=place.schema_of(outbox.schema), span=span)
            if span is not None:
                _note_oldest(reader, statements[-1], "", oldest)
            found += [(outbox.url, one) for one in statements]
    for number, rule in enumerate(settings.rules):
        for url in settings.urls_of(rule):
            with reading(Place.of(url)) as reader:
                found.append((url, business_statement(reader, rule, number, span=span)))
    return found


def _note_oldest(reader: Reader, one: Statement, note: str, oldest: dict[tuple[Leg, str], int]) -> None:
    """A span hides how far a source reaches: asked for by itself, of an index's first entry."""
    conditions = one.where[:1]  # the kind or the group; the others are the span
    sql = f"SELECT MIN({one.range_by}) FROM {one.table} WHERE {conditions[0]}"  # noqa: S608 - checked names
    ((found,),) = reader.rows(sql, one.parameters[:1])
    if found is not None:
        oldest[one.leg, note] = min(int(found) // 1000, oldest.get((one.leg, note), int(found) // 1000))


def _together(found: Sequence[tuple[str, Statement]]) -> list[Read]:
    """Statements of one database in one snapshot where they are small; else one read each, in order."""
    by_url: dict[str, list[Statement]] = {}
    for url, statement in found:
        by_url.setdefault(url, []).append(statement)
    reads = []
    for url, statements in by_url.items():
        if sum(one.rows_about for one in statements) <= SNAPSHOT_ROWS_MAX:
            reads.append(Read(url, tuple(statements), snapshot=True))
        else:
            reads += [Read(url, (one,), snapshot=False) for one in statements]
    return reads


def _wave(one: Read) -> int:
    return -1 if one.snapshot else list(Leg).index(one.statements[0].leg)
