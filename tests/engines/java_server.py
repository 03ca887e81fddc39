"""A server written in Java, run as a child process from a folder of jars. It dies with pytest, however pytest ends."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fixtures.local_server import guarded
from tests.fixtures.stopped_process import stop_process

START_SECONDS_MAX = 300
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 40

# A small JVM that starts fast: these servers live for seconds.
SMALL_JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true")


def java_home() -> Path:
    """The Java that scripts/test found or fetched, or else the one on the PATH."""
    named, program = os.environ.get("JAVA_HOME"), shutil.which("java")
    if named:
        return Path(named)
    if program is None:
        pytest.fail("there is no Java. Run ./scripts/test --engines, which finds or fetches one", pytrace=False)
    return Path(program).resolve().parents[1]


def own_loopback_network() -> str:
    """The first three numbers of a loopback network that no other test run uses: `127.83.201`."""
    chosen = random.SystemRandom()
    return f"127.{chosen.randrange(1, 255)}.{chosen.randrange(1, 255)}"


@dataclass(frozen=True, slots=True)
class JavaProgram:
    """A main class with its arguments, and the memory that it may take."""

    main_class: str
    arguments: Sequence[str]
    jars: Path
    heap_mb: int
    direct_mb: int
    options: Sequence[str] = ()

    def command(self) -> list[str]:
        """The whole command line; the kernel ends the process when this one ends."""
        memory = [f"-Xmx{self.heap_mb}m", f"-XX:MaxDirectMemorySize={self.direct_mb}m", "-XX:+ExitOnOutOfMemoryError"]
        java = [str(java_home() / "bin" / "java"), *SMALL_JVM_OPTIONS, *memory, *self.options]
        return guarded([*java, "-cp", f"{self.jars}/*", self.main_class, *self.arguments])

    def run(self) -> None:
        """Run it to its end; raise with what it wrote if it fails."""
        done = subprocess.run(
            self.command(), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=START_SECONDS_MAX
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.main_class} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


class JavaServer:
    """One server: started, killed, started again. The data are the program's own matter and stay."""

    def __init__(self, program: JavaProgram, *, log: Path) -> None:
        self._program = program
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_started(self) -> bool:
        """Whether it was started and not killed by us since."""
        return self._process is not None

    def start(self) -> None:
        """Start it; `wait_until` then waits for it to be ready. From the main thread only, whose end it shares."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._program.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until the server is ready; raise with the end of its log if it ends before, or takes too long."""
        deadline = time.monotonic() + START_SECONDS_MAX
        while not ready():
            self.check_alive()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._program.main_class} was not ready in time; its log:\n{self._log_tail()}")
            self._wait_between_polls()

    def check_alive(self) -> None:
        """Raise with the end of its log if it ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            status = self._process.returncode
            raise RuntimeError(f"{self._program.main_class} ended with {status}; its log:\n{self._log_tail()}")

    def kill9(self) -> None:
        """End it as a crash would, and wait until it is gone. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it by SIGSTOP: its connections stay open and nothing answers."""
        stop_process(self._started().pid)

    def resume(self) -> None:
        """Let it go on."""
        self._started().send_signal(signal.SIGCONT)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self._program.main_class} was not started")
        return self._process

    def _wait_between_polls(self) -> None:
        try:
            self._started().wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
