"""What a test of a service needs of us: what was published, an in-memory broker. It imports no test framework."""

from outbox.testing.advancing_clock import AdvancingClock
from outbox.testing.capture import capture_published
from outbox.testing.consumer_driver import ConsumerRun, RunReport
from outbox.testing.memory_broker import MemoryBroker
from outbox.testing.memory_topics import MemoryLimits
from outbox.testing.published import Published, PublishedMessage

__all__ = [
    "AdvancingClock",
    "ConsumerRun",
    "MemoryBroker",
    "MemoryLimits",
    "Published",
    "PublishedMessage",
    "RunReport",
    "capture_published",
]
