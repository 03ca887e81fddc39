"""The capabilities of a broker, as values: its adapter declares them, and the conformance tests check them.

An operation that the adapter does not declare raises NotSupported.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol, runtime_checkable


class Capability(StrEnum):
    """An operation or property that the Broker port offers beyond a durable publish."""

    DEDUPLICATION = "deduplication"
    """A repeat of a topic and id gets `duplicate`, within the broker's window."""
    DELAY = "delay"
    """`deliver_at_ms` up to 731 days ahead, never early."""
    CANCEL = "cancel"
    """A scheduled message is canceled by its id, and the returned status is reliable."""
    PULL = "pull"
    """pull, ack, nack and extend."""
    BROADCAST = "broadcast"
    """A topic is read by offset, without a group (Broadcaster)."""
    ADMIN = "admin"
    """Groups, statistics, dead letters and their redrive (BrokerAdmin)."""


ALL_CAPABILITIES: Final = frozenset(Capability)


@runtime_checkable
class DeclaresCapabilities(Protocol):
    """A Broker that declares its capabilities. One that does not declare any has them all."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Returns the broker's capabilities. Does no I/O."""


def capabilities_of(broker: object) -> frozenset[Capability]:
    """Returns the capabilities of this Broker."""
    return broker.capabilities if isinstance(broker, DeclaresCapabilities) else ALL_CAPABILITIES
