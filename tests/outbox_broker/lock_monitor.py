"""Records in which order threads take the locks of the broker, by the places in the code where these are made."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_PACKAGE = "outbox_broker"


class LockMonitor:
    """Which lock was waited for while which others were held. Locks made at one place in the code are one to it."""

    def __init__(self) -> None:
        self.taken_under: defaultdict[str, set[str]] = defaultdict(set)
        """From a lock to those that a thread held as it waited for it; each by the module and line that made it."""
        self._held = threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch all locks that the broker makes from now on, those of its conditions among them."""
        for name in ("Lock", "RLock"):
            real = getattr(threading, name)
            monkeypatch.setattr(threading, name, lambda real=real: self._made(real()))

    def cycle(self) -> list[str]:
        """Locks that are taken in a circle, which may be a deadlock; empty where there is none."""
        for start in list(self.taken_under):
            path = self._path(start, start, seen=set())
            if path:
                return path
        return []

    def modules_under(self, module: str) -> set[str]:
        """The modules whose locks were held as one of this module's was waited for."""
        found = (before for at, before in self.taken_under.items() if at.startswith(f"{module}:"))
        return {name.partition(":")[0] for names in found for name in names}

    def held(self) -> list[_WatchedLock]:
        """What this thread holds, in order."""
        if not hasattr(self._held, "locks"):
            self._held.locks = []
        found: list[_WatchedLock] = self._held.locks
        return found

    def _path(self, at: str, end: str, *, seen: set[str]) -> list[str]:
        for before in self.taken_under.get(at, ()):
            if before == end:
                return [before, at]
            if before not in seen:
                seen.add(before)
                path = self._path(before, end, seen=seen)
                if path:
                    return [*path, at]
        return []

    def _made(self, lock: Any) -> Any:
        frame = sys._getframe(2)
        while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        return _WatchedLock(lock, f"{path.stem}:{frame.f_lineno}", self) if _PACKAGE in path.parts[:-1] else lock


class _WatchedLock:
    def __init__(self, lock: Any, name: str, monitor: LockMonitor) -> None:
        self._lock = lock
        self.name = name
        self._monitor = monitor

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        held = self._monitor.held()
        if blocking and self not in held:
            self._monitor.taken_under[self.name].update(one.name for one in held)
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            held.append(self)
        return taken

    def release(self) -> None:
        self._lock.release()
        held = self._monitor.held()
        del held[len(held) - 1 - held[::-1].index(self)]

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What a condition asks of a lock that its thread may hold several times, as it waits.

    def _is_owned(self) -> bool:
        return self in self._monitor.held()

    def _release_save(self) -> int:
        count = self._monitor.held().count(self)
        for _ in range(count):
            self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        for _ in range(count):
            self.acquire()
