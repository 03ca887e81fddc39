"""Checkpoints in a log: a state in parts, between other blocks, each of which names the offset of its capture."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    FRAME_HEAD_BYTES,
    LAST_PART,
    Frame,
    Framed,
    FrameKind,
    framed,
)

_CAPTURED: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class JournalCheckpoint:
    """A state as it was when its log ended at the offset `captured`, in the parts that it was written in."""

    captured: int
    parts: Sequence[bytes]


def checkpoint_part(payload: bytes, *, captured: int, number: int, is_last: bool) -> Framed:
    """Returns a part of a checkpoint, whose number counts from 0."""
    marked = number + (LAST_PART if is_last else 0)
    return framed(FrameKind.CHECKPOINT, range(marked, marked + 1), [_CAPTURED.pack(captured) + payload])


@dataclass(slots=True)
class CheckpointParts:
    """Parts as they are found in a log, in any order."""

    _parts: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By the offset of capture, then by number."""

    def add(self, frames: Iterable[Frame]) -> None:
        """Add those of these frames that are parts of a checkpoint."""
        for frame in frames:
            if frame.kind == FrameKind.CHECKPOINT:
                captured = int(_CAPTURED.unpack_from(frame.payload)[0])
                self._parts.setdefault(captured, {})[frame.number] = frame.payload[_CAPTURED.size :]

    def update(self, other: CheckpointParts) -> None:
        """Add the parts that were found elsewhere."""
        for captured, parts in other._parts.items():
            self._parts.setdefault(captured, {}).update(parts)

    def __len__(self) -> int:
        """How many parts there are."""
        return sum(map(len, self._parts.values()))

    def newest_whole(self) -> JournalCheckpoint | None:
        """Returns the newest checkpoint of which all parts are there."""
        for captured in sorted(self._parts, reverse=True):
            parts = self._parts[captured]
            last = max(parts)
            numbers = [*range(last & ~LAST_PART), last]
            if last & LAST_PART and all(part_number in parts for part_number in numbers):
                return JournalCheckpoint(captured, [parts[part_number] for part_number in numbers])
        return None

    def captured_behind(self, offset: int) -> Sequence[int]:
        """Returns where checkpoints of which there is a part were captured, behind an offset."""
        return sorted(captured for captured in self._parts if captured > offset)

    def size_bytes_from(self, offset: int) -> int:
        """Returns how many bytes of the log are blocks of parts, of checkpoints captured at an offset or behind."""
        counted = [part for captured, parts in self._parts.items() if captured >= offset for part in parts.values()]
        return sum(map(len, counted)) + len(counted) * (BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES + _CAPTURED.size)
