"""How far a run says that it is: shares that only grow, by what the last run took, and tasks that Spark has done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_reconcile import run, run_windows
from spark_reconcile.runs.run_progress import RunShare
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World, no_wait

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def planted() -> World:
    """Some messages, and one finding, so that there is a recheck."""
    world = World()
    world.groups()
    for _ in range(3):
        world.settled(age_ms=2 * HOUR_MS)
    world.order()
    return world


def test_a_run_shows_shares_that_grow_to_the_whole_and_counts_what_spark_does(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    settings = planted().write(sqlite, tmp_path)
    first: list[RunShare] = []
    second: list[RunShare] = []

    summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait, shows=first.append)
    again = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait, shows=second.append)

    for shares in (first, second):
        done = [share.done for share in shares]
        assert done == sorted(done)
        assert (done[0], done[-1], {share.total for share in shares}) == (0, 1_000, {1_000})
        assert [share.tasks for share in shares] == sorted(share.tasks for share in shares)
        steps = list(dict.fromkeys(share.step for share in shares))
        assert steps[:2] == ["starting Spark", "reading the inboxes"]
        assert steps[-2:] == ["counting the verdicts", "writing the report"]
    assert list(summary.spark_tasks) == list(summary.took_seconds) == ["start", "read", "judge", "count"]
    assert sum(again.spark_tasks.values()) == second[-1].tasks
    assert min(summary.spark_tasks[phase] for phase in ("read", "judge", "count")) > 0


def test_the_shares_of_a_run_are_those_of_the_last_one_of_its_kind(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    settings = planted().write(sqlite, tmp_path)
    span: dict[str, Any] = {"since_ms": NOW_MS - 5 * HOUR_MS, "session": spark, "now_ms": NOW_MS, "pause": no_wait}
    shares: list[RunShare] = []
    run_windows(settings, shows=lambda _: None, **span)
    numbers = next(settings.output.glob("*/run.json"))
    stored = json.loads(numbers.read_text())
    stored["took_seconds"] = {"start": 0.0, "read": 98.0, "judge": 1.0, "count": 1.0}
    numbers.write_text(json.dumps(stored))

    run_windows(settings, shows=shares.append, full=True, **span)

    begin = {share.step: share.done for share in reversed(shares)}
    judged = next(done for step, done in begin.items() if step.startswith("judging"))
    assert begin["reading the inboxes"] == 0
    assert judged >= 960
    assert all(share.left_ms is not None for share in shares if share.done)


def test_nobody_is_asked_where_nobody_looks(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    summary = run(planted().write(sqlite, tmp_path), session=spark, now_ms=NOW_MS, pause=no_wait)

    assert summary.spark_tasks == {}
    assert list(summary.took_seconds) == ["start", "read", "judge", "count"]


@pytest.mark.processes
def test_the_command_tells_programs_on_standard_error_and_leaves_standard_output_to_the_result(
    sqlite: Database, tmp_path: Path
) -> None:
    planted().write(sqlite, tmp_path)
    arguments = [
        "--url", sqlite.url, "--broker-data", str(tmp_path / "broker"), "--output", str(tmp_path / "out"),
        "--now-ms", str(NOW_MS), "--json", "--progress", "json",
    ]  # fmt: skip
    variables = {**os.environ, "OUTBOX_RECONCILE__GRACE__CONFIRM_AFTER_SECONDS": "0"}

    done = subprocess.run(
        [sys.executable, "-m", "outbox", "reconcile", "run", *arguments],
        capture_output=True, text=True, timeout=600, env=variables,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"] == 3
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert {one["operation"] for one in told} == {"reconcile"}
    assert (told[0]["step"], told[0]["done"]) == ("starting Spark", 0)
    assert (told[-1]["step"], told[-1]["done"], told[-1]["total"]) == ("writing the report", 1_000, 1_000)
    assert [one["done"] for one in told] == sorted(one["done"] for one in told)
    assert told[-1]["tasks"] > 0
