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
    reach = _told(settings.complete_since_ms, settings.archive_days, settings, now_ms=now_ms)
    if reach is not None:
        return reach
    return oldest_row(
        [count for count in counts if count.leg == Leg.ARCHIVE], settings, oldest_ms.get((Leg.ARCHIVE, ""))
    )


def kept_since(complete_since_ms: int | None, days: float | None, *, now_ms: int) -> int | None:
    """Since when rows are kept, by the settings: the time takes precedence over the days; None without settings.

    A purge may run while we read, by another clock: hence the margin.
    """
    if complete_since_ms is not None or days is None:
        return complete_since_ms
    return int(now_ms - days * DAY_MS) + PURGE_MARGIN_MS


def _told(complete_since_ms: int | None, days: float | None, settings: Settings, *, now_ms: int) -> int | None:
    """Since when the settings say that rows are kept, by every clock: what the broker dates a moment later may have
    been written a moment before, by the database's clock.
    """
    since_ms = kept_since(complete_since_ms, days, now_ms=now_ms)
    return None if since_ms is None else since_ms + settings.grace.clock_skew_ms


def inbox_reaches(
    settings: Settings, counts: Sequence[LegCount], oldest_ms: Sequence[int | None], *, now_ms: int, is_whole: bool
) -> dict[tuple[str, str], int]:
    """Since when the inbox of each (topic, group) is complete; topic "" is any topic.

    `oldest_ms`: the group's oldest row in the table of each inbox of the settings; None: it has none. Two tables may
    serve one group: they are complete only where both are, but for one that has no row. `is_whole`: rows of all times
    were read, so a purge has taken what is older than these.
    """
    reaches_by_group: dict[tuple[str, str], list[int]] = {}
    for inbox, known_ms in zip(settings.inboxes, oldest_ms, strict=True):
        read = [count for count in counts if count.leg == Leg.INBOX and count.note == inbox.group] if is_whole else []
        reach = _told(inbox.complete_since_ms, settings.inbox_days, settings, now_ms=now_ms)
        if reach is None and known_ms is not None:
            reach = max(known_ms + settings.grace.clock_skew_ms, 0 if not read else oldest_row(read, settings, None))
        for topic in inbox.topics or ("",):
            reaches_by_group.setdefault((topic, inbox.group), []).extend([] if reach is None else [reach])
    return {topic_group: max(reaches, default=NEVER_MS) for topic_group, reaches in reaches_by_group.items()}


def oldest_row(counts: Sequence[LegCount], settings: Settings, known_ms: int | None) -> int:
    """The oldest row's time plus the clock skew; NEVER_MS without rows. `known_ms`: the oldest of rows not read."""
    # Rows of a topic may all have impossible times: then these have no first one.
    first_times = [count.first_ms for count in counts if count.first_ms] + ([] if known_ms is None else [known_ms])
    return min(first_times) + settings.grace.clock_skew_ms if first_times else NEVER_MS
