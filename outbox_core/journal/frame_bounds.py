"""Where the whole frames of a segment's bytes are, many at once. What is damage or a torn tail is judged by journal."""

from __future__ import annotations

import struct
from typing import Final

import google_crc32c

from outbox_core.journal.journal import FRAME_BYTES, RECORD_BYTES_MAX

_FRAME: Final = struct.Struct("<II")


def payload_bounds(data: bytes, *, start: int, frames_max: int) -> tuple[list[int], int]:
    """Where the payloads of whole frames begin, from the byte `start` on, and the byte behind the last of them.

    It stops before anything that read_frames() must judge: a torn tail or damage; nothing else is read and judged here.
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
