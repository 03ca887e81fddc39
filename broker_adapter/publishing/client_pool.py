"""Keeps an engine's client for each thread that publishes at the same time; each process has its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.process_fork import notice_fork, reset_in_children


class PooledClient(Protocol):
    """A client that has threads of its own. Used by one thread at a time."""

    def close(self) -> None:
        """Drop what is queued, and end the connections and threads."""

    def leave_to_parent(self) -> None:
        """Never free the client in a forked child: that would wait for threads that are not there."""


C = TypeVar("C", bound=PooledClient)


class ClientPool(Generic[C]):
    """Thread-safe and fork-safe. Makes a client where none is free, and keeps those whose work ended well."""

    def __init__(self, make: Callable[[], C]) -> None:
        """Does no I/O."""
        self._make = make
        self._lock = threading.Lock()
        self._free: list[C] = []
        self._open: set[C] = set()
        self._closed = False
        self._watches_forks = False

    @contextlib.contextmanager
    def client(self) -> Iterator[C]:
        """A client for the length of a block. One whose block raised is closed, since its state is in doubt."""
        client = self._take()
        try:
            yield client
        except BaseException:
            self._end(client)
            raise
        self._give_back(client)

    def close(self) -> None:
        """Close the clients that are free, and those in use as soon as they are given back. Idempotent."""
        notice_fork()
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for client in free:
            self._end(client)

    def reset_after_fork(self) -> None:
        """Leave the parent's clients alone in a forked child."""
        for client in self._open:
            client.leave_to_parent()
        self._lock = threading.Lock()
        self._free, self._open = [], set()

    def _take(self) -> C:
        notice_fork()
        with self._lock:
            if self._closed:
                raise ConfigurationError("this broker was closed; connect again")
            if self._free:
                return self._free.pop()
            if not self._watches_forks:
                reset_in_children(self)
                self._watches_forks = True
            client = self._make()
            self._open.add(client)
            return client

    def _give_back(self, client: C) -> None:
        with self._lock:
            keep = not self._closed
            if keep:
                self._free.append(client)
        if not keep:
            self._end(client)

    def _end(self, client: C) -> None:
        client.close()
        with self._lock:
            self._open.discard(client)
