"""Notes on unexpectedly empty sources: a single run cannot know whether they ever had rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_reconcile.load.input_extent import InputExtent

if TYPE_CHECKING:
    from spark_reconcile.core.source_counts import LegCount


def with_empty_notes(
    inputs: Sequence[InputExtent], counts: Sequence[LegCount], *, topics: Sequence[str]
) -> list[InputExtent]:
    """Returns the inputs, with notes on inboxes and archives without rows.

    `topics`: those to which this outbox publishes, by rules and rows; empty if its archive has files, too.
    """
    return [
        replace(extent, note="; ".join(filter(None, (extent.note, _note(extent, counts, topics))))) for extent in inputs
    ]


def _note(extent: InputExtent, counts: Sequence[LegCount], topics: Sequence[str]) -> str:
    if extent.rows:
        return ""
    # A run by the hour reads a time range: only a source without any row at all has no such time.
    is_empty = extent.complete_since_ms is None
    match extent.source:
        case "inbox":
            return _of_inbox(extent.what, counts, is_empty=is_empty)
        case "archive" if is_empty:
            return _of_archive(counts, topics)
        case _:
            return ""


def _of_inbox(group: str, counts: Sequence[LegCount], *, is_empty: bool) -> str:
    named = [count for count in counts if count.leg == "actions" and count.note.partition(" ")[2] == group]
    acked = sum(count.rows for count in named if count.note == f"acked {group}")
    if acked and is_empty:
        return (
            f"empty, while the broker has {acked:,} acknowledgements of this group: whether it was emptied cannot be "
            "known; if its consumers have their inbox in another schema, name it in [[inboxes]]"
        )
    return "" if named else "the broker knows no action of this group yet"


def _of_archive(counts: Sequence[LegCount], topics: Sequence[str]) -> str:
    stored = sum(count.rows for count in counts if count.leg == "messages" and count.topic in topics)
    if not stored:
        return ""
    return (
        f"empty, while the broker has {stored:,} messages on topics of this outbox: whether it was emptied, or is off, "
        "cannot be known"
    )
