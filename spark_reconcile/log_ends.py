"""Where the broker's logs end: what is torn there, and what the actions know of behind it. It makes no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from messaging import journal
from messaging.frame_bounds import payload_bounds
from spark_reconcile.errors import NotComparable
from spark_reconcile.sources.frames import data_of
from spark_reconcile.sources.segments import Segment, begins_whole

if TYPE_CHECKING:
    from spark_reconcile.reading import LegCount

FRAMES_AT_ONCE: Final = 16_384
_OF_A_STORED_ONE: Final = frozenset({"delivered", "acked", "requeued", "extended", "died", "redriven"})
"""Actions on a message that was handed out, so that it was durable before."""


def torn_tail(segments: Sequence[Segment]) -> str:
    """What stands behind the last whole record of a log and is not zero, in a sentence; empty where nothing does.

    Damage elsewhere is named by whoever reads the rows.
    """
    last, start = segments[-1], journal.HEADER_BYTES
    try:
        data = data_of(last)
        while (found := payload_bounds(data, start=start, frames_max=FRAMES_AT_ONCE))[0]:
            start = found[1]
        if not data[start:].strip(b"\0") or _is_whole_by_now(last, start):
            return ""
    except (journal.SegmentDamaged, OSError):
        return ""
    return f"torn tail of {len(data) - start:,} bytes at {last.path}: read up to it"


def refuse_lost_end(
    counts: Sequence[LegCount], segments: Sequence[Segment], *, torn: str, again: Callable[[], Sequence[LegCount]]
) -> None:
    """Raises NotComparable where the action log proves that the message log of these segments held more than is there.

    `again`: what the message log holds by now. A broker that is at work may have written since.
    """
    is_whole = begins_whole(segments)
    if not beyond_the_end(counts, is_whole=is_whole):
        return
    missing = beyond_the_end([*counts, *again()], is_whole=is_whole)
    if missing:
        told = "; ".join([*missing[:3], *([torn] if torn else [])])
        raise NotComparable(
            "the broker's action log names messages behind the end of its message log, so nothing is judged: "
            f"{told}. Restore {segments[-1].path} from a copy; if that is none of this broker's, name the folder of "
            "one broker"
        )


def beyond_the_end(counts: Sequence[LegCount], *, is_whole: bool) -> list[str]:
    """Topics of which the action log names messages behind the last one that the message log holds, with both places.

    `is_whole`: nothing of the message log was dropped. Else a topic that is not in it tells nothing.
    """
    held: dict[str, int] = {}
    named: dict[str, int] = {}
    for one in counts:
        if one.leg == "messages":
            held[one.topic] = max(one.last_place, held.get(one.topic, -1))
        elif one.leg == "actions" and one.note.partition(" ")[0] in _OF_A_STORED_ONE:
            named[one.topic] = max(one.last_place, named.get(one.topic, -1))
    return [
        f"message {place} of {topic} ({f'the last one there is {held[topic]}' if topic in held else 'none is there'})"
        for topic, place in sorted(named.items())
        if place > held.get(topic, -1) and (is_whole or topic in held)
    ]


def _is_whole_by_now(segment: Segment, start: int) -> bool:
    """Whether a record was just being written: the broker may be at work."""
    with Path(segment.path).open("rb") as file:
        file.seek(start)
        return bool(payload_bounds(file.read(), start=0, frames_max=1)[0])
