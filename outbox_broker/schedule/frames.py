"""Frames of the schedule's local files: a record, its checksum, and how far its file was synced when it was written.

    frame    payload length u32 | crc32c of what follows u32 | synced end u64 | payload

All integers are little-endian. A frame without a payload is a mark: no record, it only says how far the file is synced.
A power cut keeps any of the pages that were never synced, and loses any other. So a frame that is not whole is damage
only where a later whole frame says that the file had been synced beyond its beginning; else it was never answered for,
nor was what follows it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import google_crc32c

from outbox_core.journal.journal import RECORD_BYTES_MAX

_HEAD: Final = struct.Struct("<IIQ")
_SYNCED: Final = struct.Struct("<Q")
FRAME_BYTES: Final = _HEAD.size
_MAY_BEGIN: Final = re.compile(rb"(?s)(?=(?!.{4}\x00{4})...[\x00-\x08].{9}\x00{3})")
"""A length up to RECORD_BYTES_MAX, a checksum, a position below 2^40. Spares a checksum a byte."""
_ARRAYS: Final = frozenset({*range(0x90, 0xA0), 0xDC})
"""How a record begins: it is an array."""


@dataclass(frozen=True, slots=True)
class SyncedFrame:
    """A whole frame: its payload, the position behind it, and how far the file was synced when it was written."""

    payload: bytes
    end: int
    synced_end: int


def frames(records: Sequence[bytes], *, position: int, synced_end: int) -> tuple[bytes, list[int]]:
    """Records as they stand in a file from a position on; and where each begins, and the last one ends."""
    synced = _SYNCED.pack(synced_end)
    crc = google_crc32c.value(synced)
    parts: list[bytes] = []
    ends = [position]
    for record in records:
        parts += (_HEAD.pack(len(record), google_crc32c.extend(crc, record), synced_end), record)
        ends.append(ends[-1] + FRAME_BYTES + len(record))
    return b"".join(parts), ends


def mark(synced_end: int) -> bytes:
    """A frame without a record."""
    return _HEAD.pack(0, google_crc32c.value(_SYNCED.pack(synced_end)), synced_end)


def frame_at(view: memoryview, position: int) -> SyncedFrame | None:
    """The frame that begins at a position; None where none does that is whole."""
    begin = position + FRAME_BYTES
    if begin > len(view):
        return None
    length, crc, synced_end = _HEAD.unpack_from(view, position)
    if length > min(len(view) - begin, RECORD_BYTES_MAX):
        return None
    payload = bytes(view[begin : begin + length])
    if google_crc32c.extend(google_crc32c.value(_SYNCED.pack(synced_end)), payload) != crc:
        return None
    return SyncedFrame(payload, begin + length, synced_end)


def was_synced_beyond(view: memoryview, position: int) -> bool:
    """Whether a whole frame behind a position says that the file had been synced beyond it."""
    for found in _MAY_BEGIN.finditer(view, position + 1):
        at = found.start()
        length, _, synced_end = _HEAD.unpack_from(view, at)
        if synced_end <= position or (length and not _is_array(view, at)):
            continue
        if frame_at(view, at) is not None:
            return True
    return False


def _is_array(view: memoryview, position: int) -> bool:
    begin = position + FRAME_BYTES
    return begin < len(view) and view[begin] in _ARRAYS
