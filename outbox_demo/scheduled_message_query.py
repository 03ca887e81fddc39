"""Asks a delay service which messages wait in it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from broker_adapter.http.admin_client import AdminClient
from outbox_core import Broker, connect

TIMEOUT_MS: Final = 10_000


class ScheduledMessageQuery:
    """The messages in the delay service at a URL. Raises BrokerError."""

    def __init__(self, url: str) -> None:
        self._client = AdminClient(url, timeout_ms=TIMEOUT_MS)
        self._broker: Broker = connect(url, timeout_ms=TIMEOUT_MS)

    def count(self, topics: Collection[str]) -> int:
        """Returns how many messages of these topics wait."""
        return sum(self._broker.admin.figures(topic)["scheduled"] for topic in topics)

    def find(self, ids: Collection[str]) -> frozenset[str]:
        """Returns those of these messages that wait."""
        return frozenset(message_id for message_id in ids if self._client.scheduled_message(message_id) is not None)

    def close(self) -> None:
        """Close the connections."""
        self._broker.close()
