"""Finds the bounds of whole frames in a segment's bytes, in bulk. journal tells damage and a torn tail apart."""

from __future__ import annotations

import struct
from typing import Final

import google_crc32c

from outbox_core.journal.journal import FRAME_BYTES, RECORD_BYTES_MAX

_FRAME: Final = struct.Struct("<II")


def payload_bounds(data: bytes, *, start: int, frames_max: int) -> tuple[list[int], int]:
    """Returns where the payloads of whole frames begin, from the byte `start` on, and the end of the last of them.

    It stops before a torn tail or damage, which only read_frames() classifies.
    """
    unpack, crc, end = _FRAME.unpack_from, google_crc32c.value, len(data)
    begins: list[int] = []
    while len(begins) < frames_max and start + FRAME_BYTES < end:
        length, checksum = unpack(data, start)
        begin = start + FRAME_BYTES
        behind = begin + length
        if not 0 < length <= RECORD_BYTES_MAX or behind > end or crc(data[begin:behind]) != checksum:
            break
        begins.append(begin)
        start = behind
    return begins, start
