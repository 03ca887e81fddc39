"""The command by the hour, in the session of the other tests: what it prints, repairs and exports."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox_core.runtime.command import main
from spark_reconcile import run_windows
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.slow
def test_it_judges_by_the_hour_repairs_what_is_unsent_and_writes_the_metrics_to_both_files(
    spark: SparkSession, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "spark_reconcile.runs.reconciliation.run_windows", partial(run_windows, session=spark)
    )  # a Java of its own would take most of this test
    world = World()
    world.groups()
    for _ in range(3):
        world.settled(age_ms=2 * HOUR_MS)
    world.unsent("stuck", key=None, age_ms=2 * HOUR_MS)
    world.outbox[-1]["token"] = None
    world.write(sqlite, tmp_path)
    config, scraped = tmp_path / "reconcile.toml", tmp_path / "textfile" / "recon.prom"
    config.write_text(
        f'[database]\nurl = "{sqlite.url}"\n[broker]\ndata = "broker"\n[grace]\nconfirm_after_seconds = 0\n'
    )

    span, repair = ("--since", "5h"), ("--repair", "--yes", "--json", "--metrics-file", str(scraped))

    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["reconcile", "run", "--config", str(config), "--now-ms", str(NOW_MS), *span, *repair])
    said = capfd.readouterr()

    assert ended.value.code == 1, said.err
    assert "repaired 1 of 1" in said.err
    assert json.loads(said.out)["sentence"] == "Not balanced: 1 unsent."
    metrics = (tmp_path / "reconciliation" / "recon.prom").read_text()
    assert 'recon_findings{state="unsent",severity="finding"} 1\n' in metrics
    assert scraped.read_text() == metrics
    with closing(sqlite3.connect(tmp_path / "business.db")) as connection:
        ((due_us,),) = connection.execute("SELECT due_at_us FROM outbox_message")
    assert due_us < (NOW_MS - 2 * HOUR_MS) * 1000
