"""Determines since when a table that is purged has all rows: by settings, or since its oldest row. Reads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.settings import Settings
from spark_reconcile.sources.sql_statements import Leg

if TYPE_CHECKING:
    from spark_reconcile.core.source_counts import LegCount

NEVER_MS: Final = 1 << 53
"""Start of completeness of an empty source: later than any time."""
DAY_MS: Final = 24 * 60 * 60 * 1000
PURGE_MARGIN_MS: Final = 60 * 60 * 1000


def archive_reach(
    settings: Settings, counts: Sequence[LegCount], oldest_ms: Mapping[tuple[Leg, str], int], *, now_ms: int
) -> int:
    """Since when the archive is complete: by settings, by its retention, or since its oldest row."""
    reach = kept_since(settings.complete_since_ms, settings.archive_days, now_ms=now_ms)
    if reach is not None:
        return reach
    return oldest_row([one for one in counts if one.leg == Leg.ARCHIVE], settings, oldest_ms.get((Leg.ARCHIVE, "")))


def kept_since(complete_since_ms: int | None, days: float | None, *, now_ms: int) -> int | None:
    """Since when rows are kept, by the settings: the time takes precedence over the days; None without settings.

    A purge may run while we read, by another clock: hence the margin.
    """
    if complete_since_ms is not None or days is None:
        return complete_since_ms
    return int(now_ms - days * DAY_MS) + PURGE_MARGIN_MS


def oldest_row(counts: Sequence[LegCount], settings: Settings, known_ms: int | None) -> int:
    """The oldest row's time plus the clock skew; NEVER_MS without rows. `known_ms`: the oldest of rows not read."""
    skew_ms = int(settings.grace.clock_skew_seconds * 1000)
    found = [one.first_ms for one in counts] + ([] if known_ms is None else [known_ms])
    return min(found) + skew_ms if found else NEVER_MS
