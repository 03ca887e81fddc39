"""A run by the hour whose process is killed at a random moment and started again: the tables of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import IO, Any

import pyarrow.parquet as pq
import pytest

from spark_reconcile.results.window_store import WindowStore
from tests.fixtures.databases import Database
from tests.spark_reconcile import killed_run
from tests.spark_reconcile.faults import plant_all
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, SETTINGS, World

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_a_process_killed_at_a_random_moment_and_started_again_shows_the_same_tables(
    sqlite: Database, tmp_path: Path, random_seed: int
) -> None:
    random = Random(random_seed)
    world = World()
    world.groups()
    for number in range(20):
        world.settled(age_ms=4 * HOUR_MS - number * 10 * MINUTE_MS)
    plant_all(world)
    with_timed_ids(world)
    world.write(sqlite, tmp_path, records_a_segment=40)
    config = tmp_path / "reconcile.toml"
    config.write_text(SETTINGS.format(url=sqlite.url))

    told = _run(config, tmp_path / "undisturbed")
    moment = random.randrange(len(told))
    print(f"killed at {moment} of {len(told)}: {told[moment]}")
    before = _run(config, tmp_path / "killed", until=moment)
    _run(config, tmp_path / "killed")

    assert len(before) == moment + 1
    assert told.count("show index") == 1
    wanted = _shown(tmp_path / "undisturbed")
    assert len(wanted[0]) == 5
    assert len(wanted[1]) > 50
    assert _shown(tmp_path / "killed") == wanted
    assert _left(tmp_path / "killed") == _left(tmp_path / "undisturbed")


def _run(config: Path, output: Path, *, until: int | None = None) -> list[str]:
    """What a process told until it ended, or until it was killed after so many lines."""
    command = [sys.executable, "-m", killed_run.__name__, str(config), str(output)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as lines:
        told = _told(lines, until)
        if until is not None:
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait(600)
    assert status == 0 or (status == -signal.SIGKILL and until is not None)
    return told


def _told(lines: IO[str], until: int | None) -> list[str]:
    told = []
    for line in lines:
        told.append(line.strip())
        if until is not None and len(told) > until:
            break
    return told


def _shown(output: Path) -> tuple[dict[int, Any], set[tuple[Any, ...]]]:
    """Each window's numbers, and all rows of its tables."""
    store, rows = WindowStore(output), set()
    for start in store.windows:
        for name in ("verdicts", "business_verdicts"):
            folder = store.folder(start) / name
            found = pq.read_table(folder).to_pylist() if folder.exists() else []
            rows |= {(start, name, *sorted(row.items())) for row in found}
    return {start: (window.result, window.open) for start, window in store.windows.items()}, rows


def _left(output: Path) -> set[str]:
    """What stands in the output folder but for the runs' own folders."""
    return {path.name for path in output.iterdir() if path.name.startswith(".") or not (path / "run.json").exists()}
