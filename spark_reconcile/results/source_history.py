"""Stores in the output folder what the sources had when a run last read them, for comparison by later runs.

A source that is not among a run's settings keeps its entry: several settings may share one output folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.results.output_folder import write_whole

TOTALS_FILE: Final = "totals.json"
FORMAT: Final = 1
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
SOURCES_MAX: Final = 10_000
GROUPS_MAX: Final = 100_000
"""Limit of the groups stored for one broker."""


class SourceTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One source: for an archive or an inbox, the times of its first and last row as a whole; for a log of the broker,
    those of its records; times in milliseconds, 0 if it was empty.

    `rows`: the number that the run read of the sources of this kind; in a run by the hour, of its time range;
    `whole_rows`: the number that the newest whole run read of them. `end_offset`: for a log, the offset up to which it
    was certainly on the disk. `noted_at_ms`: when the run began.
    """

    rows: int
    first_ms: int
    last_ms: int
    complete_since_ms: int | None
    noted_at_ms: int
    end_offset: int = 0
    whole_rows: int = 0


class BrokerGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The (topic, group) pairs that the action log of one broker knew, sorted, without those that were deleted."""

    pairs: list[tuple[str, str]]
    noted_at_ms: int


class KeptTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals by the names of the sources, and groups by the brokers' data folders."""

    format: int = FORMAT
    sources: dict[str, SourceTotals] = {}
    groups: dict[str, BrokerGroups] = {}


def read_totals(output: Path) -> KeptTotals:
    """Reads the totals of earlier runs; empty if there are none. Raises ConfigurationError for an unreadable file."""
    path = output / TOTALS_FILE
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigurationError(f"{path} has more than {FILE_BYTES_MAX:,} bytes: no run wrote it; move it away")
        totals = msgspec.json.decode(data, type=KeptTotals)
    except FileNotFoundError:
        return KeptTotals()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}); restore it from a copy, or move it away: then what vanished since "
            "earlier runs cannot be noticed by the next one"
        ) from error
    if totals.format != FORMAT:
        raise ConfigurationError(f"{path} was written by another version (format {totals.format}); move it away")
    return totals


def write_totals(output: Path, totals: KeptTotals) -> None:
    """Replace the file atomically. Beyond SOURCES_MAX, sources read longest ago are dropped. Raises OSError."""
    newest = sorted(totals.sources.items(), key=lambda item: -item[1].noted_at_ms)[:SOURCES_MAX]
    kept = KeptTotals(sources=dict(sorted(newest)), groups=dict(sorted(totals.groups.items())))
    write_whole(output / TOTALS_FILE, msgspec.json.format(msgspec.json.encode(kept)).decode())
