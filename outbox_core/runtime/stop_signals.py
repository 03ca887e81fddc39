"""StopSignals: the wait of a service's main thread for SIGTERM or SIGINT."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, Self

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
AWAKE_EVERY_SECONDS: Final = 0.5
EXIT_BY_SIGNAL: Final = 128
"""The exit code of a process that a signal ended is this plus the signal's number."""


class StopSignals:
    """SIGTERM and SIGINT, which within its block do nothing but end wait(). Main thread only, except for wake()."""

    def __init__(self) -> None:
        # The only kind of queue or event that a signal handler may use: the thread that it interrupts may hold the lock
        # of any other.
        self._received: SimpleQueue[int] = SimpleQueue()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {signal_number: signal.signal(signal_number, self._receive) for signal_number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signal_number, handler in self._before.items():
            signal.signal(signal_number, handler)

    def wait(self) -> int:
        """Wait for a signal, whose number it returns, or for wake(), which is 0."""
        while True:
            # The kernel may give a signal to any thread, for instance to one that starts another thread just then.
            # Python then runs the handler when the main thread next runs, so the main thread may not wait for ever.
            with suppress(Empty):
                return self._received.get(timeout=AWAKE_EVERY_SECONDS)

    def wake(self) -> None:
        """End wait() without a signal, from any thread."""
        self._received.put(0)

    def exit_at_next(self) -> None:
        """Let the next signal end the process at once, which finishes nothing."""
        for signal_number in STOP_SIGNALS:
            signal.signal(signal_number, self._exit)

    def _receive(self, signal_number: int, _frame: FrameType | None) -> None:
        self._received.put(signal_number)

    def _exit(self, signal_number: int, _frame: FrameType | None) -> None:
        os._exit(EXIT_BY_SIGNAL + signal_number)
