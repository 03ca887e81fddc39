"""A server written in Java, run as a child process from a folder of jars. It dies with pytest, however pytest ends."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

START_SECONDS_MAX = 300
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 40
PORT_ATTEMPTS_MAX = 100

# A small JVM that starts fast: these servers live for seconds.
SMALL_JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true")

_GUARD = Path(__file__).parents[1] / "fixtures" / "guarded.py"
# Below the range that Linux gives to connections and to servers that ask for any port, so that neither can take a port
# between our choosing it and the server's binding it.
_PORTS = range(10_000, 30_000)


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


def free_port(host: str) -> int:
    """A port that nothing listens on, neither at this address nor at all addresses."""
    for port in random.SystemRandom().sample(_PORTS, PORT_ATTEMPTS_MAX):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"found no free port on {host}")


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
        guard = [sys.executable, "-S", "-E", str(_GUARD), str(os.getpid())]
        memory = [f"-Xmx{self.heap_mb}m", f"-XX:MaxDirectMemorySize={self.direct_mb}m", "-XX:+ExitOnOutOfMemoryError"]
        java = [str(java_home() / "bin" / "java"), *SMALL_JVM_OPTIONS, *memory, *self.options]
        return [*guard, *java, "-cp", f"{self.jars}/*", self.main_class, *self.arguments]

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
            self._pause()

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

    def send_signal(self, number: int) -> None:
        """Send a signal to the process: SIGSTOP pauses the server, SIGCONT lets it go on."""
        if self._process is None:
            raise RuntimeError(f"{self._program.main_class} was not started")
        self._process.send_signal(number)

    def _pause(self) -> None:
        if self._process is None:
            raise RuntimeError(f"{self._program.main_class} was not started")
        try:
            self._process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
