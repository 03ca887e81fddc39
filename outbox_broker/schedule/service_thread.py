"""A thread that takes turns, and pauses between them for as long as a turn says, or until it is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

PAUSE_MS_MAX: Final = 1_000
"""The longest pause."""


class ServiceThread:
    """Runs `turn`, which returns the milliseconds to pause, until it is stopped. Errors end a turn, not the thread.

    start() and begin_stop() are idempotent; wake() is thread-safe.
    """

    def __init__(self, turn: Callable[[], int], *, name: str, clock: Clock) -> None:
        self._turn = turn
        self._name = name
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wakes = 0
        self._until_ms: int | None = None  # the end of the pause; None while a turn is taken

    def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def begin_stop(self) -> None:
        """Have the thread end after its turn."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, *, timeout_ms: int) -> bool:
        """Wait for the thread's end, up to a deadline; returns whether it has ended, or never begun."""
        if self._thread is None:
            return True
        self._thread.join(timeout_ms / 1000)
        return not self._thread.is_alive()

    def wake(self, *, before_ms: int = 0) -> None:
        """Have a turn taken now if the pause would end after this time of the wall clock; one that is being taken is
        followed by another.
        """
        with self._changed:
            if self._until_ms is None or before_ms < self._until_ms:
                self._wakes += 1
                self._changed.notify_all()

    def _run(self) -> None:
        while not self._stopping:
            wakes, pause_ms = self._wakes, PAUSE_MS_MAX
            try:
                pause_ms = self._turn()
            except OutboxError as error:
                logger.warning("delay_service_failed", extra={"error": str(error)})
            except BaseException:  # the thread boundary: if this thread ended, nothing would be delivered any more
                logger.exception("delay_service_failed")
            with self._changed:
                if pause_ms > 0 and self._wakes == wakes and not self._stopping:
                    self._until_ms = self._clock.now_ms() + pause_ms
                    self._clock.wait(self._changed, pause_ms)
                    self._until_ms = None
