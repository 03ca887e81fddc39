"""Findings of hours before the span of a run by the hour: in its balance, its first clause and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox_core.runtime.command import main
from spark_reconcile import run_windows
from spark_reconcile.report.page import page_of
from spark_reconcile.report.prometheus import metrics_text
from spark_reconcile.results.summary import Summary, VerdictCount, WindowCounts
from spark_reconcile.rules.verdict_rule import Scope, Severity, State
from tests.fixtures.databases import Database
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOST = VerdictCount(
    scope=Scope.MESSAGE, topic="t", of="", state=State.LOST, severity=Severity.FINDING, rule="not_in_broker", count=2
)
LATE = VerdictCount(
    scope=Scope.DELIVERY, topic="t", of="g", state=State.LATE, severity=Severity.ATTENTION, rule="not_fired", count=3
)


def test_earlier_findings_alone_are_not_balanced_and_said_so_at_once() -> None:
    summary = _summary(earlier=4, verdict_counts=[LATE])

    assert not summary.balanced
    assert summary.sentence == (
        "Not balanced: 4 findings of earlier hours. Earlier hours count as they were last judged; an earlier --since "
        "judges them again. In this span all of 10 messages, 3 deliveries and 0 business rows are explained; 3 late to "
        "look at."
    )
    assert (summary.as_dict()["balanced"], summary.as_dict()["earlier_findings"]) == (False, 4)
    assert "\nrecon_balanced 0\n" in metrics_text(summary)
    page = page_of(summary)
    assert "<title>Not balanced" in page
    assert '<header class="good">' not in page


def test_earlier_findings_are_named_beside_those_of_the_span() -> None:
    assert _summary(earlier=1, verdict_counts=[LOST]).sentence == (
        "Not balanced: 2 lost and 1 finding of earlier hours. Earlier hours count as they were last judged; an earlier "
        "--since judges them again."
    )
    assert _summary(earlier=0, verdict_counts=[LOST]).sentence == "Not balanced: 2 lost."
    balanced = _summary(earlier=0, verdict_counts=[])
    assert balanced.sentence == "Balanced: all of 10 messages, 3 deliveries and 0 business rows are explained."
    assert "\nrecon_balanced 1\n" in metrics_text(balanced)


def test_a_balance_names_what_nobody_can_judge() -> None:
    unknown = replace(LATE, scope=Scope.MESSAGE, of="", state=State.UNKNOWN, severity=Severity.INFO, count=10)

    assert _summary(earlier=0, verdict_counts=[unknown, LATE]).sentence == (
        "Balanced: all of 10 messages, 3 deliveries and 0 business rows are explained, 10 of them as unknown, without "
        "the records to judge them by; 3 late to look at."
    )


@pytest.mark.spark
def test_a_later_span_ends_with_exit_status_1_while_an_earlier_finding_stands(
    spark: SparkSession, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "spark_reconcile.runs.reconciliation.run_windows", partial(run_windows, session=spark)
    )  # a Java of its own would take most of this test
    world = World()
    world.groups()
    for number in range(4):
        world.settled(age_ms=(2 + number % 2) * HOUR_MS)
    world.sent("lost", key=None, topic="newsletter", age_ms=5 * HOUR_MS)
    with_timed_ids(world)
    settings = replace(world.write(sqlite, tmp_path), rules=[], inboxes=[], output=tmp_path / "reconciliation")
    config = tmp_path / "reconcile.toml"
    config.write_text(
        f'[database]\nurl = "{sqlite.url}"\n[broker]\ndata = "broker"\n[grace]\nconfirm_after_seconds = 0\n'
    )

    first = run_windows(settings, since_ms=NOW_MS - 6 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait)
    asked = ["run", "--config", str(config), "--now-ms", str(NOW_MS), "--since", "4h", "--json"]
    capfd.readouterr()
    with pytest.raises(SystemExit) as later:
        main(["reconcile", *asked])

    assert first.sentence == "Not balanced: 1 lost."
    assert later.value.code == 1
    summary = json.loads(capfd.readouterr().out)
    assert (summary["findings"], summary["earlier_findings"], summary["balanced"]) == (0, 1, False)
    assert summary["sentence"].startswith("Not balanced: 1 finding of earlier hours.")


def _summary(*, earlier: int, verdict_counts: list[VerdictCount]) -> Summary:
    return Summary(
        run_id="r", judged_at_ms=NOW_MS, business_rows=0, messages=10, message_groups=3, stored=10, delivered=0,
        redelivered=0, acknowledged=0, resent=0, deduplicated_by_broker=0, deduplicated_by_inbox=0,
        verdict_counts=verdict_counts,
        windows=WindowCounts(
            since_ms=NOW_MS - HOUR_MS, until_ms=NOW_MS, windows=1, judged=1, open=0, not_closed=0, looked_at=2,
            resolved=0, earlier_findings=earlier,
        ),
    )  # fmt: skip
