"""A storage whose power can be cut: what stands in a folder then is what was synced. It drives a real disk."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from random import Random

from outbox_broker.log.storage import DiskStorage

_SECTOR_BYTES = 64
"""Of a file's beginning all or nothing is there: a sector, which has at least 512 bytes, holds a head."""


class PoweredStorage(DiskStorage):
    """Notes what was synced of each file, by its inode, so that a rename changes nothing; syncs take no time.

    Folders are durable at once. Calls wait while the folder is looked at, so that it is seen as of one moment.
    """

    def __init__(self) -> None:
        self._synced: dict[int, int] = {}
        self._lock = threading.RLock()
        self.fails = False

    def create(self, path: Path) -> int:
        with self._lock:
            descriptor = super().create(path)
            status = os.fstat(descriptor)
            if status.st_size == 0:  # the number may have been another file's
                self._synced[status.st_ino] = 0
            self._synced.setdefault(status.st_ino, status.st_size)
            return descriptor

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        with self._lock:
            super().write(descriptor, data, position=position)

    def truncate(self, descriptor: int, size: int) -> None:
        with self._lock:
            super().truncate(descriptor, size)
            number = os.fstat(descriptor).st_ino
            self._synced[number] = min(self._synced.get(number, 0), size)

    def sync(self, descriptor: int) -> None:
        with self._lock:
            if self.fails:
                raise OSError(5, "the power is out")
            status = os.fstat(descriptor)
            self._synced[status.st_ino] = status.st_size

    def sync_folder(self, folder: Path) -> None:
        """Nothing."""

    def remove(self, path: Path) -> None:
        with self._lock:
            super().remove(path)

    def is_synced(self, folder: Path) -> bool:
        """Whether all that was written to the logs of a folder was synced."""
        with self._lock:
            return all(self._unsynced(path) == 0 for path in [*folder.glob("*.log"), *folder.glob("*.segment")])

    def copy_after_kill(self, folder: Path, to: Path) -> None:
        """The folder as a kill of the process leaves it: all that was written."""
        with self._lock:
            _copy(folder, to)

    def copy_after_power_cut(self, folder: Path, to: Path, *, random: Random, whole_in: str) -> None:
        """The folder as a power cut leaves it: all that was synced, and of the rest perhaps torn and damaged bytes.

        In the folder of this name, some of the rest may be whole before that.
        """
        with self._lock:
            _copy(folder, to)
            for path in folder.rglob("*"):
                size_bytes = self._unsynced(path)
                if size_bytes and (to / path.relative_to(folder)).exists():  # else a note got this name since
                    whole_bytes = random.randrange(size_bytes) if path.parent.name == whole_in else 0
                    if path.stat().st_size - size_bytes + whole_bytes < _SECTOR_BYTES:
                        whole_bytes = 0
                    _tear(to / path.relative_to(folder), size_bytes - whole_bytes, random)
            start_anew(to)

    def _unsynced(self, path: Path) -> int:
        """A file's bytes that are not synced; 0 of a folder, and of a note that was renamed since it was listed."""
        with suppress(FileNotFoundError):
            status = path.stat()
            return max(0, status.st_size - self._synced.get(status.st_ino, status.st_size)) if path.is_file() else 0
        return 0


def _copy(folder: Path, to: Path) -> None:
    """Copy a folder. Notes are renamed meanwhile, by threads that write nothing else: one that is gone is left out."""

    def copy_file(source: str, target: str) -> None:
        with suppress(FileNotFoundError):
            shutil.copy2(source, target)

    shutil.copytree(folder, to, copy_function=copy_file)


def start_anew(folder: Path) -> None:
    """Let all notes of a folder be of an earlier start of the machine, as they are after a power cut."""
    for note in folder.rglob("*.proven"):
        end, _, _ = note.read_bytes().partition(b" ")
        note.write_bytes(b"%b an-earlier-start\n" % end)


def _tear(path: Path, size_bytes: int, random: Random) -> None:
    """In place of the last bytes leave nothing, zeros, or what was never written, with no whole record in it.

    Of a file of which nothing was synced, a file system shows nothing or zeros.
    """
    data = path.read_bytes()
    left, tail = data[:-size_bytes], data[-size_bytes:][: random.randint(1, 64)]
    torn = [b"", bytes(len(tail)), *([bytes(one ^ 0xFF for one in tail)] if left else [])]
    path.write_bytes(left + random.choice(torn))
