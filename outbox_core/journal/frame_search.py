"""Searches a segment's bytes for the next whole frame behind damage."""

from __future__ import annotations

import re
import struct
from typing import Final

import google_crc32c

FRAME: Final = struct.Struct("<II")
"""A frame's head: the payload's length, and its checksum."""
FRAME_BYTES: Final = FRAME.size
RECORD_BYTES_MAX: Final = 128 * 1024 * 1024
"""The limit of a frame's payload: a greater length is damage, not a record, and no memory is allocated for it."""
_FRAME_MAY_BEGIN: Final = re.compile(rb"(?s)(?=(?!\x00{4})...[\x00-\x08]....[\x90-\x9f\xdc])")
"""A length of 1 to RECORD_BYTES_MAX, a checksum, the first byte of an array: avoids a checksum at every byte."""


def next_whole_frame(view: memoryview, start: int) -> int | None:
    """Returns where the next whole, valid frame at or after `start` begins; None if there is none.

    If there is one, the bytes before it are damage, no torn tail. All is searched: a record may have RECORD_BYTES_MAX.
    """
    found = (one.start() for one in _FRAME_MAY_BEGIN.finditer(view, start))
    return next((position for position in found if is_whole_frame(view, position)), None)


def is_whole_frame(view: memoryview, position: int) -> bool:
    """Returns whether a whole, valid frame begins at a position."""
    body = position + FRAME_BYTES
    if body >= len(view):
        return False
    length, crc = FRAME.unpack_from(view, position)
    if not 0 < length <= min(len(view) - body, RECORD_BYTES_MAX):
        return False
    return bool(google_crc32c.value(bytes(view[body : body + length])) == crc)
