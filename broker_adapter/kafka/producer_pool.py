"""ProducerPool: a producer for each thread that publishes at the same time, in each process its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping

from broker_adapter.kafka.client_settings import producer_settings
from broker_adapter.kafka.producer_connection import ProducerConnection
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import ConfigurationError


class ProducerPool:
    """Thread-safe and fork-safe. Makes a producer where none is free, and keeps those whose work ended well."""

    def __init__(
        self, client: Mapping[str, object], *, timeout_ms: int, place: str, clock: Clock | None = None
    ) -> None:
        """`client`: settings of librdkafka; `timeout_ms`: its own bound of a record's delivery; `place`: the servers'
        addresses, for messages. Does no I/O.
        """
        self.client = client
        self.place = place
        self.clock = clock or SystemClock()
        self._settings = producer_settings(client, timeout_ms=timeout_ms)
        self._lock = threading.Lock()
        self._free: list[ProducerConnection] = []
        self._open: set[ProducerConnection] = set()
        self._closed = False
        self._watches_forks = False

    @contextlib.contextmanager
    def connection(self) -> Iterator[ProducerConnection]:
        """A producer for the length of a block. One whose block raised is closed, since its state is in doubt."""
        connection = self._take()
        try:
            yield connection
        except BaseException:
            self._end(connection)
            raise
        self._give_back(connection)

    def close(self) -> None:
        """Close the producers that are free, and those in use as soon as they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for connection in free:
            self._end(connection)

    def reset_after_fork(self) -> None:
        """In a child: leave the parent's producers alone. Their threads are not here, and to destroy them would wait
        for those for ever, so they are never freed.
        """
        for connection in self._open:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection.handle))
        self._lock = threading.Lock()
        self._free, self._open = [], set()

    def _take(self) -> ProducerConnection:
        with self._lock:
            if self._closed:
                raise ConfigurationError("this broker was closed; connect again")
            if self._free:
                return self._free.pop()
            if not self._watches_forks:
                os.register_at_fork(after_in_child=_reset(weakref.ref(self)))
                self._watches_forks = True
            connection = ProducerConnection(self._settings, place=self.place, clock=self.clock)
            self._open.add(connection)
            return connection

    def _give_back(self, connection: ProducerConnection) -> None:
        with self._lock:
            keep = not self._closed
            if keep:
                self._free.append(connection)
        if not keep:
            self._end(connection)

    def _end(self, connection: ProducerConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)


def _reset(pool: weakref.ref[ProducerPool]) -> Callable[[], None]:
    def reset() -> None:
        found = pool()
        if found is not None:
            found.reset_after_fork()

    return reset
