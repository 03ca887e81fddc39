"""The port behind which the schedule's bytes lie: named segments with one writer. It knows neither due times nor disks.

An implementation is made by opening it, which makes it the only writer: it gets an epoch above all earlier ones, and
from then on every write of an earlier one raises WriterFenced. tests/outbox_broker/delay/test_segment_store.py holds
what every implementation must do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged


class WriterFenced(StorageFailed):
    """Another writer has taken the store over; this one may not write, and must not dispatch, any more."""

    retryable = False


class RecordDamaged(SegmentDamaged):
    """A record that does not match its checksum, and what was read instead: some of it may be proven by other means."""

    def __init__(self, why: str, *, found: bytes) -> None:
        super().__init__(why)
        self.found = found


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a segment, where it begins and where the next one would."""

    position: int
    payload: bytes
    end: int


class SegmentStore(Protocol):
    """Segments by name: append, sync, read, scan, seal, list, delete.

    A name is 1 to 64 of the characters a-z 0-9 -. Appends to different segments may run in different threads, to one
    segment in one thread at a time; the rest is safe in any thread. Errors: StorageFailed (nothing of an append
    counts; a failed sync proves nothing durable and is final for this writer), WriterFenced, SegmentDamaged where a
    record read does not match its checksum.
    """

    def append(self, name: str, records: Sequence[bytes], *, position: int) -> list[int]:
        """Write records at the segment's end, which the caller knows; a new segment begins at 0.

        Returns where each begins and, last, the new end. What an earlier writer left behind `position` is dropped.
        Not durable before sync(). Records are not empty.
        """

    def sync(self, names: Iterable[str]) -> None:
        """Return once all that was appended to these segments is durable; one that was deleted is passed over.

        Concurrent callers share the work.
        """

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """The record of this size that begins at `position`. Raises RecordDamaged where it is not that."""

    def scan(self, name: str) -> Iterator[Record]:
        """Every whole record from the beginning; a torn tail, which nobody was told is durable, ends it."""

    def seal(self, name: str) -> None:
        """No append any more; idempotent. May let go of what only a writer needs."""

    def list(self) -> Sequence[str]:
        """The names of all segments, sorted."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove segments for good; idempotent. They may be back after a power cut until it returned."""
