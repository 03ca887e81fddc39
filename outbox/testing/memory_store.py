"""What the in-memory brokers of one name share in this process: their topics, their clock, an outage."""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from outbox.testing.memory_topics import MemoryLimits, MemoryTopics
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import BrokerError


class MemoryStore:
    """What the brokers of one name share."""

    def __init__(self, *, clock: Clock | None, limits: MemoryLimits | None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.topics: MemoryTopics = MemoryTopics(limits or MemoryLimits())
        self.changed: threading.Condition = threading.Condition()
        self.outage: BrokerError | None = None

    def raise_outage(self) -> None:
        """Raise what the test wants to be raised."""
        if self.outage is not None:
            raise self.outage


_shared: WeakValueDictionary[str, MemoryStore] = WeakValueDictionary()
_sharing = threading.Lock()


def store_named(name: str, *, clock: Clock | None, limits: MemoryLimits | None) -> MemoryStore:
    """The store of this name, made where there is none; without a name one of its own."""
    if not name:
        return MemoryStore(clock=clock, limits=limits)
    with _sharing:
        found = _shared.get(name)
        if found is None:
            found = _shared[name] = MemoryStore(clock=clock, limits=limits)
        return found
