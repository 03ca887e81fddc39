"""The epoch of a folder's writer, in a file: incremented with each opening, so that an earlier writer is fenced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from outbox_broker.log.storage import Storage, write_synced

FILE_NAME: Final = "epoch"
_TEXT_BYTES_MAX: Final = 24


class EpochFile:
    """The file in a folder. It is asked with each write and each commit, so its path is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = os.fspath(folder / FILE_NAME)

    def identity(self) -> tuple[int, int] | None:
        """Returns what tells that nobody has written it since: inode and write time, by one system call; None without
        the file. Each call lets go of the interpreter's lock, and a thread at work takes up to 5 ms to give it back.
        """
        try:
            status = os.stat(self._path)  # noqa: PTH116 - a Path is made anew with each call
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def read(self) -> int:
        """Returns the folder's epoch, 0 if it has none or a damaged one: the folder's lock still says who writes.

        With three system calls, where a file object makes eight.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            text = os.read(descriptor, _TEXT_BYTES_MAX).strip()
        finally:
            os.close(descriptor)
        return int(text) if text.isdigit() else 0

    def write(self, epoch: int, storage: Storage) -> None:
        """Write the epoch, durably. Raises OSError."""
        write_synced(self._folder / FILE_NAME, f"{epoch}\n".encode(), storage)
        storage.sync_folder(self._folder)
