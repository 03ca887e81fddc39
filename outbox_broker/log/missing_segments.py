"""Checks that no segment of a log is missing, by file names, file sizes and the proof note. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from outbox_broker.log.segment_scan import Segment
from outbox_broker.log.sync_proof import NOTE, read_proven
from outbox_core.journal.journal import HEADER_BYTES, SegmentDamaged


def is_unfinished(path: Path) -> bool:
    """Returns whether creation of a segment was interrupted by a crash: its header is incomplete."""
    size = path.stat().st_size
    return size < HEADER_BYTES or (size == HEADER_BYTES and not any(path.read_bytes()))


def content_bytes(path: Path) -> int:
    """Returns the size of a segment without its header, in bytes."""
    return path.stat().st_size - HEADER_BYTES


def refuse_if_newest_is_missing(folder: Path, paths: Sequence[Path]) -> None:
    """Raise SegmentDamaged if the newest segment, named by the proof note in the log's folder, is missing and none is
    newer.

    The note names the newest segment at the time of writing; retention removes no segment before a newer one exists.
    """
    noted = read_proven(folder).segment
    if noted and not any(path.name >= noted for path in paths):
        raise SegmentDamaged(
            f"{noted} is missing in {folder}, the newest segment: restore it from a copy; or remove "
            f"{folder / NOTE}, to go on without all that was in it"
        )


def end_where_the_next_begins(segments: Sequence[Segment], *, segment_bytes: int) -> None:
    """Set each segment's end to the start of the next one. Raises SegmentDamaged if one in between is missing."""
    for one, following in pairwise(segments):
        one.end = following.first_offset
        missing_bytes = one.end - one.first_offset - content_bytes(one.path)
        if missing_bytes < 0:
            raise SegmentDamaged(f"{one.path.name}: it reaches into the next segment; restore it from a copy")
        if missing_bytes >= segment_bytes:
            raise SegmentDamaged(f"a segment is missing behind {one.path.name}; restore it from a copy")
