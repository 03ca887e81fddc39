"""The engine's time: what is due gets its place in its topic, what is visible again wakes who waits. Never early."""

from __future__ import annotations

import logging
from collections import defaultdict

from broker.core import Core
from messaging import journal
from messaging.errors import OutboxError

logger = logging.getLogger(__name__)


class Timing(Core):
    """Firing, and the timer thread's loop. Due times are wall-clock times; waits are monotonic and short."""

    def _fire_due(self) -> None:
        """Give what has fallen due its place in its topic.

        Never early: the wall clock is asked here, at the last moment.
        """
        while True:
            now_ms = self._clock.now_ms()
            due = self._state.schedule.due(
                now_ms, count_max=self._options.fire_batch_max, durable_end=self._messages.durable_end
            )
            by_topic: defaultdict[str, list[str]] = defaultdict(list)
            for message in due:
                self._state.schedule.add(message)  # replaying the action below takes it out again
                by_topic[message.topic].append(message.id)
            for topic, ids in by_topic.items():
                start = len(self._state.topic(topic).index)
                self._act(journal.Fired(topic=topic, at_ms=now_ms, entries=list(enumerate(ids, start))))
                self._state.counters["fired", topic, ""] += len(ids)
            if by_topic:
                # Synced before anybody sees them: a sequence that a power cut forgets may be given to another message,
                # and a receipt of the first would settle the second.
                self._actions.commit()
            for topic in by_topic:
                self._wake_topic(topic)
            if len(due) < self._options.fire_batch_max:
                return

    def _run_timer(self) -> None:
        with self._changed:
            while not self._closed:
                wait_ms = self._options.clock_slice_ms  # after a failure too: a full disk is not asked a thousand times
                try:
                    self._fire_due()
                    self._wake_visible()
                    wait_ms = self._next_wake_ms()
                except OutboxError as error:
                    logger.warning("timer_failed", extra={"error": str(error)})
                except Exception:  # the thread boundary: a timer that ends silently would hold every scheduled message
                    logger.exception("timer_failed")
                self._clock.wait(self._changed, wait_ms)

    def _next_wake_ms(self) -> int:
        """How long to sleep: to the next due or visible time, but at most one slice, after which the wall clock
        is read anew.
        """
        times = [self._state.schedule.next_due_ms(), *(self._visible_ms(*place) for place in self._waiters)]
        now_ms = self._clock.now_ms()
        waits = [time_ms - now_ms for time_ms in times if time_ms is not None]
        return min(max(1, min(waits, default=self._options.clock_slice_ms)), self._options.clock_slice_ms)

    def _wake_visible(self) -> None:
        now_ms = self._clock.now_ms()
        for topic, name in list(self._waiters):
            next_ms = self._visible_ms(topic, name)
            if next_ms is not None and next_ms <= now_ms:
                self._wake(topic, name)

    def _visible_ms(self, topic: str, name: str) -> int | None:
        """When a group next has something visible again; never while it is paused: a resume wakes it."""
        group = self._state.group(topic, name)
        return None if group is None or group.paused else group.next_visible_ms()
