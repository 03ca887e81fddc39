"""An append-only log in segment files: append, group commit, read by offset, recovery. It knows frames, not records.

Order of trust: a frame is written, then synced, then answered. A failed sync is final (the kernel may have dropped the
pages it could not write): the log refuses everything until it is opened, and so proven, again.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import google_crc32c

from broker.log.storage import Storage
from broker.options import Durability
from messaging.errors import StorageFailed
from messaging.journal import (
    FRAME_BYTES,
    HEADER_BYTES,
    Frame,
    SegmentDamaged,
    SegmentHeader,
    SegmentKind,
    frame,
    read_segment,
    segment_path,
    segment_paths,
)

logger = logging.getLogger(__name__)

_READ_AHEAD_BYTES: Final = 4096


@dataclass(slots=True)
class _Segment:
    first_offset: int
    descriptor: int


class SegmentedLog:
    """One log in one folder, one writer.

    append() needs the caller's lock; commit() and read() are safe in any thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: SegmentKind,
        segment_bytes: int,
        durability: Durability,
        storage: Storage,
        now_ms: Callable[[], int],
    ) -> None:
        self._folder = folder
        self._kind = kind
        self._segment_bytes = segment_bytes
        self._durability = durability
        self._storage = storage
        self._now_ms = now_ms
        self._segments: list[_Segment] = []
        self._turn = threading.Condition()
        self._syncing = False
        self._sync_lock = threading.Lock()
        self._failure: OSError | None = None
        self.end = 0
        self.durable_end = 0
        self.bytes_written = 0
        self.syncs = 0
        folder.mkdir(parents=True, exist_ok=True)

    # -- opening -----------------------------------------------------------------------------------------------------

    def recover(self) -> Iterator[Frame]:
        """Open all segments and yield every frame, oldest first; a torn tail of the last one is cut off and said so.

        To be exhausted before the first append. Raises SegmentDamaged, naming file and offset, for a flipped bit.
        """
        paths = segment_paths(self._folder)
        for number, path in enumerate(paths):
            last = number == len(paths) - 1
            if last and _is_unfinished(path):
                logger.warning("unfinished_segment_removed", extra={"segment": path.name})
                path.unlink()
                self._storage.sync_folder(self._folder)
                break
            yield from self._recover_segment(path, last=last)
        if not self._segments:
            self._add_segment()
        # What was read may never have been synced by the process that wrote it: sync once before answering for it.
        self._sync_current()

    def _recover_segment(self, path: Path, *, last: bool) -> Iterator[Frame]:
        try:
            header, frames = read_segment(path)
            self._check_follows(header)
            for one in frames:
                self.end = one.end
                yield one
        except SegmentDamaged as damage:
            raise SegmentDamaged(f"{path.name}: {damage}; restore the file from a copy, or move it away") from damage
        self._segments.append(_Segment(header.first_offset, self._storage.create(path)))
        excess = path.stat().st_size - HEADER_BYTES - (self.end - header.first_offset)
        if excess and not last:
            raise SegmentDamaged(
                f"{path.name}: {excess} bytes behind its last whole record, and it is not the last one"
            )
        if excess:
            logger.warning("torn_tail_cut", extra={"segment": path.name, "bytes": excess, "offset": self.end})
            self._storage.truncate(self._segments[-1].descriptor, path.stat().st_size - excess)

    def _check_follows(self, header: SegmentHeader) -> None:
        if header.first_offset != self.end or header.kind is not self._kind:
            raise SegmentDamaged(f"a segment is missing before it, or it is another log's (expected {self.end})")

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, payloads: Sequence[bytes]) -> list[int]:
        """Write payloads as one contiguous piece; returns their offsets. Not durable before commit().

        Raises StorageFailed (full disk...) with nothing appended.
        """
        self.refuse_if_failed()
        if not self._segments:
            raise StorageFailed("the log is closed")
        frames = [frame(payload) for payload in payloads]
        data = b"".join(frames)
        try:
            if self.end - self._segments[-1].first_offset >= self._segment_bytes:
                self._roll()
            self._write(data)
        except OSError as error:
            raise StorageFailed(f"cannot write to the log: {error.strerror}; free some disk space") from error
        offsets = []
        for one in frames:
            offsets.append(self.end)
            self.end += len(one)
        self.bytes_written += len(data)
        return offsets

    def commit(self, end: int | None = None) -> None:
        """Return once everything before `end` (all, by default) is durable; concurrent callers share one sync.

        Raises StorageFailed when it cannot be known to be.
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

    def _write(self, data: bytes) -> None:
        segment = self._segments[-1]
        position = HEADER_BYTES + self.end - segment.first_offset
        try:
            self._storage.write(segment.descriptor, data, position=position)
        except OSError:
            self._cut_back(segment, position)
            raise

    def _cut_back(self, segment: _Segment, position: int) -> None:
        """Take back a half-written piece; if even that fails, the log is not to be trusted any more."""
        try:
            self._storage.truncate(segment.descriptor, position)
        except OSError as error:
            self._failure = error

    def _sync_current(self) -> None:
        end, descriptor = self.end, self._segments[-1].descriptor
        if self._durability is Durability.FSYNC:
            self._sync(descriptor)
            self.syncs += 1
        self.durable_end = max(self.durable_end, end)

    def _sync(self, descriptor: int) -> None:
        """One sync at a time: the kernel reports a lost page to one caller only, and a second would be told "well"."""
        with self._sync_lock:
            self.refuse_if_failed()
            try:
                self._storage.sync(descriptor)
            except OSError as error:
                self._failure = error
                logger.critical("sync_failed", extra={"log": self._folder.name, "error": error.strerror})
                raise StorageFailed(
                    f"the disk did not confirm a write: {error.strerror}; restart the broker"
                ) from error

    def _roll(self) -> None:
        """Begin a new segment; the old one is synced first, so that only the newest file is ever in doubt."""
        if self._durability is Durability.FSYNC:
            self._sync(self._segments[-1].descriptor)
        self._add_segment()

    def _add_segment(self) -> None:
        path = segment_path(self._folder, self.end)
        descriptor = self._storage.create(path)
        header = SegmentHeader(kind=self._kind, first_offset=self.end, created_at_ms=self._now_ms())
        try:
            self._storage.write(descriptor, header.encode(), position=0)
            self._storage.sync(descriptor)
            self._storage.sync_folder(self._folder)
            if not self._segments:
                self._storage.sync_folder(self._folder.parent)  # the folder itself is new
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        self._segments.append(_Segment(self.end, descriptor))

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: int) -> bytes:
        """The payload whose frame begins at `offset`. Raises SegmentDamaged where its checksum does not match."""
        index = bisect_right(self._segments, offset, key=lambda segment: segment.first_offset) - 1
        segment = self._segments[index]
        position = HEADER_BYTES + offset - segment.first_offset
        data = os.pread(segment.descriptor, _READ_AHEAD_BYTES, position)
        length = int.from_bytes(data[:4], "little")
        crc = int.from_bytes(data[4:FRAME_BYTES], "little")
        payload = data[FRAME_BYTES : FRAME_BYTES + length]
        if len(payload) < length <= self.end - offset:
            rest = length - len(payload)
            payload += os.pread(segment.descriptor, rest, position + FRAME_BYTES + len(payload))
        if length == 0 or len(payload) != length or google_crc32c.value(payload) != crc:
            raise SegmentDamaged(f"damaged record at offset {offset}")
        return payload

    def sync_and_close(self) -> None:
        """Sync, where the log is sound, and close; idempotent."""
        try:
            if self._segments and self._failure is None:
                self._sync_current()
        finally:
            self.close()

    def close(self) -> None:
        """Close as it is; idempotent."""
        for segment in self._segments:
            os.close(segment.descriptor)
        self._segments.clear()

    def refuse_if_failed(self) -> None:
        """Raise StorageFailed where the log can take nothing until it is opened again."""
        if self._failure is not None:
            raise StorageFailed(
                f"the disk failed earlier ({self._failure.strerror}); "
                "the log takes nothing until the broker is restarted"
            ) from self._failure


def _is_unfinished(path: Path) -> bool:
    """Whether a segment was being made when its process, or the machine, ended: its header is not all there."""
    size = path.stat().st_size
    return size < HEADER_BYTES or (size == HEADER_BYTES and not any(path.read_bytes()))
