"""The demo's processes: started, watched, killed. What each of them does is its own module's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from outbox_core.common.errors import OutboxError

STOP_SECONDS: Final = 30
_LAST_LINES: Final = 15


class ProcessFailed(OutboxError):
    """A process of the demo ended by itself, and should not have."""


class Process:
    """One child process. Its stderr goes to a log file of its own, its stdout can be read line by line."""

    def __init__(self, name: str, arguments: Sequence[str], *, folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                [sys.executable, "-m", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
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

    def kill(self) -> None:
        """SIGKILL: no farewell, no flush."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
        self._close()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not listen; idempotent."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_SECONDS)
        self._close()

    def check(self) -> None:
        """Raise ProcessFailed, with the end of its log, where it has ended with an error."""
        status = self._process.poll()
        if status not in {None, 0}:
            tail = "\n  ".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise ProcessFailed(f"{self.name} ended with status {status}; its last words:\n  {tail}")

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()
