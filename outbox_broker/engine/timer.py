"""Schedules the engine's timed work: dispatch of due messages, wake-ups of waiting pulls, housekeeping.

Two threads: the timer, which must not be delayed, and the housekeeping of the logs and the schedule, whose steps may
take long, and which checks for groups that get nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.redrive_clock import RedriveClock
from outbox_broker.engine.wakeups import Wakeups
from outbox_core.common.errors import OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

WOKEN_AGAIN_MS: Final = 50
"""Pulls waiting for visible messages that nobody fetched are woken again after this time."""


class EngineTimer:
    """The loops of both threads. Due times are wall-clock times; waits are monotonic and short."""

    def __init__(
        self, context: EngineContext, wakeups: Wakeups, dispatcher: Dispatcher, redrive_clock: RedriveClock, *,
        keep_house: Callable[[], None],
    ) -> None:  # fmt: skip
        """`keep_house`: a step of the housekeeping of the logs, which may take long."""
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._state = context.state
        self._wakeups = wakeups
        self._dispatcher = dispatcher
        self._redrive_clock = redrive_clock
        self._keep_house = keep_house
        self._kept = threading.Condition()
        self._is_to_keep = False
        self._threads = [
            threading.Thread(target=self._run_timer, name="broker-timer", daemon=True),
            threading.Thread(target=self._run_keeper, name="broker-keeper", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of each thread that was started, up to `timeout_s`; the context must be closed before."""
        self.wake_keeper()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)

    # -- the timer ---------------------------------------------------------------------------------------------------

    def _run_timer(self) -> None:
        while not self._context.closed:
            failed = True  # so that a full disk is not retried in a tight loop
            try:
                more = self._dispatcher.dispatch_due(until_ended=False)
                if more:
                    continue
                with self._wakeups.changed:
                    woken_to_ms = self._wake_visible()
                    failed = False
                    wait_ms = self.next_wake_ms(woken_to_ms)
                    if wait_ms > 0 and not self._is_closing():
                        self._clock.wait(self._wakeups.changed, wait_ms)
            except OutboxError as error:
                if not self._is_closing():
                    logger.warning("timer_failed", extra={"error": str(error)})
            except Exception:  # the thread boundary: if the timer ended silently, nothing would be dispatched any more
                logger.exception("timer_failed")
            if failed:
                self._rest(self._wakeups.changed)

    def _rest(self, condition: threading.Condition) -> None:
        with condition:
            if not self._is_closing():
                self._clock.wait(condition, self._options.clock_slice_ms)

    def _is_closing(self) -> bool:
        """Returns whether the context was closed; close() sets it from another thread, so it is read anew each time."""
        return self._context.closed

    def next_wake_ms(self, woken_to_ms: int) -> int:
        """Returns how long to sleep, in milliseconds: to the next due or visible time, but at most one slice, after
        which the wall clock is read again; 0 if something is due. Pulls were woken for what was visible at
        `woken_to_ms`: they may have no consumer to fetch it, and are woken again a little later, not at once.
        """
        now_ms = self._clock.now_ms()
        if self._dispatcher.has_taken():
            return 0
        waits = [max(0, self._context.schedule.soonest_ms() - now_ms)]
        for topic, group in self._wakeups.waiters:
            visible_ms = self._visible_ms(topic, group)
            if visible_ms is not None:
                waits.append(max(0, visible_ms - now_ms) if visible_ms > woken_to_ms else WOKEN_AGAIN_MS)
        return min([*waits, self._options.clock_slice_ms])

    def _wake_visible(self) -> int:
        """Wake pulls of groups with visible messages; returns the time up to which messages were considered."""
        now_ms = self._redrive_clock.now_ms()
        for topic, name in list(self._wakeups.waiters):
            next_ms = self._visible_ms(topic, name)
            if next_ms is not None and next_ms <= now_ms:
                self._wakeups.wake_waiters(topic, name)
        return now_ms

    def _visible_ms(self, topic: str, name: str) -> int | None:
        """Returns when a group next has a visible message; None while it is paused: a resume wakes it."""
        group = self._state.group(topic, name)
        if group is None or group.paused:
            return None
        return group.next_visible_ms()

    # -- the keeper --------------------------------------------------------------------------------------------------

    def wake_keeper(self) -> None:
        """Run a step of all housekeeping now."""
        with self._kept:
            self._is_to_keep = True
            self._kept.notify_all()

    def _run_keeper(self) -> None:
        while not self._context.closed:
            more = False
            try:
                self._keep_house()
                more = self._context.schedule.housekeeping.step(self._clock.now_ms())
            except OutboxError as error:
                if not self._is_closing():
                    logger.warning("housekeeping_failed", extra={"error": str(error)})
            except Exception:  # the thread boundary: without this thread memory would fill up
                logger.exception("housekeeping_failed")
            with self._kept:
                if not (more or self._is_to_keep or self._is_closing()):
                    self._clock.wait(self._kept, self._options.clock_slice_ms)
                self._is_to_keep = False
