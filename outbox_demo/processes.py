"""Starts, checks, awaits and kills the demo's processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from outbox_core.common.errors import OutboxError

STOP_SECONDS: Final = 30
WAIT_SECONDS_MAX: Final = 600.0
_TICK_SECONDS: Final = 0.2
_LAST_LINES: Final = 15


class ProcessFailed(OutboxError):
    """A process of the demo ended unexpectedly."""


class Timeout(OutboxError):
    """An awaited event did not happen in time; see the logs in the demo's folder."""


class Process:
    """One child process. Its stderr goes to a log file of its own, and so does its stdout unless it is read."""

    def __init__(
        self, name: str, command: Sequence[str], *, folder: Path, has_lines: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`has_lines`: its stdout can be read line by line. `environment`: what it has besides ours."""
        self.name = name
        self._is_killed = False
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules, and servers that the user installed
                command,
                stdout=subprocess.PIPE if has_lines else log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def lines(self) -> IO[str]:
        """Its standard output."""
        if self._process.stdout is None:
            raise ProcessFailed(f"{self.name} has no output")
        return self._process.stdout

    def has_line(self) -> bool:
        """Wait a moment; returns whether its standard output can be read, or has ended."""
        return bool(select.select([self.lines], [], [], _TICK_SECONDS)[0])

    def kill(self) -> None:
        """Send SIGKILL: the process cannot flush or clean up."""
        self._is_killed = True
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
        self._close()

    def pause(self) -> None:
        """Send SIGSTOP: it does nothing, and its connections stay."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if the process does not end; idempotent."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_SECONDS)
        self._close()

    def wait(self) -> None:
        """Wait for its end. Raises ProcessFailed where that is an error, Timeout where it does not come."""
        try:
            self._process.wait(WAIT_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise Timeout(f"{self.name} did not end within {WAIT_SECONDS_MAX:.0f} s") from None
        self.check()

    def check(self) -> None:
        """Raise ProcessFailed, with the end of its log, if it ended with an error and was not killed."""
        status = self._process.poll()
        if status not in {None, 0} and not self._is_killed:
            tail = "\n  ".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise ProcessFailed(f"{self.name} ended with status {status}; its last words:\n  {tail}")

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()


class ProcessGroup:
    """The processes of one run in one folder, and the wait for what they bring about."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[Process] = []

    def start(self, name: str, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Process:
        """Run a module with arguments, as `python -m` does; its stdout can be read."""
        command = [sys.executable, "-m", *arguments]
        return self._add(Process(name, command, folder=self._folder, has_lines=True, environment=environment))

    def start_program(self, name: str, command: Sequence[str]) -> Process:
        """Run another program, whose stdout goes to its log."""
        return self._add(Process(name, command, folder=self._folder, has_lines=False))

    def wait_for(self, awaited: str, done: Callable[[], bool]) -> None:
        """Wait for what a process does. Raises Timeout, and ProcessFailed where one ended with an error."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not done():
            if time.monotonic() > deadline:
                raise Timeout(f"waited {WAIT_SECONDS_MAX:.0f} s for {awaited}; see the logs in {self._folder}")
            for process in self._processes:
                process.check()
            threading.Event().wait(_TICK_SECONDS)

    def stop(self) -> None:
        """Stop all, the newest first; idempotent."""
        for process in reversed(self._processes):
            process.stop()

    def _add(self, process: Process) -> Process:
        self._processes.append(process)
        return process
