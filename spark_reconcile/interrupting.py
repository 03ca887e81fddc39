"""Runs a job that talks to Spark so that an interrupt can end it. What the job does is not known here.

An interrupt that comes in the middle of a talk with Java leaves half an answer behind, and PySpark's own handler begins
another talk in it. So the job has a thread of its own, and the main thread, which gets the interrupt, only waits.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


class Stop:
    """Whether the job shall end; asked between its steps."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """Let the job end at its next step."""
        self._asked.set()

    def check(self) -> None:
        """Raises KeyboardInterrupt where it was asked for."""
        if self._asked.is_set():
            raise KeyboardInterrupt


def interruptible(job: Callable[[Stop], Result]) -> Result:
    """The job's result. An interrupt cancels what Spark does, lets the job clean up after itself, and is raised then.

    A second one ends the process at once. Main thread only, which alone gets signals.
    """
    stop, told = Stop(), SimpleQueue[str]()

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        told.put("interrupt")  # of all queues and events the one that a signal handler may use

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reconcile-run") as pool:
            running = pool.submit(job, stop)
            running.add_done_callback(lambda _: told.put("end"))
            if told.get() == "interrupt":
                stop.ask()
                _cancel_jobs()
                raise KeyboardInterrupt
            return running.result()
    finally:
        signal.signal(signal.SIGINT, before)


def _cancel_jobs() -> None:
    """Of the session of this process, if it has one. Where Spark is elsewhere (Connect), the step ends by itself.

    The job, which has been asked to end, may be starting or stopping that session just now, and PySpark tells that in
    many ways. What could not be canceled ends at the job's next step.
    """
    from pyspark.sql import SparkSession

    with suppress(Exception):
        SparkSession.active().sparkContext.cancelAllJobs()
