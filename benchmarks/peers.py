"""Installs the Python peers in a virtual environment of their own. The project does not depend on them.

    python -m benchmarks.peers

Makes the environment once, with the versions below and the SQLAlchemy and drivers of this one; prints its Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from benchmarks.harness.report import talk

PEERS: Final = {"pactix": "0.2.0", "modupy": "0.13.2", "outbox-sqs": "0.1.1"}
"""The contestants. pactix says that it wants Python 3.12, and runs on 3.11 as well: pip's check is switched off."""
TIMER_PEERS: Final = {"rq": "3.0.0", "arq": "0.28.0", "redis": "5.3.1", "hiredis": "3.5.0"}
"""Task queues on Redis that schedule, and the newest client that arq takes."""
_SHARED: Final = ("SQLAlchemy", "PyMySQL", "asyncmy", "greenlet")
_MISSING_OF_MODUPY: Final = ("pluggy",)


def peers_python() -> str:
    """The Python in which the peers of the outbox can be imported; see python_with()."""
    return python_with(_requirements())


def timer_peers_python() -> str:
    """The Python in which the peers of the timer stores can be imported; see python_with()."""
    return python_with([f"{name}=={version}" for name, version in TIMER_PEERS.items()])


def python_with(wanted: list[str]) -> str:
    """The Python of an environment with these requirements, which is made where it is not there yet.

    Raises RuntimeError with pip's words where that does not work.
    """
    folder = _folder(wanted)
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        talk.print(f"installing the peers: {', '.join(wanted)}")
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--ignore-requires-python", *wanted])
        (folder / "complete").touch()
    return str(python)


def _requirements() -> list[str]:
    shared = [f"{name}=={metadata.version(name)}" for name in _SHARED]
    return [*(f"{name}=={version}" for name, version in PEERS.items()), *shared, *_MISSING_OF_MODUPY]


def _folder(wanted: list[str]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(repr((sys.version, wanted)).encode()).hexdigest()[:12]
    return cache / "outbox-mq" / "benchmark-peers" / key


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    print(peers_python())
