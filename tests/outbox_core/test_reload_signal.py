"""SIGHUP as a request to read files again, and as the end of a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from outbox_core.runtime.reload_signal import ReloadSignal

DEADLINE_S = 120.0
SERVES = """
import os, signal, sys
from outbox_core.runtime.reload_signal import ReloadSignal
from outbox_core.runtime.stop_signals import StopSignals

terminal, ignores = sys.argv[1:]
if terminal:
    os.open(terminal, os.O_RDWR)  # becomes the terminal of this session, which has none
# Not what the tests were started with, which may be nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)
with ReloadSignal() as reloads, StopSignals() as signals:
    reloads.start(lambda: print("reloaded", flush=True))
    print("ready", flush=True)
    signals.wait()
"""


@contextmanager
def serving(*, terminal: str = "", ignores: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own that reloads."""
    command = [sys.executable, "-c", SERVES, terminal, "1" if ignores else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert said(process) == "ready"
            yield process
        finally:
            process.kill()


@pytest.fixture
def terminal() -> Iterator[tuple[IO[bytes], str]]:
    """A terminal, to be closed, and its name for a process."""
    own, theirs = pty.openpty()
    name = os.ttyname(theirs)
    os.close(theirs)
    with os.fdopen(own, "rb", buffering=0) as window:
        yield window, name


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_each_sighup_reloads_and_the_process_goes_on() -> None:
    with serving() as process:
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
            assert said(process) == "reloaded"
        process.send_signal(signal.SIGTERM)

        assert process.wait(DEADLINE_S) == 0


def test_a_process_reloads_as_long_as_its_terminal_is_there_and_ends_with_it(terminal: tuple[IO[bytes], str]) -> None:
    window, name = terminal
    with serving(terminal=name) as process:
        process.send_signal(signal.SIGHUP)
        assert said(process) == "reloaded"

        window.close()

        assert process.wait(DEADLINE_S) == -signal.SIGHUP


def test_a_process_that_ignored_the_hangup_outlives_its_terminal_and_reloads(terminal: tuple[IO[bytes], str]) -> None:
    window, name = terminal
    with serving(terminal=name, ignores=True) as process:
        window.close()
        assert said(process) == "reloaded", "at the hangup"
        process.send_signal(signal.SIGHUP)
        assert said(process) == "reloaded"
        process.send_signal(signal.SIGTERM)

        assert process.wait(DEADLINE_S) == 0


def test_a_signal_before_the_start_is_not_lost_and_a_failure_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGHUP)
    reloads: list[int] = []

    def reload() -> None:
        reloads.append(len(reloads))
        if reloads == [0]:
            raise RuntimeError("the first one")

    with ReloadSignal() as signals:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        signals.start(reload)

    assert reloads == [0, 1]
    assert [record.getMessage() for record in caplog.records] == ["reload_failed"]
    assert signal.getsignal(signal.SIGHUP) == before
