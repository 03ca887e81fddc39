"""Signals that ask a process to stop, whichever thread gets them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from outbox_core.runtime.stop_signals import StopSignals

SIGNALS = 20
STARTS_THREADS = """
import os, sys, threading
from outbox_core.runtime.stop_signals import StopSignals

def start_threads():
    while True:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()

for _ in range(2):
    threading.Thread(target=start_threads, daemon=True).start()
with StopSignals() as signals:
    print("ready", flush=True)
    for _ in range(int(sys.argv[1])):
        print(signals.wait(), flush=True)
os._exit(0)  # an interpreter that ends beside threads that start others may abort
"""


def test_each_signal_ends_a_wait_also_where_threads_that_start_others_take_them() -> None:
    command = [sys.executable, "-c", STARTS_THREADS, str(SIGNALS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in [signal.SIGTERM, signal.SIGINT] * (SIGNALS // 2):
            process.send_signal(number)
            assert process.stdout.readline() == f"{int(number)}\n"
        assert process.wait(300) == 0


def test_any_thread_may_end_the_wait_and_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals() as signals:
        threading.Timer(0, signals.wake).start()
        assert signals.wait() == 0
        signal.raise_signal(signal.SIGTERM)
        assert signals.wait() == signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
