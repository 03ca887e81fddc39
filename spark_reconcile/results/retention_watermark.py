"""Since when evidence is still needed, as runs by the hour tell those who purge it: from the first hour that was never
judged on. It knows nothing of who purges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.runtime.evidence_watermark import JUDGED_FILE, JudgedFile, Purgeable
from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.load.inputs import Input
from spark_reconcile.results.output_folder import write_whole

_PURGED: Final = frozenset(Purgeable)


def write_needed(
    output: Path, shown: Collection[int], inputs: Iterable[Input], *, slack_ms: int, now_ms: int
) -> JudgedFile:  # fmt: skip
    """Put it beside the results; `shown`: the hours that were judged, ever. Raises OSError."""
    found = JudgedFile(written_at_ms=now_ms, needed_since_ms=needed_since(shown, inputs, slack_ms=slack_ms))
    write_whole(output / JUDGED_FILE, msgspec.json.encode(found).decode())
    return found


def needed_since(shown: Collection[int], inputs: Iterable[Input], *, slack_ms: int) -> dict[str, int]:
    """By kind of evidence, the least of its sources. An hour that a source does not hold any more needs it no longer,
    and what was before the first hour that was judged here, nobody had promised to judge.
    """
    found: dict[str, int] = {}
    for one in inputs:
        if one.source in _PURGED and one.complete_since_ms is not None and shown:
            since_ms = _first_unjudged(shown, one.complete_since_ms) - slack_ms
            found[one.source] = min(since_ms, found.get(one.source, since_ms))
    return found


def _first_unjudged(shown: Collection[int], since_ms: int) -> int:
    start = max(min(shown), since_ms // HOUR_MS * HOUR_MS)
    while start in shown:
        start += HOUR_MS
    return start
