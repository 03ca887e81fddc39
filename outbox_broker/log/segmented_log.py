"""An append-only log in segment files: append, group commit, reads by offset, recovery. Knows frames, not records.

A frame is written, then synced, then acknowledged. A failed sync is final (the kernel may have dropped the dirty pages
that it could not write): the log refuses all writes until it is reopened and its content verified (sync_proof.py).
Storage engines were measured at the same work: decision 97.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Final

from outbox_broker.common.engine_options import Durability
from outbox_broker.log import missing_segments
from outbox_broker.log.disk_reserve import cure_for
from outbox_broker.log.frame_batching import Piece, pieces
from outbox_broker.log.segment_creation import begin_segment
from outbox_broker.log.segment_scan import Gap, Segment, frames_in, header_of, scan
from outbox_broker.log.storage import Storage
from outbox_broker.log.sync_proof import SyncProof, note_proven, proven_copy, read_proven
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import (
    FRAME_BYTES,
    HEADER_BYTES,
    RECORD_BYTES_MAX,
    Frame,
    SegmentDamaged,
    SegmentHeader,
    SegmentKind,
    frames,
    segment_path,
    segment_paths,
)  # fmt: skip
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_READ_AHEAD_BYTES: Final = 4096


class SegmentedLog:
    """One log in one folder, with one writer.

    append() needs the caller's lock; commit() and read() are thread-safe.
    """

    def __init__(
        self, folder: Path, *, kind: SegmentKind, segment_bytes: int, durability: Durability, storage: Storage,
        now_ms: Callable[[], int],
    ) -> None:  # fmt: skip
        self.folder = folder
        self._kind = kind
        self._segment_bytes = segment_bytes
        self._durability = durability
        self._storage = storage
        self._now_ms = now_ms
        self.segments: list[Segment] = []
        self._dropped: list[Segment] = []
        self._readers = 0
        self._turn = threading.Condition()
        self._syncing = False
        self._sync_lock = threading.Lock()
        self._failure: OSError | None = None
        self._is_removal_unsynced = False
        self._is_proven = False  # whether all of the newest segment found on opening is known to be on the disk
        self.end = 0
        self.durable_end = 0
        self.bytes_written = 0
        self.syncs = 0
        self.quarantined_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)

    # -- opening -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open all segments without reading them. Then call scan() for each segment, at least the last, and ready().

        Raises SegmentDamaged if a segment is missing or belongs to another log.
        """
        paths = segment_paths(self.folder)
        if paths and missing_segments.is_unfinished(paths[-1]):
            logger.warning("unfinished_segment_removed", extra={"segment": paths[-1].name})
            paths.pop().unlink()
            self._storage.sync_folder(self.folder)
        missing_segments.refuse_if_newest_is_missing(self.folder, paths)
        for path in paths:
            try:
                header = header_of(path, kind=self._kind)
            except SegmentDamaged as damage:
                raise SegmentDamaged(
                    f"{path.name}: {damage}; restore the file from a copy, or move it away"
                ) from damage
            if header is None:
                self._note_damage(Gap(int(path.stem), 0), path)
            created_at_ms = int(path.stat().st_mtime * 1000) if header is None else header.created_at_ms
            first_offset = int(path.stem)
            descriptor = self._storage.create(path)
            self.segments.append(Segment(path, first_offset, first_offset, created_at_ms, descriptor, first_offset))
        missing_segments.end_where_the_next_begins(self.segments, segment_bytes=self._segment_bytes)
        if self.segments:
            self.segments[-1].sealed = False
            self.end = self.segments[-1].first_offset

    def scan(self, segment: Segment, *, start: int = 0) -> Iterator[Frame | Gap]:
        """Yields the content of a segment from the offset `start` on. Gaps are logged and counted.

        The last segment must be scanned to its end, where its torn tail is cut off.
        """
        for one in scan(segment, start=max(start, segment.first_offset)):
            if isinstance(one, Gap):
                self._note_damage(one, segment.path)
            if not segment.sealed:
                self.end = segment.end = one.end
            yield one
        if not segment.sealed:
            proven = read_proven(self.folder)
            if proven.segment == segment.path.name and proven.end > self.end:
                # It was synced, and told to be stored: this is damage, not what a write left that nobody waited for.
                gap = Gap(self.end, proven.end - self.end)
                self._note_damage(gap, segment.path)
                self.end = segment.end = gap.end
                yield gap
            self._cut_torn_tail(segment)

    def ready(self) -> None:
        """Finish opening, after all reads and before the first append: makes sure that what was read is durable."""
        if self.segments:
            self._is_proven = self._prove_newest()
        else:
            self._add_segment()
        self._sync_current()
        self._note_proven()

    def recover(self) -> Iterator[Frame | Gap]:
        """Open the log, yield its whole content, oldest first, then call ready(). The iterator must be exhausted."""
        self.open()
        for segment in list(self.segments):
            yield from self.scan(segment)
        self.ready()

    def _prove_newest(self) -> bool:
        """Make all that was read durable, whatever the previous process may have lost; False if there is no space.

        Raises StorageFailed.
        """
        segment = self.segments[-1]
        if self._durability is Durability.FSYNC and not read_proven(self.folder).covers(segment.path, self.end):
            copy = proven_copy(segment.path, segment.descriptor, storage=self._storage, sync=self._sync)
            if copy is None:
                return False
            os.close(segment.descriptor)
            segment.descriptor = copy
        return True

    def _note_proven(self) -> None:
        if self._is_proven and self._durability is Durability.FSYNC:
            note_proven(self.folder, SyncProof(self.segments[-1].path.name, self.durable_end), self._storage)

    def _cut_torn_tail(self, segment: Segment) -> None:
        excess = missing_segments.content_bytes(segment.path) - (self.end - segment.first_offset)
        if excess > 0:
            logger.warning("torn_tail_cut", extra={"segment": segment.path.name, "bytes": excess, "offset": self.end})
            self._storage.truncate(segment.descriptor, segment.path.stat().st_size - excess)

    def _note_damage(self, gap: Gap, path: Path) -> None:
        self.quarantined_bytes += max(gap.size_bytes, 1)
        logger.error(
            "segment_damaged",
            extra={"log": self.folder.name, "segment": path.name, "offset": gap.offset, "bytes": gap.size_bytes},
        )

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, payloads: Iterable[bytes]) -> list[int]:
        """Append payloads, framing them; see append_pieces()."""
        return self.append_pieces(pieces(payloads))

    def append_pieces(self, framed: Iterable[Piece]) -> list[int]:
        """Append frames; returns their offsets. Not durable before commit().

        Raises StorageFailed (disk full...), or what generating a payload raises, with nothing appended.
        """
        self.refuse_if_failed()
        if not self.segments:
            raise StorageFailed("the log is closed")
        try:
            if self.is_full:
                self.roll()
            self._sync_removal()
            sizes = self._write(framed)
        except OSError as error:
            raise StorageFailed(f"cannot write to the log: {error.strerror}; {cure_for(error)}") from error
        offsets = list(accumulate(sizes, initial=self.end))
        self.bytes_written += offsets[-1] - self.end
        self.end = self.segments[-1].end = offsets.pop()
        return offsets

    @property
    def size_bytes(self) -> int:
        """Returns the size of the segments that are there, without their headers."""
        return self.end - self.segments[0].first_offset if self.segments else 0

    @property
    def is_full(self) -> bool:
        """Returns whether the next append starts a new segment.

        A checkpoint at the segment's start does not count towards its size, but no segment ends before it grew by as
        much: so all checkpoints together are no larger than the records between them.
        """
        segment = self.segments[-1]
        head_bytes = segment.grown_from - segment.first_offset
        return self.end - segment.grown_from >= max(self._segment_bytes, head_bytes)

    def commit(self, end: int | None = None) -> None:
        """Return once everything before `end` (all, by default) is durable; concurrent callers share one sync.

        Raises StorageFailed if durability cannot be confirmed.
        """
        end = self.end if end is None else end
        with self._turn:
            while self.durable_end < end:
                self.refuse_if_failed()
                if self._syncing:
                    self._turn.wait()
                    continue
                self._syncing = True
                self._turn.release()
                try:
                    self._sync_current()
                finally:
                    self._turn.acquire()
                    self._syncing = False
                    self._turn.notify_all()

    def _write(self, framed: Iterable[Piece]) -> list[int]:
        """Write chunks of frames contiguously; returns the length of each frame."""
        segment = self.segments[-1]
        start = position = HEADER_BYTES + self.end - segment.first_offset
        sizes: list[int] = []
        try:
            for data, lengths in framed:
                self._storage.write(segment.descriptor, data, position=position)
                position += len(data)
                sizes += lengths
        except BaseException:
            self._cut_back(segment, start)
            raise
        return sizes

    def _cut_back(self, segment: Segment, position: int) -> None:
        """Truncate a partial write; if that fails too, the log must not be trusted any more."""
        try:
            self._storage.truncate(segment.descriptor, position)
        except OSError as error:
            self._failure = error

    def _sync_current(self) -> None:
        end, descriptor = self.end, self.segments[-1].descriptor
        if self._durability is Durability.FSYNC:
            self._sync(descriptor)
            self.syncs += 1
        self.durable_end = max(self.durable_end, end)

    def _sync(self, descriptor: int) -> None:
        """Run one sync at a time: the kernel reports a lost page to one caller only, and a second would see success."""
        with self._sync_lock:
            self.refuse_if_failed()
            try:
                self._storage.sync(descriptor)
            except OSError as error:
                self._failure = error
                logger.critical("sync_failed", extra={"log": self.folder.name, "error": error.strerror})
                raise StorageFailed(
                    f"the disk did not confirm a write: {error.strerror}; restart the broker"
                ) from error

    def roll(self, first: Sequence[bytes] = ()) -> None:
        """Start a new segment with these payloads. The old segment is synced first, so that only the newest file is
        ever in doubt. If the active segment is empty, the payloads are written into it instead.

        append() calls this when the segment is full. Raises OSError with nothing changed, or StorageFailed.
        """
        self.refuse_if_failed()
        data, sizes = frames(first)
        if self.end == self.segments[-1].first_offset:
            self._write([(data, sizes)])
        else:
            if self._durability is Durability.FSYNC:
                self._sync(self.segments[-1].descriptor)
            self._add_segment(data)
        self.end = self.segments[-1].end = self.segments[-1].grown_from = self.end + len(data)
        self.bytes_written += len(data)

    def put_off_roll(self) -> None:
        """Keep appending to a full segment until it has doubled."""
        self.segments[-1].grown_from = self.end

    def _add_segment(self, data: bytes = b"") -> None:
        """Start a segment with these frames. If that fails, the log continues in the previous segment and grows into
        the new one's offsets: so nothing is appended until a power failure can no longer bring the failed file back.
        """
        path = segment_path(self.folder, self.end)
        header = SegmentHeader(kind=self._kind, first_offset=self.end, created_at_ms=self._now_ms())
        try:
            descriptor = begin_segment(path, header, data, is_first=not self.segments, storage=self._storage)
        except OSError:
            self._is_removal_unsynced = True
            with suppress(OSError):
                self._sync_removal()
            raise
        self._is_proven = True
        if self.segments:
            self.segments[-1].sealed = True
        segment = Segment(path, self.end, self.end, header.created_at_ms, descriptor, self.end, sealed=False)
        self.segments = [*self.segments, segment]
        self._note_proven()

    def _sync_removal(self) -> None:
        if self._is_removal_unsynced:
            self._storage.sync_folder(self.folder)
            self._is_removal_unsynced = False

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: int) -> bytes:
        """Returns the payload whose frame begins at `offset`. Raises SegmentDamaged if its checksum does not match."""
        data = self.read_span(offset, _READ_AHEAD_BYTES)
        size = FRAME_BYTES + int.from_bytes(data[:4], "little")
        if len(data) < size <= min(self.end - offset, FRAME_BYTES + RECORD_BYTES_MAX):
            data = self.read_span(offset, size)
        found = next(frames_in(data[:size], first_offset=offset), None)
        if not isinstance(found, Frame):
            raise SegmentDamaged(f"damaged record at offset {offset}")
        return found.payload

    def read_span(self, offset: int, size_bytes: int) -> bytes:
        """Returns `size_bytes` from an offset on; fewer at the end. Thread-safe, even while the segment is dropped.

        Raises SegmentDamaged if retention dropped the segment before.
        """
        with self._turn:
            segments = self.segments
            index = bisect_right(segments, offset, key=lambda segment: segment.first_offset) - 1
            if index < 0:
                raise SegmentDamaged(f"the segment of offset {offset} was dropped")
            segment = segments[index]
            self._readers += 1
        try:
            data = os.pread(segment.descriptor, size_bytes, HEADER_BYTES + offset - segment.first_offset)
            if len(data) < size_bytes and segment.sealed and offset + len(data) == segment.end:
                data += self.read_span(segment.end, size_bytes - len(data))
            return data
        finally:
            with self._turn:
                self._readers -= 1
                if self._dropped and not self._readers:
                    self._close_dropped()

    # -- ending ------------------------------------------------------------------------------------------------------

    def drop_before(self, offset: int) -> list[Segment]:
        """Remove the segments that end at or before an offset, oldest first, never the last; returns them."""
        with self._turn:
            gone = [one for one in self.segments[:-1] if one.end <= offset]
            for one in gone:
                one.path.unlink(missing_ok=True)
            self.segments = self.segments[len(gone) :]
            self._dropped += gone
            if not self._readers:
                self._close_dropped()
        if gone:
            self._storage.sync_folder(self.folder)
        return gone

    def _close_dropped(self) -> None:
        for one in self._dropped:
            os.close(one.descriptor)
        self._dropped.clear()

    def sync_and_close(self) -> None:
        """Sync the log unless it failed, and close it; idempotent."""
        try:
            if self.segments and self._failure is None:
                self._sync_current()
                self._note_proven()
        finally:
            self.close()

    def close(self) -> None:
        """Close the log without a sync; idempotent."""
        for segment in self.segments:
            os.close(segment.descriptor)
        self.segments = []
        self._close_dropped()

    def refuse_if_failed(self) -> None:
        """Raise StorageFailed if the log refuses writes until it is reopened."""
        if self._failure is not None:
            raise StorageFailed(
                f"the disk failed earlier ({self._failure.strerror}); "
                "the log takes nothing until the broker is restarted"
            ) from self._failure
