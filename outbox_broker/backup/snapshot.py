"""What a data folder holds at one moment, as hard links below `snapshot/`: the owner goes on writing, rolling and
deleting, and what is linked stays what it was up to the size that is noted of it.

Logs only grow at their ends, and all else is replaced by renames, so a link and a size are a copy of the moment. Who
takes the backup holds `snapshot/lock`, and the kernel lets go of that when he dies: what is linked then is removed by
the owner of the folder, or by the next backup.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Final, Self

import msgspec

from outbox_broker.log.cordon import NAME as CORDON
from outbox_broker.log.folder_format import FILE_NAME as FORMAT
from outbox_broker.log.folder_lock import PARTS, SNAPSHOT, FolderLock
from outbox_broker.log.restored_folder import NAME as RESTORED
from outbox_broker.segments.local import SUFFIX, boot_id
from outbox_broker.segments.writer_epoch import FILE_NAME as EPOCH
from outbox_core.common.clock import Clock
from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError, StorageFailed
from outbox_core.common.private_files import write_private
from outbox_core.journal.segment_note import NOTE_SUFFIX

_LINKS: Final = "links"
_CONTENTS: Final = "contents.json"
_NAMES: Final = frozenset({FORMAT, EPOCH, CORDON, RESTORED})
Lock = AbstractContextManager[object]
_SUFFIXES: Final = (SUFFIX, NOTE_SUFFIX)


class SnapshotFile(msgspec.Struct, array_like=True, frozen=True):
    """A file by its path in the data folder, and how long it was: what is behind that came later."""

    path: str
    size_bytes: int


class SnapshotContents(msgspec.Struct, frozen=True, kw_only=True):
    """A data folder at one moment. `boot`: the machine's start then; `token`: by whom it was asked for."""

    at_ms: int
    boot: str
    token: str
    files: list[SnapshotFile]


_decode = msgspec.json.Decoder(SnapshotContents).decode


class SnapshotHold:
    """The right to a snapshot of a folder, as a context manager; what is linked goes with its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / SNAPSHOT
        self._lock = FolderLock(self._folder)

    def __enter__(self) -> Self:
        """Raises ConfigurationError if another backup of this folder is being taken; OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._lock.acquire()
        _remove(self._folder)  # left by a backup that was killed
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(OSError):  # else the folder's owner, or the next backup, does it
                _remove(self._folder)
        finally:
            self._lock.release()

    def found(self, token: str) -> SnapshotContents:
        """Returns what the folder's owner was asked for. Raises ConfigurationError if there is nothing: another broker
        was asked.
        """
        try:
            snapshot = _decode((self._folder / _CONTENTS).read_bytes())
        except (OSError, *DECODE_ERRORS):
            snapshot = None
        if snapshot is None or snapshot.token != token:
            raise ConfigurationError(
                f"the broker that was asked has another data folder than {self._folder.parent}: name the URL of the "
                "broker that runs on it"
            )
        return snapshot

    def path(self, file: SnapshotFile) -> Path:
        """Returns where a file of the snapshot is linked."""
        return self._folder / _LINKS / file.path


class FolderSnapshots:
    """Snapshots of a data folder, by its owner."""

    def __init__(self, folder: Path, *, clock: Clock, locks: Callable[[], Sequence[Lock]]) -> None:
        """`locks`: those under which nothing is written to the folder's logs, and nothing in it is made or deleted, in
        the order in which they are taken.
        """
        self._folder = folder
        self._snapshot_folder = folder / SNAPSHOT
        self._clock = clock
        self._locks = locks
        self._changing = threading.Lock()

    def take(self, token: str) -> SnapshotContents | None:
        """Link what is in the folder, for the SnapshotHold that asks with this token.

        All logs are linked at one moment, so the links are what a kill then would have left: no order among the logs
        is to be kept. None if nobody has a SnapshotHold, and no snapshot yet: what is linked would stay on the disk.
        Raises StorageFailed.
        """
        links = self._snapshot_folder / _LINKS
        with self._changing:
            is_there = (self._snapshot_folder / _CONTENTS).exists()  # what is being copied must not be linked anew
            return self._taken(token, links) if _is_held(self._snapshot_folder) and not is_there else None

    def _taken(self, token: str, links: Path) -> SnapshotContents:
        try:
            _link(self._folder, links)  # most of it, before anybody has to wait
            with ExitStack() as still:
                for lock in self._locks():
                    still.enter_context(lock)
                files = _link(self._folder, links)
                at_ms = self._clock.now_ms()
            files.sort(key=lambda file: file.path)
            snapshot = SnapshotContents(at_ms=at_ms, boot=boot_id(), token=token, files=files)
            aside = self._snapshot_folder / f"{_CONTENTS}.new"
            write_private(aside, msgspec.json.encode(snapshot))
            aside.replace(self._snapshot_folder / _CONTENTS)
        except OSError as error:
            with suppress(OSError):
                _remove(self._snapshot_folder)
            raise StorageFailed(
                f"cannot link the files of {self._folder}: {error.strerror}; the backup must run as the broker's user, "
                "and the file system must have hard links"
            ) from error
        return snapshot

    def remove_abandoned(self) -> None:
        """Remove what a backup that was killed has left, as it holds space; one that is being taken is left alone."""
        if not (self._snapshot_folder / _LINKS).exists():
            return
        lock = FolderLock(self._snapshot_folder)
        with self._changing, suppress(OSError, ConfigurationError):  # it is being taken; or it is tried again
            lock.acquire()
            try:
                _remove(self._snapshot_folder)
            finally:
                lock.release()


def _is_held(snapshot_folder: Path) -> bool:
    lock = FolderLock(snapshot_folder)
    try:
        lock.acquire()
    except ConfigurationError:
        return True
    except OSError:  # there is none; or it is another user's, who can be asked for nothing
        return False
    lock.release()
    return False


def _remove(snapshot_folder: Path) -> None:
    (snapshot_folder / _CONTENTS).unlink(missing_ok=True)
    if (snapshot_folder / _LINKS).exists():
        shutil.rmtree(snapshot_folder / _LINKS)


def _link(folder: Path, links: Path) -> list[SnapshotFile]:
    """Make the links those of the files that are in the folder now; returns these. Raises OSError."""
    files: list[SnapshotFile] = []
    for part in ("", *PARTS):
        place = links / part
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.scandir(place) as found:
            linked = {entry.name: entry.inode() for entry in found if not entry.is_dir()}
        for entry in _kept_in(folder / part):
            # Strings and no Paths: everybody waits for this, and there may be thousands.
            if linked.pop(entry.name, None) != entry.inode():  # another file has its name by now
                link = place / entry.name
                link.unlink(missing_ok=True)
                with suppress(FileNotFoundError):  # deleted meanwhile, where nobody has to wait
                    link.hardlink_to(entry.path)
            with suppress(FileNotFoundError):
                size_bytes = entry.stat(follow_symlinks=False).st_size
                files.append(SnapshotFile(f"{part}/{entry.name}" if part else entry.name, size_bytes))
        for name in linked:
            (place / name).unlink()
    return files


def _kept_in(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields the files of a part of the folder that a backup has: all that is derived from nothing else."""
    try:
        found = os.scandir(folder)
    except FileNotFoundError:  # a delay service has no parts
        return
    with found:
        for entry in found:
            if entry.name in _NAMES or entry.name.endswith(_SUFFIXES):
                yield entry
