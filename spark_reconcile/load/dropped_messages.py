"""Notes on messages that the broker's retention dropped before a group had settled them. Reads nothing.

The broker does so only where it is configured to (`retention_drops_unread`), and records for each group up to where.
These messages are in no log any more, so no verdict names them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.time_arguments import utc_text

if TYPE_CHECKING:
    from spark_reconcile.core.source_counts import LegCount

DROPPED: Final = "dropped"
"""The kind of the action."""
NAMED_MAX: Final = 3


def note_on_dropped(counts: Iterable[LegCount]) -> str:
    """Returns a note on the action log if groups lost messages to retention; else empty."""
    groups = ((one.note.partition(" "), one) for one in counts)
    found = sorted(
        (one.topic, group, one.last_place, one.last_ms) for (kind, _, group), one in groups if kind == DROPPED
    )
    named = [
        f"{group} those of {topic} below {place:,} (the last at {utc_text(last_ms)})"
        for topic, group, place, last_ms in found[:NAMED_MAX]
    ]
    if not named:
        return ""
    more = f"; and {len(found) - NAMED_MAX:,} more groups" if len(found) > NAMED_MAX else ""
    return (
        "retention dropped messages that groups had not settled, of which no verdict tells (retention_drops_unread of "
        f"the broker): {'; '.join(named)}{more}"
    )
