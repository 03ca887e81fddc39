"""Searches a segment's bytes for the next whole frame behind damage."""

from __future__ import annotations

import re
import struct
from enum import Enum, auto
from typing import Final

import google_crc32c
import msgspec

FRAME: Final = struct.Struct("<II")
"""A frame's head: the payload's length, and its checksum."""
FRAME_BYTES: Final = FRAME.size
RECORD_BYTES_MAX: Final = 128 * 1024 * 1024
"""The limit of a frame's payload: a greater length is damage, not a record, and no memory is allocated for it."""
_FRAME_MAY_BEGIN: Final = re.compile(rb"(?s)(?=(?!\x00{4})...[\x00-\x08]....[\x90-\x9f\xdc])")
"""A length of 1 to RECORD_BYTES_MAX, a checksum, the first byte of an array: avoids a checksum at every byte."""
_skip_record: Final = msgspec.msgpack.Decoder(msgspec.Raw).decode
_TRUNCATED: Final = "Input data was truncated"


class RecordExtent(Enum):
    """Where a record ends by its own encoding: with the bytes that there are, behind them, or elsewhere."""

    WHOLE = auto()
    CUT_SHORT = auto()
    OTHER = auto()


def next_whole_frame(view: memoryview, start: int) -> int | None:
    """Returns where the next whole, valid frame at or after `start` begins; None if there is none.

    If there is one, the bytes before it are damage, no torn tail. All is searched: a record may have RECORD_BYTES_MAX.
    """
    candidates = (matched.start() for matched in _FRAME_MAY_BEGIN.finditer(view, start))
    return next((position for position in candidates if is_whole_frame(view, position)), None)


def is_whole_frame(view: memoryview, position: int) -> bool:
    """Returns whether a whole, valid frame begins at a position."""
    body = position + FRAME_BYTES
    if body >= len(view):
        return False
    length, crc = FRAME.unpack_from(view, position)
    if not 0 < length <= min(len(view) - body, RECORD_BYTES_MAX):
        return False
    return bool(google_crc32c.value(bytes(view[body : body + length])) == crc)


def next_frame_behind(view: memoryview, position: int) -> int | None:
    """Returns where the next whole frame behind the damaged one at `position` begins; None if none follows.

    A record's encoding tells its length, too. Where the frame's head agrees with it, the damage is within the record:
    what looks like a frame there is a part of a message, as of one that carries a copy of a log.
    """
    payload = position + FRAME_BYTES
    length = int.from_bytes(view[position : position + 4], "little")
    if not 0 < length <= RECORD_BYTES_MAX:
        return next_whole_frame(view, position + 1)
    end = payload + length
    extent = _extent_of(view[payload:end])
    if end > len(view) and extent is RecordExtent.CUT_SHORT:
        return None
    return next_whole_frame(view, end if end <= len(view) and extent is RecordExtent.WHOLE else position + 1)


def _extent_of(payload: memoryview) -> RecordExtent:
    """Returns where the record that begins here ends, by its encoding."""
    try:
        _skip_record(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        return RecordExtent.CUT_SHORT if str(error) == _TRUNCATED else RecordExtent.OTHER
    return RecordExtent.WHOLE
