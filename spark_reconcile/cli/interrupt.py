"""Runs a job that talks to Spark so that an interrupt can end it. What the job does is not known here.

An interrupt that comes in the middle of a talk with Java leaves half an answer behind, and PySpark's own handler begins
another talk in it. So the job has a thread of its own, and the main thread, which gets the interrupt, only waits.
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
    """Whether the job shall end; asked between its steps."""

    def __init__(self) -> None:
        self.asked = False  # not an Event, whose lock a signal handler must not take

    def ask(self) -> None:
        """Let the job end at its next step."""
        self.asked = True

    def check(self) -> None:
        """Raises KeyboardInterrupt where it was asked for."""
        if self.asked:
            raise KeyboardInterrupt


def interruptible(job: Callable[[Stop], Result]) -> Result:
    """The job's result. An interrupt cancels what Spark does, lets the job clean up after itself, and is raised then.

    A second one ends the process at once. Main thread only, which alone runs the handlers of signals.
    """
    stop = Stop()
    reader, writer = socket.socketpair()
    writer.settimeout(0)  # as set_wakeup_fd wants it

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
    """The handler of SIGINT, for a while, and a byte into `wakes` for each signal.

    Any thread may be the one that the kernel interrupts: a fork takes what is pending for the process (PySpark forks
    to start Java). Then the main thread, which is to run the handler, goes on waiting unless a byte wakes it.
    """
    before = signal.signal(signal.SIGINT, handler)
    waked = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(waked)
        signal.signal(signal.SIGINT, before)


def _cancel_jobs() -> None:
    """Of the session of this process, if it has one. Where Spark is elsewhere (Connect), the step ends by itself.

    The job, which has been asked to end, may be starting or stopping that session just now, and PySpark tells that in
    many ways. What could not be canceled ends at the job's next step.
    """
    from pyspark.sql import SparkSession

    with suppress(Exception):
        SparkSession.active().sparkContext.cancelAllJobs()
