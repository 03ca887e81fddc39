"""Locks a data folder for one writer, and refuses nested data folders.
The lock file names its holder; the kernel releases the lock when the holder dies. The owner of an outer data folder
might delete files of an inner one that it does not know.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

PARTS: Final = ("messages", "actions", "schedule")
"""The folders inside a broker's data folder that hold segments."""
SNAPSHOT: Final = "snapshot"
"""The folder inside a data folder that a backup is taken from."""


def refuse_nested(folder: Path) -> None:
    """Raise ConfigurationError if the data folder of a broker or delay service is inside another, or contains one."""
    folder = folder.resolve()
    for above in folder.parents:
        if is_data_folder(above):
            raise ConfigurationError(f"the data folder {folder} is inside another one, {above}; use a folder beside it")
    with suppress(OSError):  # it does not exist yet
        for below in folder.iterdir():
            if below.name not in {*PARTS, SNAPSHOT} and is_data_folder(below):
                raise ConfigurationError(f"the data folder {folder} holds another one, {below}; use a folder beside it")


def is_data_folder(folder: Path) -> bool:
    """Returns whether the folder is, or was, the data folder of a broker or delay service."""
    is_brokers = all(os.path.isdir(folder / part) for part in PARTS)  # noqa: PTH112 - what may not be seen is none
    return is_brokers or all(os.path.isfile(folder / name) for name in ("epoch", "lock"))  # noqa: PTH113


class FolderLock:
    """A lock held from acquire() to release(), or to the end of the process; forked children do not hold it.

    A child that was forked in C keeps the kernel's lock until it takes or releases any of ours: if the parent is killed
    before that, the folder is in use until the child ends.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises ConfigurationError, which names the holder."""
        notice_fork()  # a child would find the folder held by the lock that it shares with its parent, and none else
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigurationError(
                f"the data folder {self._path.parent} is in use by {holder}; stop it, or use another folder"
            ) from error
        note = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        with suppress(OSError):  # on a full disk the lock is held, even if its file cannot name the holder
            os.pwrite(descriptor, note, 0)  # overwritten in place: a full disk may not give the old note's block back
            os.ftruncate(descriptor, len(note))
        self._descriptor = descriptor
        reset_in_children(self)

    def release(self) -> None:
        """Release the lock; idempotent."""
        notice_fork()  # a child shares the parent's lock in the kernel, and would release that
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that is just being forked has the descriptor, too
            os.close(descriptor)

    def reset_after_fork(self) -> None:
        """Let go of the lock in a forked child, without releasing it: it is the parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
