"""The report's tiles say the numbers of its headline: findings of all kinds, of earlier hours, and unjudged hours."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from spark_reconcile import Summary
from spark_reconcile.report.page import page_of
from spark_reconcile.results.run_figures import verdict_count
from spark_reconcile.results.summary import UnjudgedHours, WindowCounts
from spark_reconcile.rules.verdict_rule import Scope

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000


def test_the_tiles_of_findings_add_up_to_the_number_in_the_headline() -> None:
    summary = _summary(
        (Scope.MESSAGE, "not_in_broker", 3), (Scope.BUSINESS, "message_lost", 3), (Scope.BUSINESS, "no_key", 5),
        (Scope.BUSINESS, "no_message", 2), (Scope.BUSINESS, "message_out_of_reach", 40), (Scope.MESSAGE, "in_grace", 7),
        (Scope.DELIVERY, "dead", 4), (Scope.DELIVERY, "done", 100),
    )  # fmt: skip

    tiles, styles = _tiles(summary)

    assert summary.sentence == "Not balanced: 5 lost, 5 unknown."
    assert {name: tiles[name] for name in ("findings", "lost", "unknown", "dead", "pending")} == {
        "findings": 10, "lost": 5, "unknown": 5, "dead": 4, "pending": 7,
    }  # fmt: skip
    assert {name for name, style in styles.items() if style == "finding"} == {"findings", "lost", "unknown"}
    assert {name for name, style in styles.items() if style == "attention"} == {"dead"}


def test_the_tiles_say_how_many_deliveries_the_headline_speaks_of() -> None:
    summary = replace(_summary((Scope.DELIVERY, "waiting", 9)), message_groups=9, delivered=4)

    tiles, _ = _tiles(summary)

    assert "9 deliveries" in summary.sentence
    assert (tiles["deliveries"], tiles["delivered"], tiles["findings"]) == (9, 4, 0)


@pytest.mark.parametrize("earlier", [0, 6])
def test_findings_of_earlier_hours_and_unjudged_hours_have_tiles(earlier: int) -> None:
    counts = WindowCounts(
        since_ms=NOW_MS - HOUR_MS, until_ms=NOW_MS, windows=1, judged=1, open=0, not_closed=0, looked_at=0, resolved=0,
        earlier_findings=earlier,
    )  # fmt: skip
    gone = UnjudgedHours(source="archive", what="sent messages", hours=3, open_hours=0, since_ms=1, until_ms=9)
    summary = replace(_summary((Scope.MESSAGE, "stored", 5)), windows=counts, unjudged=[gone])

    tiles, styles = _tiles(summary)

    assert tiles["archive: hours unjudged"] == 3
    assert styles["archive: hours unjudged"] == "attention"
    assert tiles.get("findings of earlier hours", 0) == earlier
    assert styles.get("findings of earlier hours", "finding") == "finding"


def _tiles(summary: Summary) -> tuple[dict[str, int], dict[str, str]]:
    """The numbers and the classes of the page's tiles, by their names."""
    listed = page_of(summary).partition('<dl class="tiles">')[2].partition("</dl>")[0]
    found = re.findall(r'<div(?: class="(\w+)")?><dd>([\d,]+)</dd><dt>([^<]+)</dt>', listed)
    return {name: int(number.replace(",", "")) for _, number, name in found}, {name: style for style, _, name in found}


def _summary(*verdict_counts: tuple[Scope, str, int]) -> Summary:
    return Summary(
        run_id="r", judged_at_ms=NOW_MS, business_rows=0, messages=0, message_groups=0, stored=0, delivered=0,
        redelivered=0, acknowledged=0, resent=0, deduplicated_by_broker=0, deduplicated_by_inbox=0,
        verdict_counts=[verdict_count(scope, "t", "", rule, count=count) for scope, rule, count in verdict_counts],
    )  # fmt: skip
