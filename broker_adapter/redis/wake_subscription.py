"""Waits for messages on a channel of wake-ups, over one connection."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final

from broker_adapter.redis.errors import CLIENT_ERRORS
from broker_adapter.redis.script_sender import Deadline, ScriptSender
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError

SUBSCRIBE_TIMEOUT_MS: Final = 1_000
SLICE_S: Final = 0.25
"""A wait ends so long after a close() at the latest."""


class WakeSubscription:
    """One connection, for one thread. A cluster passes messages on to all nodes, so it is to any of them."""

    def __init__(self, sender: ScriptSender, channel: str, *, closing: threading.Event, clock: Clock) -> None:
        self._sender = sender
        self._channel = channel
        self._closing = closing
        self._clock = clock
        self._subscription: Any = None

    @property
    def is_open(self) -> bool:
        """Whether messages come."""
        return self._subscription is not None

    def wait(self, timeout_ms: int) -> None:
        """Wait for a message or until the time is over, also without a connection."""
        deadline = Deadline(self._clock, timeout_ms)
        if not self.wait_connected(timeout_ms):
            self._closing.wait(max(0.0, deadline.remaining_s()))

    def wait_connected(self, timeout_ms: int) -> bool:
        """Connect if need be, and wait for a message or until the time is over. A subscription that is new returns at
        once: what it is to tell of may have come before it. False, before the time is over, where the connection
        failed.
        """
        deadline = Deadline(self._clock, timeout_ms)
        try:
            if self._subscription is None:
                self._subscribe()
                return True
            while (left_s := deadline.remaining_s()) > 0 and not self._closing.is_set():
                if self._subscription.get_message(ignore_subscribe_messages=True, timeout=min(left_s, SLICE_S)):
                    self._drain()
                    return True
        except (*CLIENT_ERRORS, OutboxError, OSError):
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close the connection. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(*CLIENT_ERRORS, OSError):
                subscription.close()

    def _subscribe(self) -> None:
        deadline = Deadline(self._clock, SUBSCRIBE_TIMEOUT_MS)
        node: Any = self._sender.until_answered(lambda servers: servers.node_of(self._channel), deadline)
        subscription = node.pubsub()
        subscription.subscribe(self._channel)
        self._subscription = subscription

    def _drain(self) -> None:
        while self._subscription.get_message(ignore_subscribe_messages=True, timeout=0):
            pass
