"""The storage port: named segments of blocks, with one writer. Knows neither messages nor due times, nor any medium.

A segment holds blocks (outbox_core.journal.block), one behind the other. A position counts its bytes from 0, a log's
offset those of all its segments. Opening an implementation makes it the only writer, with an epoch above all earlier
ones. The rules here hold for every implementation, and tests/outbox_broker/segments has one suite for all.

    local.py     a file a segment, in one folder: over the system calls of log/storage.py
    ledger.py    a ledger a segment, of a BookKeeper cluster: over the port of ledgers.py
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import FRAME_HEAD_BYTES, Block, FrameDamaged, FrameKind, SegmentKind, read_run
from outbox_core.journal.journal import SegmentDamaged

_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")


class WriterFenced(StorageFailed):
    """Another writer has taken over the segments; this one may not write, and must not dispatch, any more."""

    retryable = False


class RecordDamaged(SegmentDamaged):
    """A frame does not match its checksum, or is another one; `found` is what stands at its payload's place, parts of
    which may be verified by other means.
    """

    def __init__(self, why: str, *, found: bytes) -> None:
        super().__init__(why)
        self.found = found


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """A segment. `first`: the offset in its log at which it begins. `end`: the position behind its last block, where it
    is known without reading it. `epoch`: of the writer that created it.
    """

    name: str
    kind: SegmentKind
    first: int
    end: int | None
    created_at_ms: int
    epoch: int


class SegmentReader(Protocol):
    """The reading half of the port, thread-safe. What it reads may be the segments of another process."""

    def list(self) -> Sequence[SegmentInfo]:
        """Returns all segments, sorted by name."""

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """Returns the bytes at a position, also of blocks that are not durable yet; fewer if the segment ends before.

        They are as they were found: the caller checks the frames in them. Raises StorageFailed.
        """

    def blocks(self, name: str, *, proven: int = 0, wanted: Container[int] | None = None) -> Iterator[Block]:
        """Yields the blocks of a segment, damaged ones too, up to a torn tail, of which nothing was acknowledged.

        `proven`: a position up to which the caller knows all to be durable: there nothing is a torn tail. `wanted`: the
        kinds of blocks whose frames are needed; None for all. Raises StorageFailed, and SegmentRefused at what a newer
        version wrote.
        """


class SegmentWriter(Protocol):
    """The end of one segment. append(), cut() and seal() in one thread at a time; all else is thread-safe.

    Raises StorageFailed, or WriterFenced: by an append, or else by its commit. After a failed commit that is final, the
    owner of the segments can make nothing durable until they are opened again.
    """

    @property
    def name(self) -> str:
        """The segment's name."""

    @property
    def end(self) -> int:
        """The position behind the last block."""

    def append(self, block: bytes) -> int:
        """Write a block at the end, in order; not durable before commit(), for which it never waits, unless so much is
        not durable yet that memory is at stake. Returns the new end: the block is right before it, wherever the segment
        ended. If it fails, nothing of the block counts.
        """

    def commit(self, end: int | None = None) -> int:
        """Return once everything up to a position (all, by default) is durable; returns how far that is known to be so:
        0 where syncs are left to the operating system. Concurrent callers share the work. Returns at once for a segment
        that was deleted.
        """

    def cut(self, end: int) -> None:
        """Forget what was appended behind a position, and nothing names. Where a medium cannot, it stays there, and the
        next append goes behind it.
        """

    def seal(self) -> None:
        """Commit, and accept no more blocks; idempotent."""

    def abandon(self) -> None:
        """Accept no more blocks, and wait for nothing; idempotent."""


class Segments(SegmentReader, Protocol):
    """All segments of one owner: what a SegmentReader does, and create, reopen, delete, check, close.

    A name has 1 to 64 of the characters a-z 0-9 -. Opening it fenced every earlier owner: nothing that one appends
    afterwards is acknowledged, or ever read.
    """

    @property
    def epoch(self) -> int:
        """The owner's number, above those of all earlier ones."""

    def create(self, name: str, *, kind: SegmentKind, first: int = 0) -> SegmentWriter:
        """Begin a segment, which replaces one of the same name; it is there with its first block. Waits for nothing.

        If that fails, no segment is there, or an empty one: delete() it.
        """

    def reopen(self, name: str, *, end: int) -> SegmentWriter | None:
        """Go on at this end of a log's newest segment, which an earlier owner left; what is behind it is cut off.

        Returns once everything up to the end is durable, whatever became of that owner's syncs. None: it cannot be
        appended to any more, and all of it is durable; begin another one.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Remove segments permanently; idempotent. Until this returns, a power failure may bring them back. Raises
        StorageFailed.
        """

    def check(self) -> None:
        """Raise StorageFailed or WriterFenced if nothing can be made durable any more. Waits for nobody."""

    def close(self) -> None:
        """Release everything to the next owner; idempotent. Commits nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlace:
    """Where a frame of kind RECORD is, and which one. `size_bytes`: of its payload."""

    segment: str
    position: int
    size_bytes: int
    number: int


def read_record(segments: SegmentReader, place: FramePlace) -> bytes:
    """Returns the payload of a frame. Raises RecordDamaged if it is not there as it was written, StorageFailed."""
    data = segments.read(place.segment, place.position, FRAME_HEAD_BYTES + place.size_bytes)
    numbers = range(place.number, place.number + 1)
    found = data[FRAME_HEAD_BYTES:]
    try:
        [payload] = read_run(data, 0, kind=FrameKind.RECORD, numbers=numbers)
    except FrameDamaged as damage:
        raise RecordDamaged(f"{place.segment}: damaged record at {place.position}: {damage}", found=found) from damage
    if len(payload) != place.size_bytes:
        raise RecordDamaged(f"{place.segment}: damaged record at {place.position}: it has another size", found=found)
    return payload


def require_name(name: str) -> None:
    """Raise ValueError unless this can name a segment."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a segment's name: {name!r}")
