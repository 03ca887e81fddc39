"""The in-memory broker's interface for tests: a Broker that can be cleared and put out of service. The adapter of the
URL scheme `memory` implements it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, cast, runtime_checkable

from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect


@runtime_checkable
class OutageControl(Protocol):
    """The test controls of a broker, which also identify a broker as one for tests."""

    def clear(self) -> None:
        """Delete all messages, topics, groups and ids."""

    def out_of_service(self, error: BrokerError | None = None) -> AbstractContextManager[None]:
        """Make every call inside the block raise this error, BrokerUnavailable by default; stored messages stay."""


class MemoryBroker(Broker, OutageControl, Protocol):
    """The type of `connect("memory:")`, for annotations: a Broker with its clock, `clear()` and `out_of_service()`."""

    @property
    def clock(self) -> Clock:
        """Returns the broker's clock."""


def open_memory_broker(url: str = "memory:", *, clock: Clock | None = None) -> MemoryBroker:
    """Returns the in-memory broker of a URL. Raises ConfigurationError if the extra `testing` is not installed."""
    return cast("MemoryBroker", connect(url, clock=clock))
