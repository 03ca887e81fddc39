"""Keeps what was read from ZooKeeper until a change is reported. A read that a change overtakes is not kept."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A value that no change was reported for."""

    value: Any


class ZnodeCache:
    """By path, or by children_key() of a path. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, CacheHit] = {}
        self._changes = 0
        self._changed_at: dict[str, int] = {}
        self._all_changed_at = 0

    def get(self, key: str) -> CacheHit | None:
        """Returns the value; None if it must be read."""
        with self._lock:
            return self._values.get(key)

    def begin(self) -> int:
        """Returns the number of changes so far, to pass to put() after a read that begins now."""
        with self._lock:
            return self._changes

    def put(self, key: str, value: Any, *, began: int) -> None:
        """Keep what was read, unless a change was reported since the read began."""
        with self._lock:
            if self._changed_at.pop(key, 0) <= began and self._all_changed_at <= began:
                self._values[key] = CacheHit(value)

    def forget(self, *paths: str) -> None:
        """Forget znodes and their lists of children."""
        with self._lock:
            self._changes += 1
            for path in paths:
                for key in (path, children_key(path)):
                    self._values.pop(key, None)
                    self._changed_at[key] = self._changes

    def forget_all(self) -> None:
        """Forget everything: no change is reported any more for what was read."""
        with self._lock:
            self._changes += 1
            self._all_changed_at = self._changes
            self._changed_at.clear()
            self._values.clear()


def children_key(path: str) -> str:
    """Returns the key of the list of a znode's children."""
    return f"{path}//children"
