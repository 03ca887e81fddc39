"""What will be read, checked against every source before any work, in which order and how parted. Reads no leg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from messaging.errors import ConfigurationError
from spark_reconcile.settings import Settings
from spark_reconcile.sources.database import Place, reading
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
    inboxes = []
    for inbox in settings.inboxes:
        place = Place.of(inbox.url or settings.database_url)
        with reading(place) as reader:
            statement = inbox_statement(reader, inbox, schema=schema_of(settings, inbox, place), span=span)
        inboxes.append((inbox.url or settings.database_url, statement))
    segments = [one for log in ("messages", "actions") for one in survey(settings.broker_data, log)]
    return Plan(
        inboxes=tuple(_together(inboxes)),
        rest=tuple(_together(_rest(settings, span))),
        broker_bytes=sum(one.size_bytes for one in segments),
    )


def waves(reads: Sequence[Read]) -> list[list[Read]]:
    """Reads that may be done at the same time, wave after wave: all snapshots, then large tables leg by leg."""
    ordered = sorted(reads, key=_wave)
    return [list(wave) for _, wave in groupby(ordered, key=_wave)]


def _rest(settings: Settings, span: Span | None) -> list[tuple[str, Statement]]:
    """The outboxes' statements, then the business's."""
    found = []
    for outbox in settings.all_outboxes:
        place = Place.of(outbox.url)
        with reading(place) as reader:
            schema = place.schema_of(outbox.schema)
            found += [(outbox.url, one) for one in outbox_statements(reader, schema=schema, span=span)]
    for number, rule in enumerate(settings.rules):
        for url in settings.urls_of(rule):
            with reading(Place.of(url)) as reader:
                found.append((url, business_statement(reader, rule, number, span=span)))
    return found


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
