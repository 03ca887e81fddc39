"""Retention gaps: hours that were purged from a source before they were evaluated. Pure.

If archive and log went together, an hour without a run looks like an hour without messages, and balances. Told are
hours from the first one that was evaluated here, and from when the source was first seen: nobody had promised earlier
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.load.input_extent import InputExtent
from spark_reconcile.results.summary import UnjudgedHours
from spark_reconcile.results.window_selection import WINDOWS_MAX
from spark_reconcile.results.window_store import Window

_CURES: Final[Mapping[str, str]] = {
    "archive": "keep the archive for longer (--archive-days of the compensator, archive_days here)",
    "inbox": "keep the inboxes for longer (--inbox-days of the compensator, inbox_days here)",
    "broker": "keep the broker's log for longer (its retention_ms and retention_bytes)",
}
"""The sources that are purged, and the settings of their retention."""


def reaches(inputs: Iterable[InputExtent]) -> dict[str, int]:
    """Returns since when each purged source is complete, by its name; without empty sources."""
    return {
        _name(one): one.complete_since_ms
        for one in inputs
        if one.source in _CURES and one.complete_since_ms is not None
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
    asked, now, found = set(windows), reaches(inputs), []
    for one in inputs:
        name = _name(one)
        if name not in now:
            continue
        gone = _gone(shown, begun.get(name, now[name]), now[name])
        never = [start for start in gone if start not in shown]
        never += [start for start in asked if name in shown[start].late]
        still = [start for start in gone if start in shown and shown[start].open]
        hours = sorted({*never, *still})
        found.append(
            UnjudgedHours(
                source=one.source, what=one.what, hours=len(set(never)), open_hours=len(still),
                since_ms=hours[0] if hours else 0, until_ms=hours[-1] + HOUR_MS if hours else 0,
            )
        )  # fmt: skip
    return found


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


def with_notes(inputs: Sequence[InputExtent], found: Iterable[UnjudgedHours]) -> list[InputExtent]:
    """Returns the inputs, each with a note on its retention gaps."""
    told = {(one.source, one.what): _sentence(one) for one in found}
    return [replace(one, note="; ".join(filter(None, (one.note, told.get((one.source, one.what)))))) for one in inputs]


def _sentence(one: UnjudgedHours) -> str:
    if not (one.hours or one.open_hours):
        return ""
    said = [f"{one.hours:,} hours went before they were judged"] if one.hours else []
    said += [f"{one.open_hours:,} hours went while something in them still moved"] if one.open_hours else []
    cures = (["run more often"] if one.hours else []) + (
        ["let --since, or --lookback of watch, reach further back"] if one.open_hours else []
    )
    return (
        f"of {_told(one.since_ms)} to {_told(one.until_ms)} {', and '.join(said)}: {', '.join(cures)}, "
        f"or {_CURES[one.source]}"
    )


def _gone(shown: Mapping[int, Window], begun_ms: int, reach_ms: int) -> range:
    """Returns the hours that a source had since the first evaluation here, and no longer has."""
    if not shown:
        return range(0)
    first = max(min(shown), -(-begun_ms // HOUR_MS) * HOUR_MS)
    return range(first, reach_ms // HOUR_MS * HOUR_MS, HOUR_MS)[:WINDOWS_MAX]


def _name(one: InputExtent) -> str:
    """Returns the name that judged_late() splits again: no source contains a space."""
    return f"{one.source} {one.what}"


def _told(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="minutes")
