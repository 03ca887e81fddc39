"""A node as a process of its own: `outbox delay serve --store ...`, or `outbox broker serve --store ...` without a
target; to be killed, paused and started again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.fixtures.local_server import guarded
from tests.fixtures.stopped_process import stop_process

SECONDS_MAX = 300
OURS = ("OUTBOX_CLUSTER__", "OUTBOX_BROKER__")


class NodeProcess:
    """One node."""

    def __init__(
        self, name: str, *, store: str, target: str | None, folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        """`settings`: of [cluster], as in the environment: where segments are, at least."""
        self.name = name
        self.url = ""
        self._folder = folder
        self._ready_file = folder / f"{name}.ready"
        self._log = folder / f"{name}.log"
        of_service = ["broker", "serve"] if target is None else ["delay", "serve", "--target", target]
        self._arguments = [*of_service, "--store", store, "--name", name]
        self._port = "0"
        self._environment = {"session_ms": "3000", **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def start(self, *options: str) -> None:
        """Start it, with further options of the command; returns when it serves."""
        self._ready_file.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        environment |= {f"OUTBOX_CLUSTER__{name.upper()}": value for name, value in self._environment.items()}
        command = [sys.executable, "-m", "outbox", *self._arguments, *options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                guarded([*command, "--port", self._port, "--ready-file", str(self._ready_file)]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        deadline = time.monotonic() + SECONDS_MAX
        while not self._ready_file.exists():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
        self.url = self._ready_file.read_text().strip()
        self._port = self.url.rpartition(":")[2]  # the same after a restart

    def pause(self) -> None:
        """Stop it by SIGSTOP: its connections stay open and nothing answers."""
        assert self._process is not None
        stop_process(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        code = self._process.wait(SECONDS_MAX)
        self._process = None
        return code
