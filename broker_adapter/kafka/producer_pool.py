"""Keeps a producer for each thread that publishes at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial

from broker_adapter.kafka.client_settings import producer_settings
from broker_adapter.kafka.producer_connection import ProducerConnection
from broker_adapter.publishing.client_pool import ClientPool
from outbox_core.common.clock import Clock, SystemClock


class ProducerPool:
    """Thread-safe and fork-safe."""

    def __init__(
        self, client: Mapping[str, object], *, timeout_ms: int, place: str, clock: Clock | None = None
    ) -> None:
        """`client`: settings of librdkafka; `timeout_ms`: its own bound of a record's delivery; `place`: the servers'
        addresses, for messages. Does no I/O.
        """
        self.client = client
        self.place = place
        self.clock: Clock = clock or SystemClock()
        settings = producer_settings(client, timeout_ms=timeout_ms)
        self._pool = ClientPool(partial(ProducerConnection, settings, place=place, clock=self.clock))

    def connection(self) -> AbstractContextManager[ProducerConnection]:
        """A producer for the length of a block. One whose block raised is closed, since its state is in doubt."""
        return self._pool.client()

    def close(self) -> None:
        """Close the producers that are free, and those in use as soon as they are given back. Idempotent."""
        self._pool.close()
