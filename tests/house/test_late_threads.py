"""Delays of threads: those that were started or woken are late, the main thread never is."""

from __future__ import annotations

import subprocess
import sys
import threading

from tests.fixtures.late_threads import DELAY_SECONDS_MAX, THREAD_SECONDS_MAX, LateThreads

PROGRAM = """
import selectors, socket, threading
from tests.fixtures.late_threads import LateThreads

slept = []
LateThreads(1, sleep=lambda _: slept.append(threading.current_thread().name)).install()
go = threading.Event()

def work():
    go.wait()
    with selectors.DefaultSelector() as selector, socket.socketpair()[0] as one:
        selector.register(one, selectors.EVENT_WRITE)
        for _ in range(100):
            selector.select()

threads = [threading.Thread(target=work, name=f"worker-{number}") for number in range(100)]
for thread in threads:
    thread.start()
go.set()
for thread in threads:
    thread.join()
print(len(set(slept)), "MainThread" in slept)
"""


def test_whatever_thread_is_started_woken_or_has_something_to_read_may_be_late_but_not_the_main_thread() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)

    assert ended.stdout == "100 False\n", ended.stderr


def test_a_thread_is_late_for_a_bounded_time() -> None:
    slept: list[float] = []
    late = LateThreads(1, sleep=slept.append)

    def work() -> None:
        for _ in range(1_000):
            late.delay()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert THREAD_SECONDS_MAX <= sum(slept) < THREAD_SECONDS_MAX + DELAY_SECONDS_MAX
