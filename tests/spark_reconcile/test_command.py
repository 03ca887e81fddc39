"""The command as its user has it: interrupted while Spark starts or works, and what is left then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.processes]
LOOKS_MAX = 50_000
END_SECONDS_MAX = 300


@pytest.mark.parametrize("told", ["starting Spark", "giving verdicts"])
def test_an_interrupt_ends_a_run_with_one_line_and_leaves_nothing_behind(
    sqlite: Database, tmp_path: Path, told: str
) -> None:
    world = World()
    world.groups()
    world.settled(age_ms=2 * HOUR_MS)
    world.write(sqlite, tmp_path)
    config = tmp_path / "reconcile.toml"
    config.write_text(f'[database]\nurl = "{sqlite.url}"\n[broker]\ndata = "broker"\n')
    command = [
        sys.executable,
        "-m",
        "outbox",
        "reconcile",
        "run",
        "-q",
        "--config",
        str(config),
        "--now-ms",
        str(NOW_MS),
    ]
    errors = (tmp_path / "errors").open("w+")
    process = subprocess.Popen(command, stdout=errors, stderr=errors, start_new_session=True)

    with errors:
        _wait_for(process, tmp_path / "reconciliation", told)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        status = process.wait(END_SECONDS_MAX)
        errors.seek(0)
        said = errors.read()

    assert (status, said) == (130, "interrupted: what was done before stands\n")
    assert [path.name for path in (tmp_path / "reconciliation").iterdir()] == [".lock"]


def _wait_for(process: subprocess.Popen[bytes], output: Path, told: str) -> None:
    """Until Spark is being started, or until it has begun to write verdicts."""
    wanted = "spark.log" if told == "starting Spark" else "verdicts"
    for _ in range(LOOKS_MAX):
        if any(output.glob(f".staging-*/{wanted}")):
            return
        assert process.poll() is None, "it ended before it was interrupted"
        threading.Event().wait(0.01)
    raise AssertionError(f"it never came to {told}")
