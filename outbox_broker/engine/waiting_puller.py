"""Serves pulls that wait for their first message. Selection, and limits on waiting HTTP requests, are elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.puller import PulledMessages, Puller, check_within
from outbox_broker.engine.recent_group_deletions import RecentGroupDeletions
from outbox_broker.engine.wakeups import Wakeups
from outbox_core.messages.limits import INVISIBLE_MS_MAX, INVISIBLE_MS_MIN, PULL_MESSAGES_MAX, PULL_WAIT_MS_MAX
from outbox_core.messages.message import Delivery, check_group, check_topic

Found = TypeVar("Found")


class WaitingPuller:
    """Deliveries for a caller with a thread to block."""

    def __init__(self, context: EngineContext, wakeups: Wakeups, deleted: RecentGroupDeletions, puller: Puller) -> None:
        self._context = context
        self._clock = context.clock
        self._lock = context.lock
        self._wakeups = wakeups
        self._deleted = deleted
        self._puller = puller

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = 30_000,
        consumer: str | None = None,
        begins: bool = False,
    ) -> list[Delivery]:
        """Deliver ready messages, waiting up to `wait_ms` for the first one.

        An unknown group starts at the earliest. Raises GroupDeleted if it is deleted meanwhile.
        """
        check_topic(topic)
        check_group(group)
        check_within("max_messages", max_messages, 1, PULL_MESSAGES_MAX)
        check_within("wait_ms", wait_ms, 0, PULL_WAIT_MS_MAX)
        check_within("invisible_ms", invisible_ms, INVISIBLE_MS_MIN, INVISIBLE_MS_MAX)
        deadline_ms = self._clock.monotonic_ms() + wait_ms
        take = partial(
            self._puller.take, topic, group, max_messages=max_messages, invisible_ms=invisible_ms, consumer=consumer,
            fires=not wait_ms, since=self._deleted.deletions, begins=begins,
        )  # fmt: skip
        handed = take() or self.awaited(topic, group, take, deadline_ms=deadline_ms)
        return [delivery for one in handed or () for delivery in deliveries_of(topic, group, one)]

    def awaited(self, topic: str, group: str, look: Callable[[], Found | None], *, deadline_ms: int) -> Found | None:
        """Returns the result of `look` once it finds something; None, or an empty result, when the time is up."""
        if deadline_ms <= self._clock.monotonic_ms():
            return None
        arrived = threading.Condition()
        woken = False

        def wake() -> None:
            nonlocal woken
            with arrived:
                woken = True
                arrived.notify_all()

        unsubscribe = self._wakeups.subscribe(topic, group, wake)
        with self._lock:
            self._wakeups.pulls_waiting[topic, group] += 1
        try:
            while True:
                woken = False
                found = look()
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if found or left_ms <= 0 or self._context.closed:
                    return found
                with arrived:
                    if not woken:
                        self._clock.wait(arrived, left_ms)
        finally:
            unsubscribe()
            with self._lock:
                self._wakeups.pulls_waiting[topic, group] -= 1
                if not self._wakeups.pulls_waiting[topic, group]:
                    del self._wakeups.pulls_waiting[topic, group]


def deliveries_of(topic: str, group: str, handed: PulledMessages) -> list[Delivery]:
    """Returns the deliveries of a run."""
    attempt = handed.out.attempt
    return [
        Delivery(
            receipt=receipt, id=record.id, topic=topic, body=record.body, key=record.key, headers=record.headers,
            attempt=attempt, created_at_ms=record.created_at_ms, deliver_at_ms=record.deliver_at_ms,
            expired=handed.out.expired,
        )
        for receipt, record in zip(handed.receipts(topic, group), handed.records, strict=True)
    ]  # fmt: skip
