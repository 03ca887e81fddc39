"""A port for the system calls that durability depends on, so that tests can fail or kill at each of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Storage(Protocol):
    """Writes and syncs of one process. Each raises OSError like the system call; a failed sync guarantees nothing."""

    def create(self, path: Path) -> int:
        """Open a new or existing file for reading and writing; returns its descriptor."""

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        """Write all of `data` at `position`, or raise."""

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut the file to `size` bytes."""

    def sync(self, descriptor: int) -> None:
        """Return once the file's data is on disk."""

    def sync_folder(self, folder: Path) -> None:
        """Return once the folder's entries are on disk."""

    def remove(self, path: Path) -> None:
        """Remove a file if it exists."""


class DiskStorage:
    """The operating system's files."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, position)
            position += written
            view = view[written:]

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


class UnsyncedStorage:
    """Skips syncs, leaving them to the operating system: durability `os`. `disk` has them."""

    def __init__(self, storage: Storage) -> None:
        self.disk = storage
        self.create, self.write = storage.create, storage.write
        self.truncate, self.remove = storage.truncate, storage.remove

    def sync(self, descriptor: int) -> None:
        """Does nothing."""

    def sync_folder(self, folder: Path) -> None:
        """Does nothing."""


def write_synced(path: Path, data: bytes, storage: Storage) -> None:
    """Write a file aside, sync it, and rename it to its place, so that a power failure leaves the old or the new one.
    The folder is the caller's to sync. Raises OSError.
    """
    aside = path.with_name(f"{path.name}.new")
    descriptor = storage.create(aside)
    try:
        storage.truncate(descriptor, 0)  # it may be one that a process left which was killed
        storage.write(descriptor, data, position=0)
        storage.sync(descriptor)
    finally:
        os.close(descriptor)
    aside.replace(path)
