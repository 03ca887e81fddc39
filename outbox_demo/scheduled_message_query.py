"""Asks a delay service which messages wait in it."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Final
from urllib.parse import quote

from broker_adapter.http.admin_client import AdminClient
from outbox_core import Broker, connect
from outbox_core.common.errors import BrokerUnavailable

TIMEOUT_MS: Final = 10_000


class ScheduledMessageQuery:
    """The messages in the delay service at a URL. Raises BrokerError."""

    def __init__(self, url: str) -> None:
        self._client = AdminClient(url=url, timeout_ms=TIMEOUT_MS)
        self._broker: Broker = connect(url, timeout_ms=TIMEOUT_MS)

    def count(self, topics: Collection[str]) -> int:
        """Returns how many messages of these topics wait."""
        return sum(self._broker.admin.figures(topic)["scheduled"] for topic in topics)

    def find(self, ids: Collection[str]) -> frozenset[str]:
        """Returns those of these messages that wait."""
        return frozenset(message_id for message_id in ids if self._waits(message_id))

    def close(self) -> None:
        """Close the connections."""
        self._broker.close()

    def _waits(self, message_id: str) -> bool:
        status, text = self._client.request("GET", f"/v1/scheduled/{quote(message_id, safe='')}")
        if status not in {HTTPStatus.OK, HTTPStatus.NOT_FOUND}:
            raise BrokerUnavailable(f"{self._client.shown_url} answered {status}: {text[:200]}")
        return status == HTTPStatus.OK
