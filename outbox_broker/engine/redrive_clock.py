"""The wall clock as redrives go by it: a step of it, either way, neither stops one nor lets it run ahead of its rate.

A redrive gives each message the time at which it is ready. Where the clock steps, these times move with it, by an
action: so a restart, which knows monotonic time no more, replays the same times.
"""

from __future__ import annotations

from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.log_writer import LogWriter
from outbox_core.common.rate_limit import SECOND_MS
from outbox_core.journal.dead_letter_records import ClockStepped
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

STEP_MS_MIN: Final = SECOND_MS
"""A smaller step is within what a rate promises. Both clocks are not read at the same moment either."""


class RedriveClock:
    """Tells the time, and moves what is redriven by each step since it was asked last. Under the lock."""

    def __init__(self, context: EngineContext, writer: LogWriter) -> None:
        self._clock = context.clock
        self._state = context.state
        self._writer = writer
        self._offset_ms = 0
        """Of the wall clock to monotonic time, up to the last step."""

    def resume(self) -> None:
        """Begin, after the logs are replayed. Of a step since the last action only one to before it is known: time
        passes while a broker is down, and its redrives go on meanwhile.
        """
        now_ms = self._clock.now_ms()
        self._offset_ms = now_ms - self._clock.monotonic_ms()
        if self._state.latest_ms - now_ms >= STEP_MS_MIN:
            self._step(now_ms - self._state.latest_ms, now_ms=now_ms)

    def now_ms(self) -> int:
        """Returns the wall clock's time, by which all that is redriven is at its pace. Raises StorageFailed."""
        now_ms = self._clock.now_ms()
        offset_ms = now_ms - self._clock.monotonic_ms()
        step_ms = offset_ms - self._offset_ms
        if abs(step_ms) >= STEP_MS_MIN:
            self._step(step_ms, now_ms=now_ms)
            self._offset_ms = offset_ms  # not before it is written: else it would never be
        return now_ms

    def paced_ms(self) -> int:
        """Returns the time in which the times of what is redriven are: the wall clock's, without a step that now_ms()
        has not seen yet. Changes nothing.
        """
        return self._clock.monotonic_ms() + self._offset_ms

    def _step(self, by_ms: int, *, now_ms: int) -> None:
        stepped = ClockStepped(at_ms=now_ms, by_ms=by_ms)
        groups = (group for topic in self._state.topics.values() for group in topic.groups.values())
        if any(group.unsettled.redriven for group in groups):
            logger.warning("clock_stepped", extra={"by_ms": by_ms})
            self._writer.act(stepped)
        else:
            self._state.replay_action(stepped)  # the rates alone move, which the record of the next redrive has
