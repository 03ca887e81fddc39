"""Measures the broker's log and schedule store beside RocksDB, LMDB and SQLite, doing the same work durably.

    python -m benchmarks.storage.engines [--rounds 5] [--quick] [--folder DISK]

Log: batches of 1, 100 and 1,000 messages of 1 KB, each synced, and then all of them read in order. Schedule: 200,000
messages of 256 bytes that are due at random within a year, inserted by 1,000; 2,000 of them canceled by id; the others
taken in order, day by day. Each engine has a process and a folder of its own, and its turn moves by one each round. A
round fails where an engine gives back other messages than it was given. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.harness.report import machine, progress, table
from benchmarks.harness.rounds import ratios, rotated, spread
from benchmarks.storage.libraries import LIBRARIES, libraries_folder
from benchmarks.storage.logs import LOGS
from benchmarks.storage.schedules import BATCH_MESSAGES, SCHEDULES, Due

BODY_BYTES: Final = 1024
SCHEDULED_BODY_BYTES: Final = 256
NOW_MS: Final = 1_800_000_000_000
DAY_MS: Final = 86_400_000
DAYS: Final = 365
CANCELS_A_BATCH: Final = 100
ENGINES: Final = tuple(LOGS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done: batches by their messages, and messages of the schedule."""

    batches: dict[int, int]
    scheduled: int
    canceled: int


FULL: Final = Sizes({1: 1_000, 100: 300, 1_000: 100}, scheduled=200_000, canceled=2_000)
QUICK: Final = Sizes({1: 5, 100: 3, 1_000: 2}, scheduled=2_000, canceled=200)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="medians of so many (5)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; figures mean nothing")
    parser.add_argument("--folder", type=Path, help="where files are written: a disk, not a RAM disk (a temporary one)")
    parser.add_argument("--only", choices=("log", "schedule"), help="one of the two")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    sizes = QUICK if chosen.quick else FULL
    if chosen.child:
        part, engine, folder = chosen.child
        sys.path.append(str(libraries_folder()))
        measure = _log if part == "log" else _schedule
        print(json.dumps(measure(engine, Path(folder), sizes)))
        return
    libraries_folder()
    parts = (chosen.only,) if chosen.only else ("log", "schedule")
    found = {part: _rounds(part, chosen) for part in parts}
    for part, figures in found.items():
        table(
            part,
            ["", *ENGINES],
            [[name, *(one[name]["median"] for one in figures.values())] for name in _names(figures)],
        )
    report = {part: _report(figures) for part, figures in found.items()}
    where = {"libraries": LIBRARIES, "rounds": chosen.rounds, "quick": chosen.quick}
    print(json.dumps({"benchmark": "storage.engines", "machine": machine(), **where, **report}, indent=2))


def _rounds(part: str, chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs all rounds of a part; returns the spread of each figure by engine, with the rounds' values."""
    values: dict[str, dict[str, list[float]]] = {engine: {} for engine in ENGINES}
    with progress() as shown:
        task = shown.add_task(part, total=chosen.rounds * len(ENGINES))
        for number in range(chosen.rounds):
            for engine in rotated(ENGINES, number):
                for name, value in _in_process(part, engine, chosen).items():
                    values[engine].setdefault(name, []).append(value)
                shown.advance(task)
    return {
        engine: {name: {**spread(found), "rounds": found} for name, found in figures.items()}
        for engine, figures in values.items()
    }


def _in_process(part: str, engine: str, chosen: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        command = [sys.executable, "-m", "benchmarks.storage.engines", "--child", part, engine, f"{name}/data"]
        if chosen.quick:
            command.append("--quick")
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _names(figures: dict[str, dict[str, Any]]) -> list[str]:
    return list(figures["ours"])


def _report(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each figure by engine, and the ratios of the others to ours."""
    report: dict[str, Any] = {}
    for name in _names(figures):
        rounds = {engine: one[name]["rounds"] for engine, one in figures.items()}
        spreads = {
            engine: {key: value for key, value in one[name].items() if key != "rounds"}
            for engine, one in figures.items()
        }
        report[name] = {**spreads, "to_ours": ratios(rounds, to="ours")}
    return report


# -- in a process of its own -------------------------------------------------------------------------------------------


def _log(engine: str, folder: Path, sizes: Sizes) -> dict[str, float]:
    figures: dict[str, float] = {}
    for messages, batches in sizes.batches.items():
        place = folder / str(messages)
        place.mkdir(parents=True)
        bodies = [_body(number, BODY_BYTES) for number in range(messages * batches)]
        log = LOGS[engine](place)
        seconds = _seconds(lambda: [log.append(part) for part in _parts(bodies, messages)])  # noqa: B023 (called at once)
        log.close()
        figures[f"append_by_{messages}_per_second"] = len(bodies) / seconds
        if messages == max(sizes.batches):
            log = LOGS[engine](place)
            read: list[bytes] = []
            figures["read_per_second"] = len(bodies) / _seconds(lambda: read.extend(log.read()))  # noqa: B023
            log.close()
            if read != bodies:
                raise RuntimeError(f"{engine} gave back other messages")
            figures["disk_bytes_to_payload"] = _disk_bytes(place) / (BODY_BYTES * len(bodies))
    return figures


def _schedule(engine: str, folder: Path, sizes: Sizes) -> dict[str, float]:
    random = Random(7)
    messages = [
        Due(NOW_MS + random.randrange(1, DAYS * DAY_MS), f"message-{number:08}", _body(number, SCHEDULED_BODY_BYTES))
        for number in range(sizes.scheduled)
    ]
    folder.mkdir(parents=True)
    schedule, figures = SCHEDULES[engine](folder), {}
    figures["insert_per_second"] = len(messages) / _seconds(
        lambda: [schedule.insert(part, now_ms=NOW_MS) for part in _parts(messages, BATCH_MESSAGES)]
    )
    figures["disk_bytes_to_payload"] = _disk_bytes(folder) / (SCHEDULED_BODY_BYTES * len(messages))
    canceled = random.sample([one.id for one in messages], sizes.canceled)
    counts: list[int] = []
    figures["cancel_per_second"] = len(canceled) / _seconds(
        lambda: counts.extend(schedule.cancel(part, now_ms=NOW_MS) for part in _parts(canceled, CANCELS_A_BATCH))
    )
    taken: list[tuple[str, bytes]] = []

    def take_all() -> None:
        for day in range(1, DAYS + 1):
            now_ms = NOW_MS + day * DAY_MS
            while found := schedule.take(now_ms):
                taken.extend(found)
            schedule.tidy(now_ms)

    figures["take_per_second"] = (len(messages) - len(canceled)) / _seconds(take_all)
    schedule.close()
    gone = set(canceled)
    expected = sorted((one for one in messages if one.id not in gone), key=lambda one: (one.due_ms, one.id))
    if sum(counts) != len(canceled) or taken != [(one.id, one.body) for one in expected]:
        raise RuntimeError(f"{engine} gave back other messages, or in another order")
    return figures


def _body(number: int, size: int) -> bytes:
    """Returns bytes that no compression makes small, and that are the number's own."""
    return Random(number).randbytes(size)


def _parts(things: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (things[start : start + size] for start in range(0, len(things), size))


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _disk_bytes(folder: Path) -> int:
    """Returns what the files take on the disk: LMDB's file is as long as its map, and mostly a hole."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
