"""A real disk that fails, or ends the process's writing, at a chosen call. Not a disk of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from outbox_broker.log.storage import DiskStorage


class Killed(BaseException):
    """The process ended here. Nothing but the test catches it."""


@dataclass(slots=True)
class _Known:
    path: Path
    synced: bytes
    in_folder: bool


class KillingDisk(DiskStorage):
    """Ends the writing at the `at`-th call, by this `way`; every call after that is refused as well.

    before: instead of the call. half: after half of a write. power: as before, and what was not synced is not there.
    """

    def __init__(self, *, at: int, way: str) -> None:
        self.calls = 0
        self._at = at
        self._way = way
        self._open: dict[int, _Known] = {}
        self._known: dict[int, _Known] = {}  # by inode, which a renamed file keeps
        self._removed: dict[Path, bytes] = {}

    def create(self, path: Path) -> int:
        self._count()
        is_new = not path.exists()
        descriptor = super().create(path)
        inode = os.fstat(descriptor).st_ino
        if is_new or inode not in self._known:
            self._known[inode] = _Known(path, path.read_bytes(), in_folder=not is_new)
        self._open[descriptor] = self._known[inode]
        return descriptor

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        self._count(half=(descriptor, data, position))
        super().write(descriptor, data, position=position)

    def truncate(self, descriptor: int, size: int) -> None:
        self._count()
        super().truncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._count()
        known = self._open[descriptor]
        known.synced = os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def sync_folder(self, folder: Path) -> None:
        self._count()
        for known in self._known.values():
            known.in_folder = True
        self._removed.clear()

    def remove(self, path: Path) -> None:
        self._count()
        if path.exists():
            self._removed[path] = path.read_bytes()
            self._known.pop(path.stat().st_ino, None)
        super().remove(path)

    def _count(self, half: tuple[int, bytes, int] | None = None) -> None:
        self.calls += 1
        if self.calls < self._at:
            return
        if self.calls == self._at:
            if self._way == "half" and half is not None:
                descriptor, data, position = half
                super().write(descriptor, data[: len(data) // 2], position=position)
            if self._way == "power":
                self._cut_power()
        raise Killed

    def _cut_power(self) -> None:
        for folder in {known.path.parent for known in self._known.values()}:
            for path in folder.iterdir():
                known = self._known.get(path.stat().st_ino)
                if known is not None:
                    path.write_bytes(known.synced)
                    if not known.in_folder and path == known.path:
                        path.unlink()
        for path, data in self._removed.items():
            path.write_bytes(data)
