"""Lets pulls of a topic sleep until a message is added that they could deliver, or the next one is due."""

from __future__ import annotations

import threading
from typing import Final

from broker_adapter.redis.script_sender import Deadline, ScriptSender
from broker_adapter.redis.timers.slot_scripts import SlotScripts
from broker_adapter.redis.wake_subscription import SLICE_S, WakeSubscription
from outbox_core.common.clock import Clock
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

IDLE_MS: Final = 1_000
"""The longest sleep: what no wake-up tells of, such as a deadline that another consumer's pull made, waits so long."""
POLL_MS: Final = 50
"""The longest sleep without a subscription."""
SUBSCRIBE_AGAIN_MS: Final = 5_000
"""After a subscription failed: a user may lack the right, and a cluster may have no master for a while."""

CLOSE_SECONDS_MAX: Final = 4 * SLICE_S


class TopicWakeup:
    """The wake-ups of one topic, for any number of threads: one of those that wait reads them, for all."""

    def __init__(self, subscription: WakeSubscription, *, closing: threading.Event, clock: Clock) -> None:
        self._subscription = subscription
        self._closing = closing
        self._clock = clock
        self._changed = threading.Condition()
        self._is_read = False
        self._seen = 0
        self._subscribe_at_ms = 0

    @property
    def seen(self) -> int:
        """How many reads ended before their time: by a wake-up, or because one may have been missed. Read it before the
        look that wait() follows.
        """
        with self._changed:
            return self._seen

    def wait(self, seen: int, *, timeout_ms: int) -> bool:
        """Wait for the first wake-up behind `seen`, for IDLE_MS and `timeout_ms` at most. False: it was closed."""
        self._wait(seen, Deadline(self._clock, min(timeout_ms, IDLE_MS)))
        return not self._closing.is_set()

    def close(self) -> None:
        """Close the connection, once nobody reads it: a read of a closed socket fails in ways that the client does not
        name. Idempotent.
        """
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_read, CLOSE_SECONDS_MAX)
            self._subscription.close()

    def _wait(self, seen: int, deadline: Deadline) -> None:
        with self._changed:
            while self._seen == seen and self._is_read and deadline.remaining_s() > 0 and not self._closing.is_set():
                self._changed.wait(deadline.remaining_s())
            if self._seen != seen or self._is_read or deadline.remaining_s() <= 0:
                return
            self._is_read = True
        try:
            self._read(int(deadline.remaining_s() * 1_000))
        finally:
            with self._changed:
                self._is_read = False
                self._seen += deadline.remaining_s() > 0
                self._changed.notify_all()

    def _read(self, timeout_ms: int) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._subscription.is_open or now_ms >= self._subscribe_at_ms:
            if self._subscription.wait_connected(timeout_ms):
                return
            self._subscribe_at_ms = now_ms + SUBSCRIBE_AGAIN_MS
        self._closing.wait(min(timeout_ms, POLL_MS) / 1_000)


class TopicWakeups:
    """Those of all topics that are pulled from. Thread-safe; a forked child subscribes anew."""

    def __init__(self, sender: ScriptSender, scripts: SlotScripts, *, clock: Clock) -> None:
        self._sender = sender
        self._scripts = scripts
        self._clock = clock
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._of_topic: dict[str, TopicWakeup] = {}
        self._of_parents: list[dict[str, TopicWakeup]] = []
        reset_in_children(self)

    def of(self, topic: str) -> TopicWakeup:
        """That of a topic."""
        notice_fork()
        with self._lock:
            if topic not in self._of_topic:
                channel = self._scripts.wake_channel(topic)
                subscription = WakeSubscription(self._sender, channel, closing=self._closing, clock=self._clock)
                self._of_topic[topic] = TopicWakeup(subscription, closing=self._closing, clock=self._clock)
            return self._of_topic[topic]

    def close(self) -> None:
        """Close the connections. Those that wait return. Idempotent."""
        notice_fork()
        self._closing.set()
        with self._lock:
            of_topic = list(self._of_topic.values())
        for wakeup in of_topic:
            wakeup.close()

    def reset_after_fork(self) -> None:
        """Subscribe anew in a forked child. The parent's subscriptions are kept: freeing them would end them."""
        self._lock = threading.Lock()
        self._of_parents.append(self._of_topic)
        self._of_topic = {}
