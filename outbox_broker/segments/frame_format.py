"""Frames of the schedule's local files: a record, its checksum, and the position up to which the file was synced.

    frame    payload length u32 | crc32c of what follows u32 | synced end u64 | payload

All integers are little-endian. A frame without a payload is a mark: it only records how far the file is synced. A
payload has any length: a checkpoint repeats all that is in memory, to which publishers that come at once may add
hundreds of megabytes.
A power failure may keep any of the unsynced pages and lose any other. So a frame that is not whole counts as damage
only if a later whole frame records that the file had been synced beyond its start; otherwise neither it nor what
follows was ever acknowledged. Frames of the message and action logs record no such position: there an unacknowledged
frame that was lost before one that was kept is reported as damage.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import google_crc32c

_HEAD: Final = struct.Struct("<IIQ")
_SYNCED: Final = struct.Struct("<Q")
FRAME_BYTES: Final = _HEAD.size
_MAY_BEGIN: Final = re.compile(rb"(?s)(?=(?!.{4}\x00{4})...[\x00-\x3f].{9}\x00{3})")
"""A length below 1 GiB, a checksum, a position below 2^40. Avoids a checksum per byte."""
_ARRAYS: Final = frozenset({*range(0x90, 0xA0), 0xDC})
"""The first byte of a record: it is an array."""


@dataclass(frozen=True, slots=True)
class SyncedFrame:
    """A whole frame: its payload, the position after it, and how far the file was synced when it was written."""

    payload: bytes
    end: int
    synced_end: int


def frames(records: Sequence[bytes], *, position: int, synced_end: int) -> tuple[bytes, list[int]]:
    """Frame records for a file position; returns the bytes, and where each frame begins and the last one ends."""
    synced = _SYNCED.pack(synced_end)
    crc = google_crc32c.value(synced)
    parts: list[bytes] = []
    ends = [position]
    for record in records:
        parts += (_HEAD.pack(len(record), google_crc32c.extend(crc, record), synced_end), record)
        ends.append(ends[-1] + FRAME_BYTES + len(record))
    return b"".join(parts), ends


def mark(synced_end: int) -> bytes:
    """Returns a frame without a record."""
    return _HEAD.pack(0, google_crc32c.value(_SYNCED.pack(synced_end)), synced_end)


def frame_at(view: memoryview, position: int) -> SyncedFrame | None:
    """Returns the frame at a position; None if there is no whole one."""
    begin = position + FRAME_BYTES
    if begin > len(view):
        return None
    length, crc, synced_end = _HEAD.unpack_from(view, position)
    if length > len(view) - begin:
        return None
    payload = bytes(view[begin : begin + length])
    if google_crc32c.extend(google_crc32c.value(_SYNCED.pack(synced_end)), payload) != crc:
        return None
    return SyncedFrame(payload, begin + length, synced_end)


def was_synced_beyond(view: memoryview, position: int) -> bool:
    """Returns whether a whole frame after a position records that the file had been synced beyond that position.

    A frame records no more than what is before it: another one is of another file, as part of a message's body.
    """
    for found in _MAY_BEGIN.finditer(view, position + 1):
        at = found.start()
        length, _, synced_end = _HEAD.unpack_from(view, at)
        if not position < synced_end <= at or (length and not _is_array(view, at)):
            continue
        if frame_at(view, at) is not None:
            return True
    return False


def _is_array(view: memoryview, position: int) -> bool:
    begin = position + FRAME_BYTES
    return begin < len(view) and view[begin] in _ARRAYS
