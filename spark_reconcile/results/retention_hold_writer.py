"""The retention hold: evidence is needed from the first hour that was never evaluated. Runs by the hour write it
for the services that purge evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.runtime.retention_hold import JUDGED_FILE, Purgeable, RetentionHold
from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.load.input_extent import InputExtent
from spark_reconcile.results.output_folder import write_whole

_PURGED: Final = frozenset(Purgeable)


def write_needed(
    output: Path, shown: Collection[int], inputs: Iterable[InputExtent], *, slack_ms: int, now_ms: int
) -> RetentionHold:  # fmt: skip
    """Write the hold to the output folder; `shown`: all hours ever evaluated. Raises OSError."""
    hold = RetentionHold(written_at_ms=now_ms, needed_since_ms=needed_since(shown, inputs, slack_ms=slack_ms))
    write_whole(output / JUDGED_FILE, msgspec.json.encode(hold).decode())
    return hold


def needed_since(shown: Collection[int], inputs: Iterable[InputExtent], *, slack_ms: int) -> dict[str, int]:
    """Returns the hold by kind of evidence, the minimum over its sources. Hours that a source no longer has do not
    need it, nor do hours before the first one evaluated here. An hour counts once it was evaluated at all: with
    messages scheduled for two years, no hour would be final before.
    """
    since_by_kind: dict[str, int] = {}
    for extent in inputs:
        if extent.source in _PURGED and extent.complete_since_ms is not None and shown:
            since_ms = _first_unjudged(shown, extent.complete_since_ms) - slack_ms
            since_by_kind[extent.source] = min(since_ms, since_by_kind.get(extent.source, since_ms))
    return since_by_kind


def _first_unjudged(shown: Collection[int], since_ms: int) -> int:
    start = max(min(shown), since_ms // HOUR_MS * HOUR_MS)
    while start in shown:
        start += HOUR_MS
    return start
