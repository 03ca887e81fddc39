"""Retention: hours that were purged from a source before they were evaluated, and since when evidence is still needed.

If archive and log went together, an hour without a run looks like an hour without messages, and balances. Told are
hours from the first one that was evaluated here, and from when the source was first seen: nobody had promised earlier
ones. The retention hold says since when evidence is needed: from the first hour that was never evaluated. Runs by the
hour write it for the services that purge evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.runtime.retention_hold import JUDGED_FILE, Purgeable, RetentionHold
from spark_reconcile.core.synced_files import write_whole
from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.results.summary import InputExtent, UnjudgedHours
from spark_reconcile.results.window_store import WINDOWS_MAX, Window

_CURES: Final[Mapping[str, str]] = {
    "archive": "keep the archive for longer (--archive-days of the compensator, archive_days here)",
    "inbox": "keep the inboxes for longer (--inbox-days of the compensator, inbox_days here)",
    "broker": "keep the broker's log for longer (its retention_ms and retention_bytes)",
}
"""The sources that are purged, and the settings of their retention."""


def reaches(inputs: Iterable[InputExtent]) -> dict[str, int]:
    """Returns since when each purged source is complete, by its name; without empty sources."""
    return {
        _name(extent): extent.complete_since_ms
        for extent in inputs
        if extent.source in _CURES and extent.complete_since_ms is not None
    }


def first_looked_at_late(
    windows: Iterable[int], shown: Mapping[int, Window], begun: Mapping[str, int], now: Mapping[str, int]
) -> dict[int, list[str]]:
    """Returns, by window, the sources that had it once, but no longer at its first evaluation.

    `begun`: since when each source was complete when a run first read it; `now`: since when it is complete now.
    """
    gone = {name: _gone(shown, begun.get(name, reach), reach) for name, reach in now.items()}
    return {
        start: shown[start].late if start in shown else sorted(name for name, hours in gone.items() if start in hours)
        for start in windows
    }


def unjudged(
    windows: Sequence[int], shown: Mapping[int, Window], begun: Mapping[str, int], *, inputs: Sequence[InputExtent]
) -> list[UnjudgedHours]:
    """Returns a line for each purged source, on hours since the first one evaluated here.

    `windows`: those of the run, which are in `shown`; others were evaluated in time, or never, or were still open at
    their last evaluation.
    """
    run_windows, now, gaps = set(windows), reaches(inputs), []
    for extent in inputs:
        name = _name(extent)
        if name not in now:
            continue
        gone = _gone(shown, begun.get(name, now[name]), now[name])
        never = [start for start in gone if start not in shown]
        never += [start for start in run_windows if name in shown[start].late]
        still = [start for start in gone if start in shown and shown[start].open]
        hours = sorted({*never, *still})
        gaps.append(
            UnjudgedHours(
                source=extent.source, what=extent.what, hours=len(set(never)), open_hours=len(still),
                since_ms=hours[0] if hours else 0, until_ms=hours[-1] + HOUR_MS if hours else 0,
            )
        )  # fmt: skip
    return gaps


def judged_late(shown: Mapping[int, Window]) -> list[UnjudgedHours]:
    """Returns, by source, the hours that it no longer had at their first evaluation."""
    hours: dict[str, list[int]] = {}
    for start, window in sorted(shown.items()):
        for name in window.late:
            hours.setdefault(name, []).append(start)
    return [
        UnjudgedHours(
            source=source, what=what, hours=len(late), open_hours=0, since_ms=late[0], until_ms=late[-1] + HOUR_MS
        )
        for name, late in sorted(hours.items())
        for source, _, what in (name.partition(" "),)
    ]


def with_notes(inputs: Sequence[InputExtent], gaps: Iterable[UnjudgedHours]) -> list[InputExtent]:
    """Returns the inputs, each with a note on its retention gaps."""
    notes = {(gap.source, gap.what): _sentence(gap) for gap in gaps}
    return [
        replace(extent, note="; ".join(filter(None, (extent.note, notes.get((extent.source, extent.what))))))
        for extent in inputs
    ]


def _sentence(gap: UnjudgedHours) -> str:
    if not (gap.hours or gap.open_hours):
        return ""
    parts = [f"{gap.hours:,} hours went before they were judged"] if gap.hours else []
    parts += [f"{gap.open_hours:,} hours went while something in them still moved"] if gap.open_hours else []
    cures = (["run more often"] if gap.hours else []) + (
        ["let --since, or --lookback of watch, reach further back"] if gap.open_hours else []
    )
    return (
        f"of {_minute_text(gap.since_ms)} to {_minute_text(gap.until_ms)} {', and '.join(parts)}: {', '.join(cures)}, "
        f"or {_CURES[gap.source]}"
    )


def _gone(shown: Mapping[int, Window], begun_ms: int, reach_ms: int) -> range:
    """Returns the hours that a source had since the first evaluation here, and no longer has."""
    if not shown:
        return range(0)
    first = max(min(shown), -(-begun_ms // HOUR_MS) * HOUR_MS)
    return range(first, reach_ms // HOUR_MS * HOUR_MS, HOUR_MS)[:WINDOWS_MAX]


def _name(extent: InputExtent) -> str:
    """Returns the name that judged_late() splits again: no source contains a space."""
    return f"{extent.source} {extent.what}"


def _minute_text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="minutes")


_PURGED: Final = frozenset(Purgeable)


def write_needed(
    output: Path, shown: Collection[int], inputs: Iterable[InputExtent], *, slack_ms: int, now_ms: int
) -> RetentionHold:  # fmt: skip
    """Write the hold to the output folder; `shown`: all hours ever evaluated. Raises OSError."""
    hold = RetentionHold(written_at_ms=now_ms, needed_since_ms=needed_since(shown, inputs, slack_ms=slack_ms))
    write_whole(output / JUDGED_FILE, msgspec.json.encode(hold))
    return hold


def needed_since(shown: Collection[int], inputs: Iterable[InputExtent], *, slack_ms: int) -> dict[str, int]:
    """Returns the hold by kind of evidence, the minimum over its sources. Hours that a source no longer has do not
    need it, nor do hours before the first one evaluated here. An hour counts once it was evaluated at all: with
    messages scheduled for two years, no hour would be final before.
    """
    since_by_kind: dict[str, int] = {}
    for extent in inputs:
        if extent.source in _PURGED and extent.complete_since_ms is not None and shown:
            since_ms = _first_open(shown, extent.complete_since_ms) - slack_ms
            since_by_kind[extent.source] = min(since_ms, since_by_kind.get(extent.source, since_ms))
    return since_by_kind


def _first_open(shown: Collection[int], since_ms: int) -> int:
    start = max(min(shown), since_ms // HOUR_MS * HOUR_MS)
    while start in shown:
        start += HOUR_MS
    return start
