"""Reserves disk space for consuming what is already stored: a file that is released by halves when the disk is full.
Without it a broker that cannot write down an acknowledgement could not drop anything either, and no space came free.

Publishes are accepted only while both halves are held, so that they cannot use up the reserved space. Messages that
become due are written to the message log while at least one half is held: a million messages becoming due must leave
space for their acknowledgements. Acknowledgements and other small writes that free space in the end may use both
halves. Released halves are acquired again as soon as there is space. A quota shows only in a failed write, not in the
space that the file system reports.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from outbox_core.common.errors import StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)
T = TypeVar("T")

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that mean the disk or the quota is full."""
TOO_MANY_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors that mean this process or the system has too many open files."""
_BOTH: Final = 2
_ROOM_PART: Final = 16
"""The disk counts as full if its free space is below this fraction (1/16) of the reserve."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The file system of a data folder: what this process may still use of it, and its size."""

    free_bytes: int
    total_bytes: int


class Reserve:
    """One file in the data folder. Thread-safe."""

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        """`size_bytes` 0 disables the reserve."""
        self._path = path
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._halves = 0

    @property
    def held_bytes(self) -> int:
        """Returns how many bytes are reserved now."""
        return self.size_bytes * self._halves // _BOTH

    def release(self) -> None:
        """Release what an earlier process reserved, so that a broker can start on a full disk; idempotent."""
        with self._lock:
            self._halves = 0
            self._path.unlink(missing_ok=True)

    def take(self) -> None:
        """Acquire as much of the reserve as there is space for: called after opening, and then periodically."""
        if not self.is_whole():
            with suppress(StorageFailed):
                self.require(1)

    def is_whole(self) -> bool:
        """Returns whether both halves are held, or can be acquired now."""
        return not is_refused(self.require)

    def has_room_beside(self) -> bool:
        """Returns whether there is space for publishes outside the reserve."""
        return not is_refused(self.check_room)

    def check_room(self) -> None:
        """Raise StorageFailed if publishes are refused, or if almost no space is left outside the reserve."""
        self.require()
        if self.size_bytes and self.disk_space().free_bytes < self.size_bytes // _ROOM_PART:
            raise _refused(_no_space())

    def disk_space(self) -> DiskSpace:
        """Returns the space of the disk. Root may also use the blocks that are reserved for root."""
        system = os.statvfs(self._path.parent)
        free_blocks = system.f_bavail if os.geteuid() else system.f_bfree
        return DiskSpace(system.f_frsize * free_blocks, system.f_frsize * system.f_blocks)

    def disk_figures(self) -> Mapping[str, int]:
        """Returns the space of the disk as figures, by their names."""
        disk = self.disk_space()
        return {"disk_free_bytes": disk.free_bytes, "disk_size_bytes": disk.total_bytes}

    def require(self, halves: int = _BOTH) -> None:
        """Acquire the given number of halves unless they are held. Raises StorageFailed with the system's error.

        Nothing is allocated if the disk has less free space than needed, so that no other process sees a full disk
        meanwhile.
        """
        with self._lock:
            if self._halves >= halves or not self.size_bytes:
                return
            try:
                self._take(halves)
            except OSError as error:
                raise _refused(error) from error

    def make_room(self, size_bytes: int, *, spends: bool) -> None:
        """Raise StorageFailed unless the disk has room for a write of this size; if it `spends`, release as many halves
        as are needed for that, and none if that is not enough.
        """
        with self._lock:
            free_bytes = self.disk_space().free_bytes
            if free_bytes >= size_bytes:
                return
            if not spends or free_bytes + self.held_bytes < size_bytes:
                raise StorageFailed(f"{os.strerror(errno.ENOSPC)}: {size_bytes} bytes are needed") from _no_space()
        while self.disk_space().free_bytes < size_bytes and self._let_half_go(keep=0):
            pass

    def spend(self, write: Callable[[], T], *, keep_half: bool = False) -> T:
        """Run a write that needs little space; if the disk is full, release halves of the reserve and retry.

        Raises StorageFailed if the write still fails.
        """
        if keep_half:
            self.require(1)
        while True:
            try:
                return write()
            except StorageFailed as error:
                if not is_disk_full(error) or not self._let_half_go(keep=1 if keep_half else 0):
                    raise

    def _take(self, halves: int) -> None:
        wanted_bytes = self.size_bytes * halves // _BOTH
        if self.disk_space().free_bytes < wanted_bytes - self.held_bytes:
            raise _no_space()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, wanted_bytes)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, self.held_bytes)
            raise
        finally:
            os.close(descriptor)
        self._halves = halves

    def _let_half_go(self, *, keep: int) -> bool:
        """Release one half unless only `keep` halves are left; returns whether it did."""
        with self._lock:
            if self._halves <= keep or not self.size_bytes:
                return False
            self._halves -= 1
            if self._halves:
                os.truncate(self._path, self.held_bytes)
            else:
                self._path.unlink(missing_ok=True)
            logger.error("disk_full_reserve_used", extra={"bytes": self.size_bytes, "left_bytes": self.held_bytes})
            return True


def _no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refused(error: OSError) -> StorageFailed:
    return StorageFailed(
        f"{error.strerror}: the room that is left is for what is stored to be consumed; {cure_for(error)}, and "
        "publishes are taken again"
    )


def is_refused(check: Callable[[], None]) -> bool:
    """Returns whether a check of room raises StorageFailed."""
    try:
        check()
    except StorageFailed:
        return True
    return False


def cure_for(error: OSError) -> str:
    """Returns what an operator can do about a write that failed."""
    if error.errno in FULL:
        return "free some disk space"
    if error.errno in TOO_MANY_FILES:
        return "allow the process more open files (ulimit -n)"
    return "look after the disk and the folder's permissions"


def is_disk_full(error: StorageFailed) -> bool:
    """Returns whether a write failed because the disk is full."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL


def may_pass(error: StorageFailed) -> bool:
    """Returns whether a write failed for lack of space or file descriptors: transient, and nothing was written."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in FULL | TOO_MANY_FILES
