"""Storages that fail, wait or end the process at a chosen call. Not a disk: each one drives a real one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from outbox_broker.log.storage import DiskStorage


class FailingStorage:
    """The real disk, but each call is told to `before` first, which may raise OSError or wait; calls are counted."""

    def __init__(self, *, within: str = "") -> None:
        """`within`: the name of the one folder whose calls are told, counted and failed."""
        self._within = within
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda call: None
        self.room_bytes: int | None = None
        self._disk = DiskStorage()

    def create(self, path: Path) -> int:
        self._note("create", path.parent)
        return self._disk.create(path)

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        concerns = self._note("write", _folder_of(descriptor))
        if concerns and self.room_bytes is not None and len(data) > self.room_bytes:
            self._disk.write(descriptor, data[: self.room_bytes], position=position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._disk.write(descriptor, data, position=position)

    def truncate(self, descriptor: int, size: int) -> None:
        self._note("truncate", _folder_of(descriptor))
        self._disk.truncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._note("sync", _folder_of(descriptor))
        self._disk.sync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self._note(f"sync_folder {folder.name}", folder)
        self._disk.sync_folder(folder)

    def remove(self, path: Path) -> None:
        self._note("remove", path.parent)
        self._disk.remove(path)

    def fail(self, call: str, code: int = errno.EIO) -> None:
        """From now on, this call fails."""

        def before(one: str) -> None:
            if one == call:
                raise OSError(code, os.strerror(code))

        self.before = before

    def mend(self) -> None:
        """From now on, nothing fails."""
        self.before = lambda call: None
        self.room_bytes = None

    def _note(self, call: str, folder: Path) -> bool:
        """Tells and counts a call; returns whether it is one of those that may fail."""
        if self._within not in ("", folder.name):
            return False
        self.calls.append(call)
        self.before(call)
        return True


class HeldSyncs(FailingStorage):
    """Syncs wait from hold() until release(); `waiting` is set once one waits."""

    def __init__(self, *, within: str = "") -> None:
        super().__init__(within=within)
        self.waiting = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self.error: OSError | None = None

    def hold(self) -> None:
        """Let the next syncs wait."""
        self.waiting.clear()
        self._free.clear()

    def release(self, *, error: OSError | None = None) -> None:
        """Let them go on, or fail."""
        self.error = error
        self._free.set()

    def sync(self, descriptor: int) -> None:
        if self._note("sync", _folder_of(descriptor)):
            self.waiting.set()
            if not self._free.wait(120):
                raise TimeoutError("nobody released the sync")
            if self.error is not None:
                raise self.error
        os.fdatasync(descriptor)


def _folder_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink().parent
