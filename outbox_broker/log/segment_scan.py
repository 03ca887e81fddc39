"""Scans the bytes of a segment when a log is opened: yields whole frames and the damaged gaps in between. Read-only."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from outbox_core.journal.frame_search import FRAME, next_frame_behind
from outbox_core.journal.journal import (
    FRAME_BYTES,
    HEADER_BYTES,
    MAGIC,
    RECORD_BYTES_MAX,
    Frame,
    SegmentDamaged,
    SegmentHeader,
    SegmentKind,
)


@dataclass(frozen=True, slots=True)
class Gap:
    """A damaged byte range of a log: not valid frames, although frames follow. It is left as it is."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """Returns the offset after the damage."""
        return self.offset + self.size_bytes


@dataclass(slots=True)
class Segment:
    """An open segment. `end` is the offset after its last frame; for a sealed segment, where the next one begins.

    `grown_from` is the offset from which its growth is counted: after the checkpoint that it begins with, if any.
    """

    path: Path
    first_offset: int
    end: int
    created_at_ms: int
    descriptor: int
    grown_from: int
    sealed: bool = True


def scan(segment: Segment, *, start: int) -> Iterator[Frame | Gap]:
    """Yields the frames of a segment from the offset `start`, where a frame begins, and the gaps between them.

    Bytes after the last whole frame are a gap in a sealed segment; in the active one they are a torn tail, which is
    left out.
    """
    with segment.path.open("rb") as file:
        size = file.seek(0, 2)
        if size <= HEADER_BYTES:
            yield from _scan(memoryview(b""), segment, start=start)
            return
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(mapped)
        try:
            found = min(size - HEADER_BYTES, segment.end - segment.first_offset) if segment.sealed else size
            yield from _scan(view[HEADER_BYTES : HEADER_BYTES + max(found, 0)], segment, start=start)
        finally:
            view.release()
            mapped.close()


def frames_in(data: bytes, *, first_offset: int) -> Iterator[Frame | Gap]:
    """Yields the frames of a byte range that begins and ends on frame boundaries, and the gaps between them."""
    position = 0
    crc_of = google_crc32c.value
    while position < len(data):
        start = position + FRAME_BYTES
        length = int.from_bytes(data[position : position + 4], "little")
        payload = data[start : start + length]
        if (
            not payload
            or len(payload) != length
            or crc_of(payload) != int.from_bytes(data[position + 4 : start], "little")
        ):
            following = next_frame_behind(memoryview(data), position)
            end = len(data) if following is None else following
            yield Gap(first_offset + position, end - position)
            position = end
        else:
            yield Frame(first_offset + position, payload)
            position = start + length


def payloads_of(data: bytes) -> list[bytes] | None:
    """Returns the payloads of a byte range that begins and ends on frame boundaries; None if a frame is not whole."""
    payloads: list[bytes] = []
    position, size = 0, len(data)
    unpack, crc_of = FRAME.unpack_from, google_crc32c.value
    try:
        while position < size:
            length, crc = unpack(data, position)
            position += FRAME_BYTES
            payload = data[position : position + length]
            position += length
            if crc_of(payload) != crc or not payload:
                return None
            payloads.append(payload)
    except struct.error:
        return None
    return payloads if position == size else None


def header_of(path: Path, *, kind: SegmentKind) -> SegmentHeader | None:
    """Returns a segment's header; None if it is damaged, in which case its frames may still be intact.

    Raises SegmentDamaged if the header is intact but belongs to another log or another version.
    """
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
    crc = int.from_bytes(data[HEADER_BYTES - 4 :], "little")
    if data[: len(MAGIC)] != MAGIC or google_crc32c.value(data[: HEADER_BYTES - 4]) != crc:
        return None
    header = SegmentHeader.decode(data)
    if header.kind is not kind or header.first_offset != int(path.stem):
        raise SegmentDamaged("it is a segment of another log, or was renamed")
    return header


def _scan(view: memoryview, segment: Segment, *, start: int) -> Iterator[Frame | Gap]:
    first_offset, position = segment.first_offset, start - segment.first_offset
    crc_of, limit = google_crc32c.value, len(view)
    while position < limit:
        begin = position + FRAME_BYTES
        length = int.from_bytes(view[position : position + 4], "little")
        end = begin + length
        if 0 < length <= RECORD_BYTES_MAX and end <= limit:
            payload = bytes(view[begin:end])
            if crc_of(payload) == int.from_bytes(view[position + 4 : begin], "little"):
                yield Frame(first_offset + position, payload)
                position = end
                continue
        following = next_frame_behind(view, position)
        if following is None:
            break
        yield Gap(first_offset + position, following - position)
        position = following
    if segment.sealed and position < segment.end - first_offset:
        yield Gap(first_offset + position, segment.end - first_offset - position)
