"""Support for tests of services: recorded publishes, and an in-memory broker. Imports no test framework."""

from outbox.testing.advancing_clock import AdvancingClock
from outbox.testing.capture import capture_published
from outbox.testing.consumer_driver import ConsumerRun, RunReport
from outbox.testing.memory_broker_port import MemoryBroker
from outbox.testing.published import PublishedMessage, PublishedMessages

__all__ = [
    "AdvancingClock",
    "ConsumerRun",
    "MemoryBroker",
    "PublishedMessage",
    "PublishedMessages",
    "RunReport",
    "capture_published",
]
