"""Receives what compensators sent to a broker, however long a loaded machine takes to start them. Not a fixture."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from outbox_core import Broker, Delivery

WAIT_SECONDS = 300
PULL_MS = 30_000
INVISIBLE_MS = 600_000


def pull_some(broker: Broker, *, max_messages: int = 500) -> Sequence[Delivery]:
    """Pull from `topic` for `group` until at least one message comes."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        found = broker.pull("topic", "group", max_messages=max_messages, wait_ms=PULL_MS, invisible_ms=INVISIBLE_MS)
        if found:
            return found
    pytest.fail(f"no message came in {WAIT_SECONDS} s")
