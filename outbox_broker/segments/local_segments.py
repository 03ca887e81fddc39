"""Segments as files of one folder on a local disk: the segment store's first implementation.

A file is a header, then frames (outbox_broker.segments.frame_format). Positions count behind the header.

    header   magic 8s "OUTBOXDL" | version u32 | epoch of the writer that made it u64 | crc32c u32

One writer: a lock that the kernel lets go of when its holder dies; and, where locks do not hold (a shared disk, a lock
file that somebody removed), an epoch in a file, which every write compares. Few files are open at a time.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import google_crc32c

from outbox_broker.log.disk_reserve import Reserve, cure_for
from outbox_broker.log.folder_lock import FolderLock
from outbox_broker.log.storage import DiskStorage, Storage
from outbox_broker.segments.frame_format import FRAME_BYTES, frame_at, frames, mark, was_synced_beyond
from outbox_broker.segments.segment_store import Record, RecordDamaged, SegmentAppend, WriterFenced
from outbox_broker.segments.writer_epoch import epoch_file, read_epoch, write_epoch
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

MAGIC: Final = b"OUTBOXDL"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sIQ")
HEADER_BYTES: Final = _HEAD.size + 4
SUFFIX: Final = ".delay"
OPEN_FILES_MAX: Final = 128
_SYNCS_AT_ONCE: Final = 8
_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(slots=True, eq=False)
class _File:
    """An open file. `written` counts appends, `synced` the durable ones; `turn` guards both.

    `written_end` is the position after this process's last append; older content may include a torn tail. `synced_end`
    is the position up to which everything is durable.
    """

    descriptor: int
    size: int
    written: int = 0
    synced: int = 0
    written_end: int = 0
    synced_end: int = 0
    users: int = 0
    deleted: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)


class LocalSegmentStore:
    """A SegmentStore in a folder. close() releases the folder to the next writer."""

    def __init__(self, folder: Path, *, storage: Storage, epoch: int, lock: FolderLock, open_files_max: int) -> None:
        """Called by open() only."""
        self.epoch = epoch
        self._folder = folder
        self._seen_epoch: tuple[int, int] | None = None  # the epoch file as last read, while it was ours
        self._storage = storage
        self._folder_lock = lock
        self._open_files_max = open_files_max
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._guard = threading.RLock()
        self._unused = threading.Condition(self._guard)
        self._folder_changed = False
        self._failure: OSError | None = None
        self._closed = False
        self.bytes_written = 0
        self.syncs = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        storage: Storage | None = None,
        reserve: Reserve | None = None,
        open_files_max: int = OPEN_FILES_MAX,
    ) -> LocalSegmentStore:
        """Become the folder's writer, creating it if needed. Raises ConfigurationError naming the holder.

        The disk reserve of an earlier writer is released, so that a store can be opened on a full disk. More than
        `open_files_max` segments are open only while that many are in use.
        """
        storage = storage or DiskStorage()
        lock = FolderLock(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            if reserve is not None:
                reserve.release()
            epoch = read_epoch(folder) + 1
            write_epoch(folder, epoch, storage)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise StorageFailed(f"cannot open the data folder {folder}: {error.strerror}") from error
            raise
        return cls(folder, storage=storage, epoch=epoch, lock=lock, open_files_max=open_files_max)

    def append(self, name: str, records: Sequence[bytes], *, position: int) -> list[int]:
        """Write records at a position; see the port."""
        self._refuse_if_unable()
        try:
            with self._opened(name, make=True) as file:
                data, ends = frames(records, position=position, synced_end=min(file.synced_end, position))
                self._write(file, data, position=position)
        except OSError as error:
            raise StorageFailed(f"cannot write {name}: {error.strerror}; {cure_for(error)}") from error
        self.bytes_written += len(data)
        return ends

    def append_all(self, appends: Sequence[SegmentAppend]) -> list[list[int]]:
        """Write to several segments; see the port."""
        return [self.append(one.name, one.records, position=one.position) for one in appends]

    def sync(self, names: Iterable[str]) -> None:
        """Make segments durable, and the folder if a file is new; see the port.

        Fencing is checked after the sync: a sync that completed after another writer took over must not be
        acknowledged.
        """
        self._refuse_if_failed()
        try:
            self._sync_files(tuple(names))
            with self._guard:
                if self._folder_changed:
                    self._storage.sync_folder(self._folder)
                    self._folder_changed = False
        except OSError as error:
            raise self._failed(error) from error
        self._refuse_if_closed()
        self._refuse_if_fenced()

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """One record; see the port."""
        try:
            with self._opened(name, make=False) as file:
                data = os.pread(file.descriptor, FRAME_BYTES + size_bytes, HEADER_BYTES + position)
        except OSError as error:
            raise StorageFailed(f"cannot read {name}: {error.strerror}") from error
        one = frame_at(memoryview(data), 0)
        if one is None or len(one.payload) != size_bytes or not one.payload:
            raise RecordDamaged(
                f"{name}: damaged record at {position}; restore {name}{SUFFIX} from a copy", found=data[FRAME_BYTES:]
            )
        return one.payload

    def scan(self, name: str) -> Iterator[Record]:
        """Every whole record; see the port."""
        try:
            data = self._path(name).read_bytes()
        except OSError as error:
            raise StorageFailed(f"cannot read {name}: {error.strerror}") from error
        if not _is_header(data[:HEADER_BYTES]):
            if len(data) < HEADER_BYTES or not any(data[:HEADER_BYTES]):  # its writer died while creating it
                return
            raise SegmentDamaged(f"{name}: its header does not match its checksum; restore it from a copy")
        view, end = memoryview(data)[HEADER_BYTES:], 0
        while (one := frame_at(view, end)) is not None:
            if one.payload:
                yield Record(end, one.payload, one.end)
            end = one.end
        if was_synced_beyond(view, end):
            raise SegmentDamaged(f"{name}: damaged record at {end}; restore {name}{SUFFIX} from a copy")
        if len(view) > end:  # never synced, as far as any frame records
            logger.warning("torn_tail_ignored", extra={"segment": name, "bytes": len(view) - end, "position": end})

    def seal(self, name: str) -> None:
        """Close the file; see the port. A mark after its records then says that they are durable."""
        with self._guard:
            file = self._files.get(name)
            if file is not None and not file.users and file.written == file.synced:
                if file.synced_end:
                    self._mark(file)
                os.close(self._files.pop(name).descriptor)

    def list(self) -> Sequence[str]:
        """List names from the folder's entries; see the port."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}"))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; see the port."""
        self._refuse_if_unable()
        names = tuple(names)
        try:
            with self._guard:
                for name in names:
                    file = self._files.pop(name, None)
                    if file is not None and file.users:
                        file.deleted = True
                    elif file is not None:
                        os.close(file.descriptor)
                    self._storage.remove(self._path(name))
                if names:
                    self._storage.sync_folder(self._folder)
        except OSError as error:
            raise StorageFailed(f"cannot delete a segment: {error.strerror}") from error

    def continues(self, _name: str) -> bool:
        """Returns False: what was read may be in the page cache only, if a sync of an earlier process failed; only a
        new file proves it (outbox_broker.log.sync_proof). See the port.
        """
        return False

    def close(self) -> None:
        """Close all files and release the folder, after the calls in progress; idempotent. Syncs nothing."""
        with self._guard:
            self._closed = True
            # A descriptor that is closed under a writer may be another shard's file by the time it is written to.
            self._unused.wait_for(lambda: not any(file.users for file in self._files.values()))
            while self._files:
                os.close(self._files.popitem()[1].descriptor)
        self._folder_lock.release()

    # -- files -------------------------------------------------------------------------------------------------------

    def _opened(self, name: str, *, make: bool) -> _Use:
        with self._guard:
            self._refuse_if_closed()
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self._open_file(name, make=make)
                self._close_idle()
            self._files.move_to_end(name)
            file.users += 1
        return _Use(file, self._unused)

    def _open_file(self, name: str, *, make: bool) -> _File:
        path = self._path(name)
        is_new = not path.exists()
        if is_new and not make:
            raise FileNotFoundError(2, "there is no such segment", name)
        descriptor = self._storage.create(path)
        try:
            size = os.fstat(descriptor).st_size
            if not _is_header(os.pread(descriptor, HEADER_BYTES, 0)):
                if size > HEADER_BYTES:  # what follows it has checksums of its own
                    logger.error("segment_header_rewritten", extra={"segment": name})
                self._storage.write(descriptor, _header(self.epoch), position=0)
                self._folder_changed = True
                size = max(size, HEADER_BYTES)
        except BaseException:
            os.close(descriptor)
            raise
        return _File(descriptor, size, written=1)  # what an earlier process wrote may never have been synced

    def _close_idle(self) -> None:
        """Limit the number of open files. Unsynced writes are synced first: only this descriptor reports their loss."""
        for name in list(self._files)[: max(0, len(self._files) - self._open_files_max)]:
            file = self._files[name]
            if not file.users:
                if file.synced < file.written:
                    self._sync_written(file)
                del self._files[name]
                os.close(file.descriptor)

    def _write(self, file: _File, data: bytes, *, position: int) -> None:
        if file.size > HEADER_BYTES + position:  # the tail of an append that was never acknowledged
            self._storage.truncate(file.descriptor, HEADER_BYTES + position)
            file.synced_end = min(file.synced_end, position)
        file.size = HEADER_BYTES + position + len(data)
        self._storage.write(file.descriptor, data, position=HEADER_BYTES + position)
        file.written_end = position + len(data)
        file.written += 1  # after the write: a concurrent sync covers only what it saw written

    def _mark(self, file: _File) -> None:
        """Write a mark after the last record that all of it is durable; skipped if there is no space."""
        with suppress(OSError):
            self._storage.write(file.descriptor, mark(file.synced_end), position=HEADER_BYTES + file.synced_end)

    def _sync_files(self, names: tuple[str, ...]) -> None:
        """Sync several files concurrently: the disk combines flushes that are issued together."""
        if len(names) < _SYNCS_AT_ONCE:
            for name in names:
                self._sync_file(name)
            return
        with ThreadPoolExecutor(_SYNCS_AT_ONCE, "delay-sync") as pool:
            for _ in pool.map(self._sync_file, names):
                pass

    def _sync_file(self, name: str) -> None:
        """Callers share a sync: after waiting for the turn, a caller may find its write synced by another."""
        with self._guard:
            if name not in self._files and not self._path(name).exists():
                return  # deleted meanwhile
            try:
                use = self._opened(name, make=False)
            except OSError as error:  # nothing is in doubt: whatever closed the file had synced it before
                raise StorageFailed(f"cannot open {name}: {error.strerror}; {cure_for(error)}") from error
        with use as file:
            wanted = file.written
            with file.turn:
                if file.synced < wanted:
                    self._refuse_if_failed()
                    self._sync_written(file)

    def _sync_written(self, file: _File) -> None:
        covered, covered_end = file.written, file.written_end
        try:
            self._storage.sync(file.descriptor)
        except OSError as error:
            raise self._failed(error) from error
        self.syncs += 1
        file.synced, file.synced_end = covered, covered_end

    def _failed(self, error: OSError) -> StorageFailed:
        """A failed sync is final: the kernel may have dropped the pages that it could not write."""
        self._failure = error
        logger.critical("sync_failed", extra={"folder": self._folder.name, "error": error.strerror})
        return StorageFailed(f"the disk did not confirm a write: {error.strerror}; restart the broker")

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise StorageFailed(
                f"the disk failed earlier ({self._failure.strerror}); nothing is taken until the broker is restarted"
            ) from self._failure

    def _refuse_if_unable(self) -> None:
        self._refuse_if_failed()
        self._refuse_if_closed()
        found = epoch_file(self._folder)
        if found is None or found != self._seen_epoch:
            self._refuse_if_fenced()
            self._seen_epoch = found

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the segment store is closed")

    def _refuse_if_fenced(self) -> None:
        if read_epoch(self._folder) != self.epoch:
            raise WriterFenced(f"another process writes to {self._folder} now; this one must end")

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a segment's name: {name!r}")
        return self._folder / f"{name}{SUFFIX}"


class _Use:
    """Keeps a file open while it is used."""

    def __init__(self, file: _File, unused: threading.Condition) -> None:
        """`unused`: notified when the last user is done."""
        self._file = file
        self._unused = unused

    def __enter__(self) -> _File:
        return self._file

    def __exit__(self, *_: object) -> None:
        with self._unused:
            self._file.users -= 1
            if not self._file.users:
                if self._file.deleted:
                    os.close(self._file.descriptor)
                self._unused.notify_all()


def _header(epoch: int) -> bytes:
    head = _HEAD.pack(MAGIC, VERSION, epoch)
    return head + int(google_crc32c.value(head)).to_bytes(4, "little")


def _is_header(data: bytes) -> bool:
    if len(data) < HEADER_BYTES:
        return False
    magic, version, _ = _HEAD.unpack_from(data)
    crc = int.from_bytes(data[_HEAD.size : HEADER_BYTES], "little")
    if magic != MAGIC or google_crc32c.value(data[: _HEAD.size]) != crc:
        return False
    if version != VERSION:
        raise SegmentDamaged(
            f"the schedule has version {version}; this code reads version {VERSION}: drain it with the version that "
            "wrote it, and begin with a new data folder"
        )
    return True
