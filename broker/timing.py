"""The engine's time: what is due gets its place in its topic, what is visible again wakes who waits. Never early."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from broker.core import Core
from broker.delay.schedule import Scheduled
from broker.log.reading import record_at
from messaging import journal
from messaging.errors import OutboxError, StorageFailed

logger = logging.getLogger(__name__)


class Timing(Core):
    """Firing, and the timer thread's loop. Due times are wall-clock times; waits are monotonic and short."""

    def _fire_due(self) -> None:
        """Give what has fallen due its place in its topic, by writing it again, with its sequence, to the message log.

        Never early: the wall clock is asked here, at the last moment. So the message log alone says what stands where,
        and a message that waited for two years holds no old segment back once it is due.
        """
        while True:
            now_ms = self._clock.now_ms()
            due = self._state.schedule.due(
                now_ms, count_max=self._options.fire_batch_max, durable_end=self._messages.durable_end
            )
            if due:
                self._fire(due, now_ms=now_ms)
            if len(due) < self._options.fire_batch_max:
                return

    def _fire(self, due: Sequence[Scheduled], *, now_ms: int) -> None:
        copies = self._copies(due, now_ms=now_ms)
        try:
            if copies:
                self._write_messages(copies)
                # Synced before anybody sees them: a sequence that a power cut forgets may be given to another message,
                # and a receipt of the first would settle the second.
                self._messages.commit()
        except StorageFailed:
            for message in due:
                self._state.schedule.add(message)
            raise
        by_topic: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for copy in copies:
            by_topic[copy.topic].append((copy.sequence or 0, copy.id))
        for topic, entries in by_topic.items():
            self._state.counters["fired", topic, ""] += len(entries)
            self._act(journal.Fired(topic=topic, at_ms=now_ms, entries=entries))
            self._wake_topic(topic)

    def _copies(self, due: Sequence[Scheduled], *, now_ms: int) -> list[journal.MessageRecord]:
        """The records of due messages as they are written again; what is damaged is told, and never delivered."""
        ends: dict[str, int] = {}
        copies: list[journal.MessageRecord] = []
        for message in due:
            record = record_at(self._messages, message.offset)
            if record is None or record.id != message.id:
                logger.error("record_quarantined", extra={"topic": message.topic, "message_id": message.id})
                self._state.counters["quarantined", message.topic, ""] += 1
                continue
            sequence = ends.get(message.topic, self._state.topic(message.topic).index.end)
            ends[message.topic] = sequence + 1
            copies.append(replace(record, sequence=sequence, stored_at_ms=now_ms, copy=journal.FIRED_COPY))
        return copies

    def _run_timer(self) -> None:
        with self._changed:
            while not self._closed:
                wait_ms = self._options.clock_slice_ms  # after a failure too: a full disk is not asked a thousand times
                try:
                    self._fire_due()
                    self._wake_visible()
                    self._keep_house()
                    wait_ms = self._next_wake_ms()
                except OutboxError as error:
                    logger.warning("timer_failed", extra={"error": str(error)})
                except Exception:  # the thread boundary: a timer that ends silently would hold every scheduled message
                    logger.exception("timer_failed")
                self._clock.wait(self._changed, wait_ms)

    def _keep_house(self) -> None:
        """What the timer does besides, now and then. The engine's last part has something to do here."""

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
