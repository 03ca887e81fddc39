"""ReloadSignal: SIGHUP as a request to read files again, also while a process starts; or the end of its terminal."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, Self

from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

TERMINAL: Final = "/dev/tty"
_GONE: Final = frozenset({errno.ENXIO, errno.EIO})
_JOIN_SECONDS: Final = 10
_END: Final = 0


class ReloadSignal:
    """Within its block each SIGHUP calls what start() got, in a thread, also if it came before. Main thread only.

    A process gets SIGHUP as well when its terminal closes. Then it ends by the signal, as it would without this class,
    unless it was started to ignore it (nohup). A thread, since the files may be on a slow disk.
    """

    def __init__(self) -> None:
        # The only kind of queue that a signal handler may use, see StopSignals.
        self._received: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._before: Any = None
        self._ends_with_terminal = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGHUP, self._receive)
        self._ends_with_terminal = self._before is not signal.SIG_IGN and not _is_terminal_gone()
        return self

    def __exit__(self, *_: object) -> None:
        self._received.put(_END)
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        signal.signal(signal.SIGHUP, self._before)

    def start(
        self, reload: Callable[[], None], *, look: Callable[[], None] | None = None, every_s: float | None = None
    ) -> None:
        """Call `reload` for each signal from now on, and for those received already; and `look`, which itself decides
        whether there is something to do, whenever none came for `every_s`.
        """
        acts = (reload, look or reload, every_s)
        self._thread = threading.Thread(target=self._run, args=acts, name="reload", daemon=True)
        self._thread.start()

    def _receive(self, signal_number: int, _frame: FrameType | None) -> None:
        # The kernel takes the terminal from the process before it sends the signal of the hangup.
        if self._ends_with_terminal and _is_terminal_gone():
            signal.signal(signal_number, signal.SIG_DFL)
            signal.raise_signal(signal_number)
        self._received.put(signal_number)

    def _run(self, reload: Callable[[], None], look: Callable[[], None], every_s: float | None) -> None:
        while True:
            try:
                act = None if self._received.get(timeout=every_s) == _END else reload
            except Empty:
                act = look
            if act is None:
                return
            try:
                act()
            except Exception:  # the boundary of a thread: whatever it is, the process goes on with what it has
                logger.exception("reload_failed")


def _is_terminal_gone() -> bool:
    """Returns whether the process has no controlling terminal; False where that cannot be known."""
    try:
        terminal = os.open(TERMINAL, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        return error.errno in _GONE
    with suppress(OSError):
        os.close(terminal)
    return False
