"""The storage port of the schedule: named segments with one writer. Independent of due times and of disks.

Opening an implementation makes it the only writer, with an epoch above all earlier ones. The rules below apply to every
implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged


class WriterFenced(StorageFailed):
    """Another writer has taken over the store; this one may not write, and must not dispatch, any more."""

    retryable = False


class RecordDamaged(SegmentDamaged):
    """A record does not match its checksum; `found` is what was read, parts of which may be verified by other means."""

    def __init__(self, why: str, *, found: bytes) -> None:
        super().__init__(why)
        self.found = found


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a segment, its position and that of the next one."""

    position: int
    payload: bytes
    end: int


@dataclass(frozen=True, slots=True)
class SegmentAppend:
    """Records for the end of a segment, which the caller tracks; a new segment begins at 0. Records are not empty."""

    name: str
    records: Sequence[bytes]
    position: int


class SegmentReader(Protocol):
    """The reading half of a segment store. What it reads may be the store of another process."""

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """Returns the record of this size at `position`. Raises RecordDamaged if there is none."""

    def scan(self, name: str) -> Iterator[Record]:
        """Yields every whole record from the beginning, up to a torn tail, which was never acknowledged as durable."""

    def list(self) -> Sequence[str]:
        """Returns the names of all segments, sorted."""


class SegmentStore(SegmentReader, Protocol):
    """Segments by name: read, scan and list, as a SegmentReader, and append, append_all, sync, seal, delete, continues.

    A name has 1 to 64 of the characters a-z 0-9 -. Appends to different segments may run in different threads, appends
    to one segment in one thread at a time; all else is thread-safe. Errors: StorageFailed (nothing of an append counts;
    a failed sync guarantees nothing and is final for this writer), WriterFenced (by the append, or else by its sync),
    SegmentDamaged if a record does not match its checksum.
    """

    def append(self, name: str, records: Sequence[bytes], *, position: int) -> list[int]:
        """Write records at the segment's end, which the caller tracks; a new segment begins at 0.

        Returns where each begins and, last, the new end. Data that an earlier writer left after `position` is dropped.
        Not durable before sync(). Records are not empty.
        """

    def append_all(self, appends: Sequence[SegmentAppend]) -> list[list[int]]:
        """Like append(), to several segments, whose names differ; returns what append() returns, for each.

        Sooner than one after the other, where a segment takes time to prepare. If it fails, nothing counts of any.
        """

    def sync(self, names: Iterable[str]) -> None:
        """Return once everything appended to these segments is durable; a deleted segment is ignored.

        Concurrent callers share the work.
        """

    def seal(self, name: str) -> None:
        """End appends to a segment; idempotent. May release resources that only a writer needs."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove segments permanently; idempotent. Until this returns, a power failure may bring them back."""

    def continues(self, name: str) -> bool:
        """Returns whether appends may go on behind what scan() yields of a segment that an earlier writer left: it is
        durable, whatever became of that writer's syncs. If not, only what is appended to another segment is durable.
        """
