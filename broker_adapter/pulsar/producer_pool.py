"""Keeps a Pulsar client for each thread that publishes at the same time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.pulsar.client_settings import ClientSettings
from broker_adapter.pulsar.producer_connection import PulsarConnection
from outbox_core.common.clock import Clock, SystemClock


class PulsarClientPool:
    """Thread-safe and fork-safe."""

    def __init__(self, settings: ClientSettings, *, clock: Clock | None = None) -> None:
        """Does no I/O."""
        self.clock: Clock = clock or SystemClock()
        self._pool = ClientPool(partial(PulsarConnection, settings, clock=self.clock))

    def connection(self) -> AbstractContextManager[PulsarConnection]:
        """A client for the length of a block. One whose block raised is closed, since its state is in doubt."""
        return self._pool.client()

    def close(self) -> None:
        """Close the clients that are free, and those in use as soon as they are given back. Idempotent."""
        self._pool.close()
