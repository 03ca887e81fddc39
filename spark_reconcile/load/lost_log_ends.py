"""Finds the ends of the broker's logs: torn tails, and messages beyond the end that actions name. Returns no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox_core.journal import journal
from outbox_core.journal.block import SEGMENT_HEAD_BYTES, SegmentRefused, block_head_at
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.sources.broker_logs import DELIVERY_KINDS, LogSegment, begins_whole, blocks_of

if TYPE_CHECKING:
    from spark_reconcile.core.plausible_times import InputCount

UNSYNCED_MS: Final = 60_000
"""Blocks older than this are on the disk and visible on every machine: Linux writes pages back after 30 s, checked
every 5 s; NFS caches attributes of a file for at most 60 s.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """The end of a log at the time it was read.

    `offset`: the log offset after its last complete block; `last_ms`: that block's time, 0 if the last segment has
    none. `settled_offset`: the offset after the newest block that is at least as old as the given time, or the start of
    the last segment: one before it was durable before it was begun. `torn`: the nonzero bytes after the last complete
    block, in a sentence.
    """

    offset: int = 0
    last_ms: int = 0
    settled_offset: int = 0
    torn: str = ""


def log_end(segments: Sequence[LogSegment], *, settled_ms: int = 0) -> LogEnd:
    """Find where a log ends, and where it ended at `settled_ms`; reading rows detects damage before its end."""
    last = segments[-1]
    try:
        found = _end_of(last, settled_ms)
        tail = _tail_of(last, found.offset)
        is_torn = bool(tail.strip(b"\0")) and not _is_whole_by_now(last, found.offset)
    except (journal.SegmentDamaged, SegmentRefused, OSError):
        return LogEnd(offset=last.first_offset, settled_offset=last.first_offset)
    torn = f"torn tail of {len(tail):,} bytes at {last.path}: read up to it" if is_torn else ""
    return replace(found, torn=torn)


def _end_of(last: LogSegment, settled_ms: int) -> LogEnd:
    end = settled = last.first_offset
    last_ms = 0
    for block in blocks_of(last, wanted=()):
        end = block.end
        last_ms = last_ms if block.stored_ms is None else block.stored_ms
        if block.stored_ms is not None and block.stored_ms <= settled_ms:
            settled = block.end
    return LogEnd(offset=end, last_ms=last_ms, settled_offset=settled)


def torn_tail(segments: Sequence[LogSegment]) -> str:
    """Describe nonzero bytes after the last complete block of a log, in a sentence; empty if there are none."""
    return log_end(segments).torn


def refuse_lost_end(
    counts: Sequence[InputCount],
    segments: Sequence[LogSegment],
    *,
    torn: str,
    again: Callable[[], Sequence[InputCount]],
) -> None:
    """Raises NotComparable if the action log proves that the message log of these segments had more messages.

    `again`: counts the message log again. A running broker may have written since.
    """
    is_whole = begins_whole(segments)
    if not beyond_the_end(counts, is_whole=is_whole):
        return
    missing = beyond_the_end([*counts, *again()], is_whole=is_whole)
    if missing:
        details = "; ".join([*missing[:3], *([torn] if torn else [])])
        raise NotComparable(
            "the broker's action log names messages behind the end of its message log, so nothing is judged: "
            f"{details}. Restore {segments[-1].path} from a copy; if that is none of this broker's, name the folder of "
            "one broker"
        )


def beyond_the_end(counts: Sequence[InputCount], *, is_whole: bool) -> list[str]:
    """Returns topics with actions on messages after the last one in the message log, with both sequences.

    `is_whole`: nothing of the message log was dropped. Else a topic that is not in it proves nothing.
    """
    last_stored: dict[str, int] = {}
    named: dict[str, int] = {}
    for count in counts:
        if count.input_kind == "messages":
            last_stored[count.topic] = max(count.last_sequence, last_stored.get(count.topic, -1))
        elif count.input_kind == "actions" and count.note.partition(" ")[0] in DELIVERY_KINDS:
            named[count.topic] = max(count.last_sequence, named.get(count.topic, -1))
    return [
        f"message {last_sequence} of {topic} "
        f"({f'the last one there is {last_stored[topic]}' if topic in last_stored else 'none is there'})"
        for topic, last_sequence in sorted(named.items())
        if last_sequence > last_stored.get(topic, -1) and (is_whole or topic in last_stored)
    ]


def _tail_of(segment: LogSegment, end: int) -> bytes:
    """Returns the bytes that the survey found behind a log's end."""
    position = SEGMENT_HEAD_BYTES + end - segment.first_offset
    with Path(segment.path).open("rb") as file:
        file.seek(position)
        return file.read(max(0, segment.size_bytes - position))


def _is_whole_by_now(segment: LogSegment, end: int) -> bool:
    """Whether a block was being written at the time: the broker may be running."""
    with Path(segment.path).open("rb") as file:
        file.seek(SEGMENT_HEAD_BYTES + end - segment.first_offset)
        data = file.read()
    head = block_head_at(data, 0, first=end)
    return head is not None and head.end <= len(data)
