"""A server of ours in the demo, as a process: killed, paused, and started again on the same port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from outbox_core.common.errors import BrokerUnavailable
from outbox_demo.processes import Process, ProcessGroup


class ServerProcess:
    """A command that serves, such as `outbox broker serve`."""

    def __init__(
        self, name: str, command: Sequence[str], *, folder: Path, processes: ProcessGroup,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`folder`: that of the run; `environment`: what it has besides ours."""
        self.name = name
        self._command = command
        self._url_path = folder / f"{name}-url.txt"
        self._processes = processes
        self._environment = environment
        self._port = 0
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._url_path.read_text().strip()

    def start(self, *options: str) -> None:
        """Start it with these options of the command; returns when it serves."""
        self._url_path.unlink(missing_ok=True)
        self._process = self._processes.start(
            self.name,
            [*self._command, *options, "--port", str(self._port), "--ready-file", str(self._url_path)],
            environment=self._environment,
        )
        self._processes.wait_for(f"{self.name} to be ready", self._url_path.exists)
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """Send SIGKILL."""
        self._running().kill()

    def pause(self) -> None:
        """Send SIGSTOP."""
        self._running().pause()

    def go_on(self) -> None:
        """Send SIGCONT."""
        self._running().go_on()

    def _running(self) -> Process:
        if self._process is None:
            raise BrokerUnavailable(f"{self.name} was not started")
        return self._process
