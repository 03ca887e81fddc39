"""Segments as files of one folder on a local disk.

A file is a segment's head, then its blocks (outbox_core.journal.block). It is made with its first block.

One writer: a lock that the kernel lets go of when its holder dies; and, where locks do not hold (a shared disk, a lock
file that somebody removed), an epoch in a file, which every write compares. Few files are open at a time.

Of a log's segment a note says how far it is known to be durable, and since which start of the machine it was written:
in the same one no page can be missing, so that only the last append can be cut short, and all else is damage. The note
is made once the file is in the folder for good, and removed before it: a note without its file tells that somebody
removed that.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from outbox_broker.log.disk_reserve import Reserve, cure_for
from outbox_broker.log.folder_lock import FolderLock
from outbox_broker.log.storage import DiskStorage, Storage, UnsyncedStorage
from outbox_broker.log.sync_proof import proven_copy
from outbox_broker.segments.port import SegmentInfo, WriterFenced, require_name
from outbox_broker.segments.writer_epoch import EpochFile
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.block import (
    SEGMENT_HEAD_BYTES,
    SEGMENT_MAGIC,
    Block,
    FrameKind,
    SegmentHead,
    SegmentHeadDamaged,
    SegmentKind,
    SegmentRefused,
    decode_segment_head,
    last_head_in,
    scan,
)
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.journal.segment_note import NOTE_SUFFIX, SegmentNote, encode_note, read_note
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

SUFFIX: Final = ".segment"
OPEN_FILES_MAX: Final = 128
_EARLIER_SUFFIXES: Final = frozenset({".delay", ".log"})
LOGS: Final = frozenset({SegmentKind.MESSAGES, SegmentKind.ACTIONS})
"""Kinds of segments whose ends nothing else names, and which are gone on with: they have a note."""
_ASIDE_SUFFIX: Final = ".unreadable"
_READ_BYTES: Final = 1024 * 1024
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Returns what tells starts of this machine apart; empty where the system has no such thing."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(slots=True, eq=False)
class _File:
    """An open file, and how many use it."""

    descriptor: int
    users: int = 0
    deleted: bool = False


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


class LocalSegments:
    """Segments in a folder. close() releases the folder to the next owner."""

    def __init__(
        self, folder: Path, *, storage: Storage, epoch: int, lock: FolderLock, infos: dict[str, SegmentInfo],
        clock: Clock, boot: str, open_files_max: int,
    ) -> None:  # fmt: skip
        """Called by open() only."""
        self._folder = folder
        self._storage = storage
        self._disk = storage.disk if isinstance(storage, UnsyncedStorage) else storage
        self.is_synced = not isinstance(storage, UnsyncedStorage)
        """Without syncs nothing is known to be durable: a page may be missing before any place after a power loss."""
        self._epoch = epoch
        self._epoch_file = EpochFile(folder)
        self._seen_epoch: tuple[int, int] | None = None  # the epoch file as last read, while it was ours
        self._folder_lock = lock
        self._infos = infos
        self._clock = clock
        self._boot = boot
        self._open_files_max = open_files_max
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._writers: dict[str, LocalWriter] = {}
        self._guard = threading.RLock()
        self._unused = threading.Condition(self._guard)
        self._confirming = threading.Lock()
        """Held while the folder is synced, and not the guard: appends and reads go on beside it."""
        self._folder_changed = False
        self._unnoted: set[str] = set()  # segments of logs of which nothing was committed yet
        self._failure: OSError | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        storage: Storage | None = None,
        reserve: Reserve | None = None,
        clock: Clock | None = None,
        boot: str | None = None,
        open_files_max: int = OPEN_FILES_MAX,
    ) -> LocalSegments:
        """Become the folder's owner, creating it if needed. Raises ConfigurationError, which names who holds it, or the
        cure if its segments are of another format, or SegmentDamaged if a log's newest one is missing; then nothing in
        it was changed.

        The disk reserve of an earlier owner is released, so that segments can be opened on a full disk. More than
        `open_files_max` files are open only while that many are in use. `boot`: the machine's boot_id().
        """
        storage = storage or DiskStorage()
        lock = FolderLock(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            infos, unfinished, unreadable = _found_in(folder)
            refuse_if_newest_is_missing(folder)
            if reserve is not None:
                reserve.release()
            epoch = _begin_epoch(folder, storage.disk if isinstance(storage, UnsyncedStorage) else storage)
            for path in unfinished:
                if path.exists():  # an epoch's that was not renamed has been by now
                    logger.warning("unfinished_file_removed", extra={"file": path.name})
                    path.with_suffix(NOTE_SUFFIX).unlink(missing_ok=True)
                    storage.remove(path)
            for path in unreadable:
                logger.error("unreadable_segment_set_aside", extra={"segment": path.stem, "suffix": _ASIDE_SUFFIX})
                path.replace(path.with_suffix(_ASIDE_SUFFIX))
                storage.sync_folder(folder)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise StorageFailed(f"cannot open the data folder {folder}: {error.strerror}") from error
            raise
        return cls(
            folder, storage=storage, epoch=epoch, lock=lock, infos=infos, clock=clock or SystemClock(),
            boot=boot_id() if boot is None else boot, open_files_max=open_files_max,
        )  # fmt: skip

    @property
    def epoch(self) -> int:
        """Of the folder: incremented with each opening; see the port."""
        return self._epoch

    def create(self, name: str, *, kind: SegmentKind, first: int = 0) -> LocalWriter:
        """Begin a file, with its first block; see the port."""
        require_name(name)
        self.refuse_if_unable()
        with self._guard:
            if name in self._infos:
                self.delete([name])
            info = SegmentInfo(
                name=name, kind=kind, first=first, end=None, created_at_ms=self._clock.now_ms(), epoch=self._epoch
            )
            return self._writing(info, end=0, is_begun=False)

    def reopen(self, name: str, *, end: int) -> LocalWriter:
        """Go on in a log's newest file, once it is proven to be on the disk, by its note or by a copy; see the port.

        Without space for the copy it goes on unproven: whether a sync of an earlier owner failed is not known then.
        """
        self.refuse_if_unable()
        path, note = self._path(name), read_note(self._path(name))
        try:
            self._storage.remove(self._note_path(name))  # before the first write: it would claim too much
            with self.opened(name, make=False) as file:
                is_proven = note is not None and end <= note.end
                if not is_proven and self.is_synced:
                    copy = proven_copy(path, file.descriptor, storage=self._storage, sync=self._storage.sync)
                    if copy is not None:
                        os.close(file.descriptor)
                        file.descriptor, is_proven = copy, True
                size = os.fstat(file.descriptor).st_size
                if size != SEGMENT_HEAD_BYTES + end:  # shorter, too: of a block that was durable an end is gone
                    self._storage.truncate(file.descriptor, SEGMENT_HEAD_BYTES + end)
        except OSError as error:
            raise StorageFailed(f"cannot go on in {name}: {error.strerror}; {cure_for(error)}") from error
        if is_proven or not self.is_synced:
            self.write_note(name, end if is_proven else 0)
        with self._guard:
            return self._writing(self._infos[name], end=end, is_begun=True)

    def list(self) -> Sequence[SegmentInfo]:
        """All files that have a head; see the port."""
        with self._guard:
            return sorted(self._infos.values(), key=lambda info: info.name)

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """Bytes of a file; see the port."""
        writer = self._writers.get(name)
        if writer is not None:
            size_bytes = min(size_bytes, max(0, writer.end - position))  # behind it is what failed, or was cut
        try:
            with self.opened(name, make=False) as file:
                return os.pread(file.descriptor, size_bytes, SEGMENT_HEAD_BYTES + position)
        except OSError as error:
            raise StorageFailed(f"cannot read {name}: {error.strerror}") from error

    def blocks(self, name: str, *, proven: int = 0, wanted: Container[int] | None = None) -> Iterator[Block]:
        """The blocks of a file; see the port."""
        with self._guard:
            self._refuse_if_closed()
            info, writer = self._infos.get(name), self._writers.get(name)
        note = read_note(self._path(name))
        try:
            with self.opened(name, make=False) as file:
                size = os.fstat(file.descriptor).st_size if writer is None else SEGMENT_HEAD_BYTES + writer.end
                data = os.pread(file.descriptor, max(0, size - SEGMENT_HEAD_BYTES), SEGMENT_HEAD_BYTES)
        except OSError as error:
            raise StorageFailed(f"cannot read {name}: {error.strerror}") from error
        if info is None:
            raise StorageFailed(f"cannot read {name}: there is no such segment")
        end = 0
        for block in noted_blocks(data, note, first=info.first, proven=proven, boot=self._boot, wanted=wanted):
            yield block
            end = block.end
        if end < len(data):
            logger.warning("torn_tail_ignored", extra={"segment": name, "bytes": len(data) - end, "position": end})

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; see the port."""
        self.refuse_if_unable()
        names = tuple(names)
        try:
            with self._guard:
                for name in names:
                    self._delete(name)
            if names:
                self._storage.sync_folder(self._folder)
        except OSError as error:
            raise StorageFailed(f"cannot delete a segment: {error.strerror}") from error

    def check(self) -> None:
        """Whether a sync failed, or another process opened the folder; see the port."""
        self.refuse_if_failed()
        self._refuse_if_closed()
        self._refuse_if_fenced()

    def close(self) -> None:
        """Close all files and release the folder, after the calls in progress; see the port."""
        with self._guard:
            self._closed = True
            # A descriptor that is closed under a writer may be another shard's file by the time it is written to.
            self._unused.wait_for(lambda: not any(file.users for file in self._files.values()))
            while self._files:
                os.close(self._files.popitem()[1].descriptor)
        self._folder_lock.release()

    def standing_still(self) -> AbstractContextManager[object]:
        """Returns the lock under which no file is made or deleted. What is appended needs its owner's."""
        return self._guard

    # -- for the writers of this folder ------------------------------------------------------------------------------

    def opened(self, name: str, *, make: bool) -> _Use:
        """Returns what keeps a segment's file open while it is used. Raises OSError, StorageFailed."""
        with self._guard:
            self._refuse_if_closed()
            file = self._files.get(name)
            if file is None:
                path = self._path(name)
                if not make and not path.exists():
                    raise FileNotFoundError(2, "there is no such segment", name)
                file = self._files[name] = _File(self._storage.create(path))
                file.users = 1  # so that it is not closed for itself
                try:
                    self._close_idle()
                finally:
                    file.users = 0
            self._files.move_to_end(name)
            file.users += 1
        return _Use(file, self._unused)

    def opened_unless_deleted(self, writer: LocalWriter) -> _Use | None:
        """As opened(), of a writer's segment; None if that was deleted or replaced. In one step: between a look and an
        opening another thread may delete it, and who waits for it must not be told that its file is missing.
        """
        with self._guard:
            return self.opened(writer.name, make=False) if self.is_writing(writer) else None

    def begin(self, info: SegmentInfo) -> None:
        """A file has its head now, and its first block."""
        with self._guard:
            self._infos[info.name] = info
            self._folder_changed = True
            if info.kind in LOGS:
                self._unnoted.add(info.name)

    def discard(self, name: str) -> None:
        """Remove a file that got no first block, if that can be done: else the next append, or owner, does it."""
        with suppress(OSError), self._guard:
            file = self._files.pop(name, None)
            if file is not None:
                os.close(file.descriptor)
            self._storage.remove(self._path(name))

    def sync(self, descriptor: int, name: str) -> None:
        """Sync a file. Raises StorageFailed, which is final: the kernel may have dropped the pages that it could not
        write. Then a page may be missing, although the machine was not started anew: the note must not deny that.
        """
        try:
            self._storage.sync(descriptor)
        except OSError as error:
            with suppress(OSError):
                self._storage.remove(self._note_path(name))
            raise self._failed(error) from error

    def sync_anyway(self, writer: LocalWriter) -> None:
        """Make a log's segment durable, and its entry in the folder, where syncs are left to the system: as it is begun
        and as it is sealed. After a power failure the newest segment may end at its first hole; were one before it
        missing, or had it a hole, that would be damage.
        """
        if self.is_synced or writer.kind not in LOGS:
            return
        try:
            use = self.opened_unless_deleted(writer)
            if use is not None:
                with use as file:
                    self._disk.sync(file.descriptor)
                self._disk.sync_folder(self._folder)
        except OSError as error:
            raise self._failed(error) from error

    def confirm(self, name: str) -> None:
        """What was written of a segment is synced: make the folder durable if a file is new, then check that this is
        still the owner, and that nothing failed: a sync that completed after another one took over, or failed, must not
        be acknowledged. Raises StorageFailed, WriterFenced.
        """
        with self._confirming:
            if self._folder_changed:
                self._folder_changed = False  # before the sync: a file that is begun meanwhile needs another one
                try:
                    self._storage.sync_folder(self._folder)
                except OSError as error:  # noted before another one syncs, who may be told nothing
                    raise self._failed(error) from error
        with self._guard:
            # Not before a commit of its own: the note of a segment says that somebody was told what is in it.
            if name in self._unnoted:
                self._unnoted.discard(name)
                if name in self._infos:
                    self.write_note(name, 0)
        self.refuse_if_failed()
        self._refuse_if_closed()
        self._refuse_if_fenced()

    def write_note(self, name: str, end: int) -> None:
        """Note that a log's segment is durable up to a position. The note need not be durable; where it cannot be
        written, the next owner makes one needless copy.
        """
        path = self._note_path(name)
        aside = path.with_suffix(f"{NOTE_SUFFIX}.new")
        with suppress(OSError):
            descriptor = self._storage.create(aside)
            try:
                self._storage.truncate(descriptor, 0)
                self._storage.write(descriptor, encode_note(SegmentNote(end, self._boot)), position=0)
            finally:
                os.close(descriptor)
            aside.replace(path)

    def release(self, writer: LocalWriter) -> None:
        """Close the file of a writer that is done, unless it is in use."""
        with self._guard:
            file = self._files.get(writer.name)
            if self._writers.get(writer.name) is writer:
                del self._writers[writer.name]
                if file is not None and not file.users:
                    os.close(self._files.pop(writer.name).descriptor)

    def is_writing(self, writer: LocalWriter) -> bool:
        """Returns whether a writer's segment was neither deleted nor replaced."""
        return self._writers.get(writer.name) is writer

    def refuse_if_unable(self) -> None:
        """Raise StorageFailed or WriterFenced if nothing may be written."""
        self.refuse_if_failed()
        self._refuse_if_closed()
        self._refuse_if_fenced()

    def refuse_if_failed(self) -> None:
        """Raise StorageFailed if a sync failed."""
        if self._failure is not None:
            raise StorageFailed(
                f"the disk failed earlier ({self._failure.strerror}); nothing is taken until the broker is restarted"
            ) from self._failure

    # -- files -------------------------------------------------------------------------------------------------------

    def _close_idle(self) -> None:
        """Limit the number of open files. Unsynced writes are synced first: only this descriptor reports their loss."""
        for name in list(self._files)[: max(0, len(self._files) - self._open_files_max)]:
            file, writer = self._files[name], self._writers.get(name)
            if not file.users:
                if writer is not None:
                    writer.sync_before_close(file.descriptor)
                del self._files[name]
                os.close(file.descriptor)

    def _delete(self, name: str) -> None:
        self._infos.pop(name, None)
        self._writers.pop(name, None)
        file = self._files.pop(name, None)
        if file is not None and file.users:
            file.deleted = True
        elif file is not None:
            os.close(file.descriptor)
        if self._note_path(name).exists():  # first: without its file it would tell that this is missing
            self._storage.remove(self._note_path(name))
        self._storage.remove(self._path(name))

    def _writing(self, info: SegmentInfo, *, end: int, is_begun: bool) -> LocalWriter:
        writer = self._writers[info.name] = LocalWriter(self, info, storage=self._storage, end=end, is_begun=is_begun)
        return writer

    def _failed(self, error: OSError) -> StorageFailed:
        self._failure = error
        logger.critical("sync_failed", extra={"folder": self._folder.name, "error": error.strerror})
        return StorageFailed(f"the disk did not confirm a write: {error.strerror}; restart the broker")

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the segments are closed")

    def _refuse_if_fenced(self) -> None:
        found = self._epoch_file.identity()
        if found is None or found != self._seen_epoch:
            if self._epoch_file.read() != self._epoch:
                raise WriterFenced(f"another process writes to {self._folder} now; this one must end")
            self._seen_epoch = found

    def _path(self, name: str) -> Path:
        require_name(name)
        return self._folder / f"{name}{SUFFIX}"

    def _note_path(self, name: str) -> Path:
        return self._folder / f"{name}{NOTE_SUFFIX}"


class LocalWriter:
    """A SegmentWriter on one file."""

    def __init__(
        self, segments: LocalSegments, info: SegmentInfo, *, storage: Storage, end: int, is_begun: bool
    ) -> None:  # fmt: skip
        """Called by LocalSegments only. `is_begun`: the file has a head, and is durable up to `end`."""
        self.is_begun = is_begun
        self._segments = segments
        self._info = info
        self._storage = storage
        self._end = end
        self._file_bytes = SEGMENT_HEAD_BYTES + end if is_begun else 0
        """How long the file may be: behind the end is what failed, or was cut."""
        self._durable = end
        self._turn = threading.Lock()
        """Held during a sync: who waited for it may find its blocks synced by another."""
        self._covered = end
        """What the sync in progress, or the last one, covers: what is cut meanwhile, and written anew, it does not."""
        self._ends = threading.Lock()
        """Guards that a cut lowers `_durable` and `_covered` at once; innermost."""
        self._sealed = False
        self._is_entered = False  # its beginning, and its entry in the folder, are durable

    @property
    def kind(self) -> SegmentKind:
        """Of what the segment is part."""
        return self._info.kind

    @property
    def name(self) -> str:
        """See the port."""
        return self._info.name

    @property
    def end(self) -> int:
        """See the port."""
        return self._end

    def append(self, block: bytes) -> int:
        """One write; see the port."""
        self._refuse_if_done()
        self._segments.refuse_if_unable()
        data = block if self.is_begun else self._head() + block
        position = SEGMENT_HEAD_BYTES + self._end if self.is_begun else 0
        try:
            with self._segments.opened(self.name, make=not self.is_begun) as file:
                size = self._file_bytes if self.is_begun else os.fstat(file.descriptor).st_size
                if size > position:  # of an append that failed halfway, or was cut
                    self._storage.truncate(file.descriptor, position)
                self._file_bytes = position + len(data)
                self._storage.write(file.descriptor, data, position=position)
        except OSError as error:
            if not self.is_begun:
                self._segments.discard(self.name)
            raise StorageFailed(f"cannot write {self.name}: {error.strerror}; {cure_for(error)}") from error
        self._end += len(block)  # behind the write: a concurrent sync covers only what it saw written
        if not self.is_begun:
            self.is_begun = True
            self._segments.begin(self._info)
        return self._end

    def commit(self, end: int | None = None) -> int:
        """One sync for all who wait; see the port."""
        self._segments.refuse_if_failed()
        wanted = self._end if end is None else end
        with self._turn:
            if self._durable < wanted:
                self._segments.refuse_if_failed()
                try:
                    use = self._segments.opened_unless_deleted(self)
                    if use is not None:
                        with use as file:
                            self._sync(file.descriptor)
                except OSError as error:  # nothing is in doubt: whatever closes a file has synced it
                    raise StorageFailed(f"cannot open {self.name}: {error.strerror}; {cure_for(error)}") from error
            if not self._is_entered and self.is_begun:
                self._segments.sync_anyway(self)
                self._is_entered = True
        self._segments.confirm(self.name)
        return self._durable if self._segments.is_synced else 0

    def cut(self, end: int) -> None:
        """Truncate the file; see the port. If that fails, the next append does it."""
        self._refuse_if_done()
        if SEGMENT_HEAD_BYTES + end >= self._file_bytes:
            return
        self._segments.refuse_if_unable()
        with self._ends:
            self._end, self._durable, self._covered = end, min(self._durable, end), min(self._covered, end)
        with suppress(OSError), self._segments.opened(self.name, make=False) as file:
            self._storage.truncate(file.descriptor, SEGMENT_HEAD_BYTES + end)
            self._file_bytes = SEGMENT_HEAD_BYTES + end

    def seal(self) -> None:
        """Close the file; see the port."""
        if self._sealed:
            return
        self.commit()
        if self._segments.is_writing(self):
            self.cut(self._end)  # of an append that failed halfway something may be left
            self._segments.sync_anyway(self)
            if self.kind in LOGS:
                self._segments.write_note(self.name, self._durable)
        self._sealed = True
        self._segments.release(self)

    def abandon(self) -> None:
        """See the port. Its file is closed when others need to be opened."""
        self._sealed = True

    def sync_before_close(self, descriptor: int) -> None:
        """Sync what is not durable yet, as the file is closed. Raises StorageFailed."""
        if self._durable < self._end:
            self._sync(descriptor)

    def _sync(self, descriptor: int) -> None:
        with self._ends:
            self._covered = self._end
        self._segments.sync(descriptor, self.name)
        with self._ends:
            self._durable = max(self._durable, self._covered)

    def _head(self) -> bytes:
        info = self._info
        return SegmentHead(
            kind=info.kind, epoch=info.epoch, first=info.first, created_at_ms=info.created_at_ms
        ).encode()  # fmt: skip

    def _refuse_if_done(self) -> None:
        if self._sealed:
            raise StorageFailed(f"{self.name} is sealed")
        if not self._segments.is_writing(self):
            raise StorageFailed(f"{self.name} was deleted")


def noted_blocks(
    data: bytes, note: SegmentNote | None, *, first: int, proven: int, boot: str, wanted: Container[int] | None
) -> Iterator[Block]:  # fmt: skip
    """Yields the blocks of a file, without its head, up to a torn tail; see the port. `boot`: this machine's start."""
    noted_end = 0 if note is None else note.end
    is_same_boot = bool(boot) and note is not None and note.boot == boot
    end = 0
    for block in scan(
        data, first=first, proven=first + max(proven, noted_end), same_boot=is_same_boot, wanted=wanted
    ):  # fmt: skip
        yield block
        end = block.end
    if noted_end > max(end, proven):
        # It was durable, and the file ends before it, between two blocks: no block says that any is missing.
        yield Block(None, None, [], None, [], position=end, end=noted_end)


def _begin_epoch(folder: Path, disk: Storage) -> int:
    """Returns the folder's next epoch, which is durable then, whatever the durability: a log is known to be gone by it.
    Raises OSError.
    """
    epoch_file = EpochFile(folder)
    epoch = epoch_file.read() + 1
    if epoch == 1:  # the folder may be new, too
        disk.sync_folder(folder.parent)
    epoch_file.write(epoch, disk)
    return epoch


def _log_of(path: Path) -> str:
    """Returns the name of the log of which a file is a segment, or the note of one."""
    return path.stem.rpartition("-")[0]


def _found_in(folder: Path) -> tuple[dict[str, SegmentInfo], list[Path], list[Path]]:
    """Returns the segments of a folder; the files to remove, of what was made when its owner died, and of copies; and
    those to set aside, of which nothing says where they begin.

    Raises ConfigurationError, with the cure, at segments of another format; SegmentDamaged.
    """
    for path in sorted(path for path in folder.iterdir() if path.suffix in _EARLIER_SUFFIXES):
        raise ConfigurationError(
            f"{folder} holds segments of an earlier format ({path.name}): drain it with the version that wrote it, and "
            "use an empty folder"
        )
    infos: dict[str, SegmentInfo] = {}
    is_owned = EpochFile(folder).identity() is not None
    unfinished, unreadable = sorted(folder.glob("*.new")), list[Path]()
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with path.open("rb") as file:
            if is_unfinished(file):
                unfinished.append(path)
                continue
            file.seek(0)
            head = head_of(path, file, is_owned=is_owned)
        if head is None:
            unreadable.append(path)
            continue
        infos[path.stem] = SegmentInfo(
            name=path.stem, kind=head.kind, first=head.first, end=None, created_at_ms=head.created_at_ms,
            epoch=head.epoch,
        )  # fmt: skip
    return infos, unfinished, unreadable


def refuse_if_newest_is_missing(folder: Path) -> None:
    """Raise SegmentDamaged if a log's newest segment, of which there is a note, is gone: nothing else would tell, and
    the log would go on at an earlier end.
    """
    # The notes first, as the owner may be writing: one is made behind its segment, and removed before it.
    notes = sorted(folder.glob(f"*{NOTE_SUFFIX}"), reverse=True)
    newest = {_log_of(path): path.stem for path in sorted(folder.glob(f"*{SUFFIX}"))}
    for path in notes:
        if path.stem > newest.get(_log_of(path), ""):
            raise SegmentDamaged(
                f"{path.stem} is missing in {folder}, the newest segment of its log: restore it from a copy; or remove "
                f"{path}, to go on without all that was in it"
            )


def is_unfinished(file: BinaryIO) -> bool:
    """Returns whether a file has nothing but zeros, or a part of a head: nothing was acknowledged of it. A head of
    zeros alone does not say so: where a page was lost, blocks are behind it.
    """
    head = file.read(SEGMENT_HEAD_BYTES)
    if any(head):
        return len(head) < SEGMENT_HEAD_BYTES and SEGMENT_MAGIC.startswith(head[: len(SEGMENT_MAGIC)])
    return not any(data.strip(b"\0") for data in iter(partial(file.read, _READ_BYTES), b""))


def head_of(path: Path, file: BinaryIO, *, is_owned: bool) -> SegmentHead | None:
    """Returns the head of a segment; where it is damaged, what its blocks say. What is nothing of ours in a folder that
    had an owner is damage, too. None: of a log's newest segment nothing says where it begins, and nobody was told that
    anything in it is durable; a power failure kept a later page of its first block, and not the first one.

    Raises ConfigurationError; SegmentDamaged where somebody was told that, by the segment's note or by one behind it.
    """
    data = file.read(SEGMENT_HEAD_BYTES)
    try:
        return decode_segment_head(data)
    except SegmentRefused as refused:
        block = last_head_in(file.read())
        is_damaged = isinstance(refused, SegmentHeadDamaged) or not data.startswith(SEGMENT_MAGIC)
        if not is_damaged or (block is None and not is_owned):
            raise ConfigurationError(f"{path}: {refused}") from refused
        log = _log_of(path)
        # A log has notes from its first commit on; of the id index, whose names are alike, nothing has.
        if block is None and any(path.parent.glob(f"{log}-*{NOTE_SUFFIX}")):
            newest = max(path.parent.glob(f"{log}-*{SUFFIX}"))
            if path != newest or path.with_suffix(NOTE_SUFFIX).exists():
                raise SegmentDamaged(
                    f"{path.stem}: its head and those of its blocks are lost; restore {path.stem} from a copy"
                ) from refused
            return None
        logger.error("segment_head_damaged", extra={"segment": path.stem})  # noqa: TRY400 - there is nothing to trace
        is_record = block is None or block.kind == FrameKind.RECORD
        kind = SegmentKind.BUCKET if is_record else SegmentKind.MESSAGES
        # Of its last write: retention keeps the segment before it for longer rather than for less.
        written_ms = os.fstat(file.fileno()).st_mtime_ns // 1_000_000
        return SegmentHead(kind=kind, epoch=0, first=0 if block is None else block.first, created_at_ms=written_ms)
