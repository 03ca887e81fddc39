"""The fork in C that tests use leaves its child a lock of the interpreter that it can take."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.fixtures.forks import fork_in_c

CHILD_SECONDS_MAX = 60
FORKS = 20


@pytest.mark.processes
@pytest.mark.own_process
def test_a_child_forked_in_c_beside_busy_threads_runs_to_its_end() -> None:
    ended = threading.Event()
    busy = [threading.Thread(target=_work_and_wait, args=(ended,), daemon=True) for _ in range(3)]
    for thread in busy:
        thread.start()
    statuses = []
    for number in range(FORKS):
        _work(seconds=number % 12 / 2_000)  # so that others have waited for up to their switch interval of 5 ms
        statuses.append(_status_of_child())
    ended.set()
    for thread in busy:
        thread.join()
    assert statuses == [0] * FORKS


def _status_of_child() -> int:
    child = fork_in_c()
    if child == 0:
        sum(number for number in range(100_000))
        os._exit(0)
    killer = threading.Timer(CHILD_SECONDS_MAX, os.kill, (child, signal.SIGKILL))
    killer.start()
    _, status = os.waitpid(child, 0)
    killer.cancel()
    return status


def _work_and_wait(ended: threading.Event) -> None:
    while not ended.is_set():
        _work(seconds=0.004)
        ended.wait(0.002)


def _work(*, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
