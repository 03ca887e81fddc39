"""What has reached a broker, to the last message. Not a test."""

from __future__ import annotations

from outbox_core import Broker, GroupConfig
from outbox_core.messages.ids import new_message_id

WAIT_MS = 60_000


class Reached:
    """Reads topics with a group of its own, from the time on at which it was made."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._group = new_message_id()

    def from_now_on(self, topic: str) -> None:
        """Pass over what stands on a topic that others use as well."""
        self.broker.admin.declare_group(topic, self._group, GroupConfig(start="latest"))

    def bodies(self, topic: str) -> list[str]:
        """All that is there: ask when whoever sends has been closed."""
        return self._pull(topic, wait_ms=0)

    def wait_for(self, topic: str, count: int) -> list[str]:
        """Wait for so many, then for all that is there besides."""
        found: list[str] = []
        while len(found) < count:
            more = self._pull(topic, wait_ms=WAIT_MS)
            if not more:
                raise TimeoutError(f"{len(found)} of {count} messages have reached the broker: {found}")
            found += more
        return found + self._pull(topic, wait_ms=0)

    def _pull(self, topic: str, *, wait_ms: int) -> list[str]:
        found: list[str] = []
        while deliveries := self.broker.pull(topic, self._group, max_messages=1_000, wait_ms=wait_ms):
            self.broker.ack([one.receipt for one in deliveries])
            found += [one.body.decode() for one in deliveries]
            wait_ms = 0
        return found
