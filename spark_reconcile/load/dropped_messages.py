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
    groups = ((count.note.partition(" "), count) for count in counts)
    dropped = sorted(
        (count.topic, group, count.last_place, count.last_ms) for (kind, _, group), count in groups if kind == DROPPED
    )
    named = [
        f"{group} those of {topic} below {sequence:,} (the last at {utc_text(last_ms)})"
        for topic, group, sequence, last_ms in dropped[:NAMED_MAX]
    ]
    if not named:
        return ""
    more = f"; and {len(dropped) - NAMED_MAX:,} more groups" if len(dropped) > NAMED_MAX else ""
    return (
        "retention dropped messages that groups had not settled, of which no verdict tells (retention_drops_unread of "
        f"the broker): {'; '.join(named)}{more}"
    )
