"""Blocks as a log's owner writes them, and what is read of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outbox_broker.segments.port import FramePlace, SegmentReader, Segments, SegmentWriter, read_record
from outbox_core.journal.block import BLOCK_HEAD_BYTES, FRAME_HEAD_BYTES, FrameKind, SegmentKind, block, framed


class Medium(Protocol):
    """What outlives the owners of segments."""

    def open(self) -> Segments:
        """Become the owner, whether the one before has ended or not."""


class WrittenSegment:
    """A segment that a test appends to: frames are numbered through."""

    def __init__(self, writer: SegmentWriter, *, first: int = 0, number: int = 0) -> None:
        self.writer = writer
        self.places: list[FramePlace] = []
        self._first = first
        self._number = number
        self._frames_before = 0
        self._durable = 0

    @classmethod
    def create(cls, segments: Segments, name: str = "a", *, first: int = 0) -> WrittenSegment:
        return cls(segments.create(name, kind=SegmentKind.MESSAGES, first=first), first=first)

    def append(self, *payloads: bytes) -> int:
        """Append a block of these payloads; returns the new end."""
        numbers = range(self._number, self._number + len(payloads))
        position = self.writer.end
        data = block(
            framed(FrameKind.RECORD, numbers, payloads), offset=self._first + position,
            durable=self._first + self._durable, at_ms=1, frames_before=self._frames_before,
        )  # fmt: skip
        end = self.writer.append(data)
        position = end - len(data) + BLOCK_HEAD_BYTES
        for number, payload in zip(numbers, payloads, strict=True):
            self.places.append(
                FramePlace(segment=self.writer.name, position=position, size_bytes=len(payload), number=number)
            )
            position += FRAME_HEAD_BYTES + len(payload)
        self._number += len(payloads)
        self._frames_before = len(payloads)
        return end

    def commit(self) -> None:
        self._durable = self.writer.commit()

    def append_committed(self, *payloads: bytes) -> int:
        end = self.append(*payloads)
        self.commit()
        return end


def payloads(segments: SegmentReader, name: str = "a", *, proven: int = 0) -> list[bytes]:
    """What the whole frames of a segment have, each of which stands where it is said to."""
    found_payloads: list[bytes] = []
    for found in segments.blocks(name, proven=proven):
        for frame, start in zip(found.frames, found.starts, strict=True):
            assert segments.read(name, start + FRAME_HEAD_BYTES, len(frame.payload)) == frame.payload
            found_payloads.append(frame.payload)
    return found_payloads


def read_all(segments: SegmentReader, places: Sequence[FramePlace]) -> list[bytes]:
    """What is read at these places."""
    return [read_record(segments, place) for place in places]


def names(segments: SegmentReader) -> list[str]:
    return [info.name for info in segments.list()]


def end_of(segments: SegmentReader, name: str = "a") -> int:
    """Where the last block of a segment ends."""
    return max([found.end for found in segments.blocks(name)], default=0)
