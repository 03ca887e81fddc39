"""Selects the hours that a run evaluates: closed hours that are new, changed or open. Pure; reads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.core.time_range import Span
from spark_reconcile.results.window_store import Window

WINDOWS_MAX: Final = 24 * 366 * 2


def closed_windows(since_ms: int, until_ms: int, *, now_ms: int, grace_ms: int) -> list[int]:
    """Returns the hours that overlap [since, until) and ended more than the grace time ago, oldest first.

    Raises ConfigurationError for a range that is empty or too long.
    """
    if until_ms <= since_ms:
        raise ConfigurationError("--since is not before --until; name an earlier --since")
    first, last = since_ms // HOUR_MS, -(-until_ms // HOUR_MS)
    if last - first > WINDOWS_MAX:
        raise ConfigurationError(f"the span has {last - first:,} hours; at most {WINDOWS_MAX:,} are judged in one run")
    starts = [hour * HOUR_MS for hour in range(first, last)]
    return [start for start in starts if start + HOUR_MS + grace_ms <= now_ms]


def newest_closed(now_ms: int, *, grace_ms: int) -> int:
    """Returns the newest hour that ended more than the grace time ago."""
    return (now_ms - grace_ms) // HOUR_MS * HOUR_MS - HOUR_MS


def span_of(windows: Sequence[int], *, slack_ms: int) -> Span:
    """Returns the time range to read for these windows: extended at both ends, since rows and ids have other clocks."""
    return Span(since_ms=windows[0] - slack_ms, until_ms=windows[-1] + HOUR_MS + slack_ms)


def to_judge(windows: Sequence[int], shown: Mapping[int, Window], fingerprints: Mapping[int, str]) -> list[int]:
    """Returns the windows that were never evaluated, whose records changed since, or that were open."""
    return [start for start in windows if _stale(shown.get(start), fingerprints.get(start, ""))]


def batches(windows: Sequence[int], *, size: int) -> list[list[int]]:
    """Splits windows into batches of so many, which are evaluated together."""
    return [list(windows[start : start + size]) for start in range(0, len(windows), size)]


def _stale(shown: Window | None, fingerprint: str) -> bool:
    return shown is None or shown.open or shown.fingerprint != fingerprint
