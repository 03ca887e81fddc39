"""An interrupt that comes while the job stops its session: the interrupt is what is raised, nothing else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from spark_reconcile.cli.interrupt import Stop, interruptible


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("fault", [AttributeError("'NoneType' object has no attribute 'sc'"), OSError("reset")])
def test_a_session_that_is_being_stopped_hides_no_interrupt(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def stopped(_cls: type[SparkSession]) -> SparkSession:
        raise fault

    monkeypatch.setattr(SparkSession, "active", classmethod(stopped))
    cleaned = threading.Event()

    def job(stop: Stop) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                stop.check()
                threading.Event().wait(0.01)
        finally:
            cleaned.set()

    with pytest.raises(KeyboardInterrupt):
        interruptible(job)

    assert cleaned.is_set()


def test_an_interrupt_that_another_thread_is_handed_ends_the_run() -> None:
    """The kernel may interrupt any thread of the process; while the job forks, it is the job's."""
    unasked = threading.Event()

    def job(stop: Stop) -> None:
        threading.Event().wait(0.2)  # until the main thread waits: there is nothing to see of that
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        for _ in range(12_000):
            stop.check()
            threading.Event().wait(0.01)
        unasked.set()

    with pytest.raises(KeyboardInterrupt):
        interruptible(job)

    assert not unasked.is_set(), "the job was not told"
