"""Keeps the one connection of a process: opened on demand, and again after it was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from random import Random

import pika

from broker_adapter.rabbitmq.connection import RabbitMqConnection
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.process_fork import notice_fork, reset_in_children


class ProcessConnection:
    """Thread-safe. A forked child gets a connection of its own, and leaves its parent's alone."""

    def __init__(self, servers: Sequence[pika.ConnectionParameters], *, random: Random | None = None) -> None:
        self._servers = servers
        self._random = random or Random()
        self._lock = threading.Lock()
        self._connection: RabbitMqConnection | None = None
        self._of_parents: list[RabbitMqConnection] = []
        self._is_closed = False
        reset_in_children(self)

    def opened(self, *, timeout_s: float) -> RabbitMqConnection:
        """The connection, to any of the servers, tried in random order.

        Raises exceptions of the client, TimeoutError, and ConfigurationError once closed.
        """
        notice_fork()
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(timeout_s, 0)):
            raise TimeoutError("no connection in time")
        try:
            if self._is_closed:
                raise ConfigurationError("this broker was closed; connect again")
            if self._connection is None or not self._connection.is_open:
                self._connection = None
                servers = self._random.sample(self._servers, len(self._servers))
                self._connection = RabbitMqConnection.open(servers, timeout_s=deadline - time.monotonic())
            return self._connection
        finally:
            self._lock.release()

    def drop(self, connection: RabbitMqConnection) -> None:
        """Close one whose state is in doubt."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
        connection.close()

    def close(self) -> None:
        """End the connection of this process. Idempotent."""
        notice_fork()
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def reset_after_fork(self) -> None:
        """Start without a thread in a forked child. The parent's connection is kept, so that nothing closes it."""
        self._lock = threading.Lock()
        if self._connection is not None:
            self._of_parents.append(self._connection)
            self._connection = None
