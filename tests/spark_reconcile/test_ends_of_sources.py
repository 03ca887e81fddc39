"""Where a source begins or ends by its settings: two clocks decide, and within what they may differ all is unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_reconcile import CompletenessBound, Grace, InboxSource, Summary, run, run_windows
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, TICKETS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BEGIN_MS, SKEW_MS = NOW_MS - 3 * HOUR_MS, 5_000
END_MS = NOW_MS // HOUR_MS * HOUR_MS - HOUR_MS + SKEW_MS
"""So long after the end of an hour that every source is complete for it."""
GRACE = Grace(seconds=2, late_after_seconds=120, clock_skew_seconds=SKEW_MS / 1000, confirm_after_seconds=0)
"""A grace time below the skew: it covers no clock."""
Verdict = tuple[str, str]


@pytest.mark.spark
def test_what_a_source_may_have_had_before_it_begins_by_its_database_s_clock_is_unknown_and_later_it_is_lost(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    for name, at_ms in {"just-within": BEGIN_MS + SKEW_MS - 1, "beyond": BEGIN_MS + SKEW_MS}.items():
        _acknowledged(world, f"{name}-unhandled", at_ms)
        world.store(f"{name}-unasked", key=f"none-{name}", age_ms=NOW_MS - at_ms)
        world.store(f"{name}-unrecorded", key=None, topic="newsletter", age_ms=NOW_MS - at_ms + 10)
    settings = world.write(sqlite, tmp_path)
    settings = replace(
        settings, grace=GRACE, rules=[replace(rule, complete_since_ms=BEGIN_MS) for rule in settings.rules],
        inboxes=[InboxSource(group=TICKETS, complete_since_ms=BEGIN_MS)], complete_since_ms=BEGIN_MS,
    )  # fmt: skip

    whole = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)
    by_the_hour = run_windows(
        replace(settings, output=tmp_path / "hours"), since_ms=NOW_MS - 5 * HOUR_MS, now_ms=NOW_MS, session=spark,
        pause=no_wait,
    )  # fmt: skip

    for summary in (whole, by_the_hour):
        assert _rules(summary, "lost", "phantom") == {
            ("beyond-unhandled", "acknowledged_not_handled"), ("beyond-unasked", "no_business_row"),
            ("beyond-unrecorded", "unrecorded"),
        }  # fmt: skip
        counts = {one.rule: one.count for one in summary.verdict_counts if one.state == "unknown"}
        assert counts == {"inbox_out_of_reach": 1, "business_out_of_reach": 1, "archive_out_of_reach": 1}


@pytest.mark.spark
def test_what_a_source_may_get_after_it_ends_by_its_database_s_clock_is_pending_and_earlier_it_is_lost(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    for name, at_ms in {"just-within": END_MS - SKEW_MS + 1, "before": END_MS - SKEW_MS}.items():
        _acknowledged(world, f"{name}-unhandled", at_ms)
        world.store(f"{name}-unasked", key=f"none-{name}", age_ms=NOW_MS - at_ms)
        world.store(f"{name}-unrecorded", key=None, topic="newsletter", age_ms=NOW_MS - at_ms + 10)
    settings = replace(world.write(sqlite, tmp_path), grace=GRACE, until=CompletenessBound(complete_until_ms=END_MS))

    whole = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)
    by_the_hour = run_windows(
        replace(settings, output=tmp_path / "hours"), since_ms=NOW_MS - 5 * HOUR_MS, now_ms=NOW_MS, session=spark,
        pause=no_wait,
    )  # fmt: skip

    for summary, of_the_hour_that_is_open in ((whole, {"before-unasked": "no_business_row"}), (by_the_hour, {})):
        assert _rules(summary, "lost", "phantom") == {
            ("before-unhandled", "acknowledged_not_handled"), ("before-unrecorded", "unrecorded"),
            *of_the_hour_that_is_open.items(),
        }  # fmt: skip
        counts = {one.rule: one.count for one in summary.verdict_counts if one.rule.endswith("_behind")}
        assert counts == {
            "inbox_replica_behind": 1, "outbox_replica_behind": 1,
            **dict.fromkeys(["business_replica_behind"] * len(of_the_hour_that_is_open), 1),
        }  # fmt: skip


def _world() -> World:
    """Messages for which all is well around the ends, and a topic without a rule."""
    world = World()
    world.groups()
    for age_ms in (4 * HOUR_MS, 2 * HOUR_MS):
        world.settled(age_ms=age_ms)
        world.sent(f"news-{age_ms}", key=None, topic="newsletter", age_ms=age_ms)
        world.store(f"news-{age_ms}", key=None, topic="newsletter", age_ms=age_ms)
    return world


def _acknowledged(world: World, message: str, at_ms: int) -> None:
    """Acknowledged by both groups, the second at this time, and handled by neither."""
    age_ms = NOW_MS - at_ms
    order = world.order(age_ms=age_ms + MINUTE_MS)
    world.sent(message, key=str(order), age_ms=age_ms + MINUTE_MS)
    sequence = world.store(message, key=str(order), age_ms=age_ms + MINUTE_MS)
    world.done(message, sequence, MAIL, age_ms=age_ms + MINUTE_MS)
    world.deliver(message, sequence, TICKETS, age_ms=age_ms + MINUTE_MS - 20)
    world.ack(message, sequence, TICKETS, age_ms=age_ms)


def _rules(summary: Summary, *states: str) -> set[Verdict]:
    return {(one.id, one.rule) for one in summary.examples if one.state in states}
