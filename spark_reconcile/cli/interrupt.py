"""Runs a job that calls Spark so that an interrupt can end it.

An interrupt during a call of Java leaves half of an answer unread, and PySpark's own handler begins another call on the
same connection. So the job runs in a thread of its own, and the main thread, which gets the interrupt, only waits.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


class Stop:
    """A request to stop the job, checked between its steps."""

    def __init__(self) -> None:
        self.asked = False  # not an Event, whose lock a signal handler must not take

    def ask(self) -> None:
        """Request that the job stops at its next step."""
        self.asked = True

    def check(self) -> None:
        """Raises KeyboardInterrupt if a stop was requested."""
        if self.asked:
            raise KeyboardInterrupt


def interruptible(job: Callable[[Stop], Result]) -> Result:
    """Returns the job's result. An interrupt cancels Spark's jobs, lets the job clean up, and is raised then.

    A second one ends the process at once. Main thread only: no other thread runs signal handlers.
    """
    stop = Stop()
    reader, writer = socket.socketpair()
    writer.settimeout(0)  # required by set_wakeup_fd

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop.ask()

    with (
        reader,
        writer,
        _sigint(interrupted, wakes=writer),
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="reconcile-run") as pool,
    ):
        running = pool.submit(job, stop)
        running.add_done_callback(lambda _: writer.send(b"\0"))
        while not (stop.asked or running.done()):
            reader.recv(1)
        if stop.asked:
            _cancel_jobs()
            raise KeyboardInterrupt
        return running.result()


@contextmanager
def _sigint(handler: Callable[[int, FrameType | None], None], *, wakes: socket.socket) -> Iterator[None]:
    """Install a handler of SIGINT temporarily, and write a byte to `wakes` for each signal.

    The kernel may interrupt any thread: one that forks takes the process's pending signals (PySpark forks to start
    Java). Then the main thread, which must run the handler, waits on unless a byte wakes it.
    """
    before = signal.signal(signal.SIGINT, handler)
    waked = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(waked)
        signal.signal(signal.SIGINT, before)


def _cancel_jobs() -> None:
    """Cancel the jobs of this process's session, if it has one. With Spark Connect, the step ends by itself.

    The job, whose stop was requested, may be starting or stopping that session, and PySpark raises many errors then.
    What could not be canceled ends at the job's next step.
    """
    from pyspark.sql import SparkSession

    with suppress(Exception):
        SparkSession.active().sparkContext.cancelAllJobs()
