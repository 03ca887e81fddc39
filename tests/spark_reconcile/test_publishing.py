"""What a run leaves beside Spark's tables: its line of the run log, and counts by topic and hour."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from spark_reconcile import Settings
from spark_reconcile.report.writer import publish, write_aggregates
from spark_reconcile.results.output_folder import staging
from spark_reconcile.results.summary import InputExtent, Summary, VerdictCount, WindowCounts
from spark_reconcile.results.window_totals import Tally
from spark_reconcile.rules.verdict_rule import Scope, Severity, State

HOUR_MS = 3_600_000


def test_each_run_leaves_a_line_in_the_run_log(tmp_path: Path) -> None:
    settings = _settings(tmp_path, "secret")

    hourly = _published(settings, hours=True)
    whole = _published(settings, hours=False)

    (line,) = pq.read_table(hourly / "run_log").to_pylist()
    assert {name: line[name] for name in ("run_id", "since_ms", "until_ms", "hours", "hours_judged")} == {
        "run_id": hourly.name, "since_ms": 0, "until_ms": HOUR_MS, "hours": 1, "hours_judged": 1
    }  # fmt: skip
    assert (line["findings"], line["balanced"], line["sentence"]) == (2, False, "Not balanced: 2 lost.")
    assert dict(line["seconds"]) == {"read": 1.5, "judge": 3.0}
    assert line["inputs"] == [
        {
            "source": "broker",
            "what": "log",
            "rows": 1,
            "first_ms": 1,
            "last_ms": 5,
            "complete_since_ms": None,
            "complete_until_ms": 4,
        }
    ]
    (other,) = pq.read_table(whole / "run_log").to_pylist()
    assert (other["since_ms"], other["hours"]) == (None, None)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["newest"] == whole.name


def test_the_configuration_is_told_by_a_hash_that_knows_no_password(tmp_path: Path) -> None:
    first = _settings(tmp_path, "secret")
    later = _settings(tmp_path, "another secret")
    stricter = replace(later, grace=replace(later.grace, seconds=7))

    hashes = [
        pq.read_table(_published(one, hours=True) / "run_log").to_pylist()[0]["config_sha256"]
        for one in (first, later, stricter)
    ]

    assert hashes[0] == hashes[1] != hashes[2]


def test_counts_by_topic_and_hour_are_those_of_the_windows(tmp_path: Path) -> None:
    tallies = {HOUR_MS: Tally(), 0: Tally()}
    tallies[0].add((Scope.MESSAGE, "order.paid", "", "stored"), 3)
    tallies[0].add((Scope.BUSINESS, "order.paid", "rule", "announced"), 3)
    tallies[HOUR_MS].add((Scope.DELIVERY, "order.paid", "mail", "not_delivered"), 2)

    write_aggregates(tmp_path / "aggregates", {start: tally.as_result() for start, tally in tallies.items()})

    assert [tuple(row.values()) for row in pq.read_table(tmp_path / "aggregates").to_pylist()] == [
        ("message", "order.paid", None, "settled", "stored", 0, 3),
        ("delivery", "order.paid", "mail", "late", "not_delivered", HOUR_MS, 2),
    ]


def _settings(folder: Path, password: str) -> Settings:
    return Settings(
        database_url=f"mysql+pymysql://reader:{password}@db/shop", broker_data=folder / "b", output=folder / "out"
    )


def _published(settings: Settings, *, hours: bool) -> Path:
    lost = VerdictCount(
        scope=Scope.MESSAGE, topic="t", of="", state=State.LOST, severity=Severity.FINDING, rule="not_in_broker",
        count=2,
    )  # fmt: skip
    counts = WindowCounts(
        since_ms=0, until_ms=HOUR_MS, windows=1, judged=1, open=0, not_closed=0, looked_at=2, resolved=3
    )
    with staging(settings.output, now_ms=0) as stage:
        summary = Summary(
            run_id=stage.run_id, judged_at_ms=0, business_rows=0, messages=2, message_groups=0, stored=0, delivered=0,
            redelivered=0, acknowledged=0, resent=0, deduplicated_by_broker=0, deduplicated_by_inbox=0,
            verdict_counts=[lost],
            inputs=[InputExtent(source="broker", what="log", rows=1, first_ms=1, last_ms=5, complete_since_ms=None,
                          complete_until_ms=4)],
            windows=counts if hours else None, took_seconds={"read": 1.5, "judge": 3.0},
        )  # fmt: skip
        publish(summary, settings, stage=stage)
        return stage.final
