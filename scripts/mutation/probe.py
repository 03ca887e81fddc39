"""Records which test reaches which probe, in the process of the tests and in every process that one starts.

Installed as `mutation_probe` where every interpreter of the workspace imports it at its start. Knows of no pytest. The
process that runs tests keeps the index of its test in a small file (`announce`), which its descendants map into their
memory: so a broker or a Spark worker that outlives a test attributes what it runs to the test of the moment.
"""

from __future__ import annotations

import builtins
import mmap
import os
import threading
from pathlib import Path

FOLDER = Path(__file__).with_name("mutation_hits")
_NOW_VARIABLE = "MUTATION_NOW"
_now: memoryview | None = None
_run = "none"
_seen: set[tuple[int, int]] = set()
_lock = threading.Lock()


def hit(number: int) -> None:
    """Record that the running test reached this probe, once a test and process. The value is false."""
    now = _now if _now is not None else _attach()
    pair = (now[0], number)
    if pair not in _seen:
        _seen.add(pair)
        _append("hits", f"{_run} {pair[0]} {number}")


def announce(index: int) -> None:
    """Say which test runs from here on in this process and in its descendants."""
    if _now is None or not _run.startswith(f"{os.getpid()}-"):
        _create()
    assert _now is not None
    _now[0] = index


def record(text: str) -> None:
    """Append a line about a test of this process."""
    _append(f"tests-{_run}", text)


def _append(name: str, line: str) -> None:
    with (FOLDER / name).open("a") as file:  # one short write at the end of a file: whole, whoever writes
        file.write(f"{line}\n")


def _create() -> None:
    FOLDER.mkdir(exist_ok=True)
    number = 0
    while (path := FOLDER / f"now-{os.getpid()}-{number}").exists():
        number += 1
    path.write_bytes(bytes(8))
    os.environ[_NOW_VARIABLE] = str(path)
    _map(path)


def _attach() -> memoryview:
    with _lock:
        if _now is None:
            path = os.environ.get(_NOW_VARIABLE) or _path_of_ancestor()
            if path:
                _map(Path(path))
            else:
                _map_nothing()
    assert _now is not None
    return _now


def _map(path: Path) -> None:
    global _now, _run  # noqa: PLW0603 (one per process)
    with path.open("r+b") as file:
        _run = path.name.partition("-")[2]
        _now = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")


def _map_nothing() -> None:
    global _now  # noqa: PLW0603 (one per process)
    _now = memoryview(bytes(8)).cast("q")


def _path_of_ancestor() -> str | None:
    """The file of the process of the tests that this one descends from, for one that was given no environment."""
    process = os.getpid()
    while process > 1:
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return None
        paths = sorted(FOLDER.glob(f"now-{process}-*"))
        if paths:
            return str(paths[-1])
    return None


builtins._mutation_hit = hit  # type: ignore[attr-defined]  # noqa: SLF001
