"""Lists the segments of the broker's logs, and their sizes. Reads only headers; independent of Spark."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from outbox_core.common.errors import ConfigurationError
from outbox_core.journal import journal
from spark_reconcile.core.errors import NotComparable


class LogSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment file at the time of the survey: records appended later are not read."""

    path: str
    first_offset: int
    created_at_ms: int
    size_bytes: int
    last: bool
    changed_ns: int = 0
    """The modification time of the file: a folder restored from a copy has other files of the same names."""
    known_bytes: int = 0
    """Records that end within so many bytes were read before, and are skipped."""


def survey(folder: Path, log: str) -> list[LogSegment]:
    """Lists the segments of `messages` or `actions`, oldest first.

    Raises ConfigurationError if this is no broker's data folder, and NotComparable if a segment is missing in the
    middle, truncated or damaged in its header.
    """
    paths = journal.segment_paths(folder / log)
    if not paths:
        raise ConfigurationError(
            f"{folder} is not a broker's data folder: it has no segments in {log}/; name the folder that was given to "
            "`outbox broker serve --data`"
        )
    segments = [_segment(path, last=index == len(paths) - 1) for index, path in enumerate(paths)]
    for segment, following in pairwise(segments):
        if segment.first_offset + segment.size_bytes - journal.HEADER_BYTES != following.first_offset:
            raise NotComparable(
                f"the broker's log has a hole between {segment.path} and {following.path}; restore the missing segment"
            )
    return segments


def grown(before: list[LogSegment], now: list[LogSegment]) -> list[LogSegment]:
    """Returns what was appended between two surveys."""
    sizes = {segment.path: segment.size_bytes for segment in before}
    return [
        msgspec.structs.replace(segment, known_bytes=sizes.get(segment.path, 0))
        for segment in now
        if segment.size_bytes > sizes.get(segment.path, 0)
    ]


def reach_ms(segments: list[LogSegment]) -> int:
    """Returns since when a log is complete: 0 if none of it was dropped."""
    return 0 if begins_whole(segments) else segments[0].created_at_ms


def begins_whole(segments: Sequence[LogSegment]) -> bool:
    """Whether a log has its first segment: nothing of it was dropped."""
    return segments[0].first_offset == 0


def _segment(path: Path, *, last: bool) -> LogSegment:
    try:
        with path.open("rb") as file:
            head = file.read(journal.HEADER_BYTES)
        stat = path.stat()
        if last and len(head) < journal.HEADER_BYTES:
            return LogSegment(path=str(path), first_offset=int(path.stem), created_at_ms=0, size_bytes=0, last=True)
        header = journal.SegmentHeader.decode(head)
    except OSError as error:
        raise NotComparable(f"cannot read the broker's segment {path}: {error.strerror}") from error
    except journal.SegmentDamaged as damage:
        raise NotComparable(f"the broker's segment {path} is damaged: {damage}; restore it from a copy") from damage
    return LogSegment(
        path=str(path),
        first_offset=header.first_offset,
        created_at_ms=header.created_at_ms,
        size_bytes=stat.st_size,
        last=last,
        changed_ns=stat.st_mtime_ns,
    )
