"""A run by the hour whose process is killed at a random moment and started again: the tables of one that was not.

Only the run that is killed has a process of its own: what the others find is on the disk, whoever runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import IO, TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from spark_reconcile import run_windows
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.results.window_store import WindowStore
from tests.fixtures.databases import Database
from tests.spark_reconcile import killed_run
from tests.spark_reconcile.faults import plant_all
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, SETTINGS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_a_process_killed_at_a_random_moment_and_started_again_shows_the_same_tables(
    spark: SparkSession, sqlite: Database, tmp_path: Path, random_seed: int
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

    told = _run(config, tmp_path / "undisturbed", spark)
    moment = random.randrange(len(told))
    print(f"killed at {moment} of {len(told)}: {told[moment]}")
    before = _run_and_kill(config, tmp_path / "killed", after=moment)
    _run(config, tmp_path / "killed", spark)

    assert before == told[: moment + 1]
    assert told.count("show index") == 1
    wanted = _shown(tmp_path / "undisturbed")
    assert len(wanted[0]) == 5
    assert len(wanted[1]) > 50
    assert _shown(tmp_path / "killed") == wanted
    assert _left(tmp_path / "killed") == _left(tmp_path / "undisturbed")


def _run(config: Path, output: Path, spark: SparkSession) -> list[str]:
    """What a run in this process told."""
    told: list[str] = []
    settings = replace(settings_of(read_config(config), folder=config.parent), output=output)
    run_windows(
        settings, since_ms=killed_run.SINCE_MS, now_ms=NOW_MS, session=spark, pause=no_wait, say=told.append,
        checkpoint=told.append,
    )  # fmt: skip
    return told


def _run_and_kill(config: Path, output: Path, *, after: int) -> list[str]:
    """What a process told until it was killed, at this line of the run."""
    command = [sys.executable, "-m", killed_run.__name__, str(config), str(output)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as lines:
        told = _told(lines, lines_max=after + 1)
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait(600)
    assert status in {0, -signal.SIGKILL}, "killed, unless it ended with that line"
    return told


def _told(lines: IO[str], *, lines_max: int) -> list[str]:
    told: list[str] = []
    for line in lines:
        told.append(line.strip())
        if len(told) == lines_max:
            break
    return told


def _shown(output: Path) -> tuple[dict[int, Any], set[tuple[Any, ...]]]:
    """Each window's version and numbers, and all rows of its tables."""
    store, rows = WindowStore(output), set()
    for start in store.windows:
        for name in ("verdicts", "business_verdicts"):
            folder = store.folder(start) / name
            found = pq.read_table(folder).to_pylist() if folder.exists() else []
            rows |= {(start, name, *sorted(row.items())) for row in found}
    return {start: (window.version, window.result, window.open) for start, window in store.windows.items()}, rows


def _left(output: Path) -> set[str]:
    """What stands in the output folder but for the runs' own folders."""
    return {path.name for path in output.iterdir() if path.name.startswith(".") or not (path / "run.json").exists()}
