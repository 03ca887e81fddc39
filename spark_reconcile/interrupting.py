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

    A second one ends the process at once.
    """
    stop = Stop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reconcile-run") as pool:
        running = pool.submit(job, stop)
        try:
            return running.result()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            stop.ask()
            _cancel_jobs()
            raise


def _cancel_jobs() -> None:
    """Of the session of this process, if it has one. Where Spark is elsewhere (Connect), the step ends by itself."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    with suppress(PySparkException):  # none is there, or not here
        SparkSession.active().sparkContext.cancelAllJobs()
