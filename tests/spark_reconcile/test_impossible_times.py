"""Times that cannot be true are named on their source, and decide no verdict, no chart and no completeness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from spark_reconcile import Settings, Summary, run, run_windows
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, PAID, TICKETS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CENTURIES_MS = 10_413_792_000_000
"""2300-01-01"""
HASTY_DUE_MS = NOW_MS - 20 * MINUTE_MS


@pytest.mark.spark
def test_a_time_that_cannot_be_true_is_named_and_neither_pending_for_centuries_nor_an_axis_from_1970(
    sqlite: Database, tmp_path: Path, spark: SparkSession
) -> None:
    world = _world()
    for paid_at_ms in (-5, CENTURIES_MS):
        world.order()
        world.orders[-1]["paid_at_us"] = paid_at_ms * 1000
    world.unsent("unsent", key=str(world.order()))
    world.outbox[-1]["created_at_us"] = CENTURIES_MS * 1000
    world.sent("lost", key=str(world.order()))
    world.archive[-1]["sent_at_us"] = CENTURIES_MS * 1000
    world.sent("sent before", key=None, topic="newsletter")
    world.archive[-1]["sent_at_us"] -= 10_000_000
    world.store("sent before", key=None, topic="newsletter")
    world.sent("of 1970", key=None, topic="newsletter")
    world.store("of 1970", key=None, topic="newsletter")
    world.stored[-1] = msgspec.structs.replace(world.stored[-1], stored_at_ms=1_000)
    _handled_in_1970_though_it_was_due_later(world)
    _purge_an_effect_and_date_another_back(world)

    summary = run(world.write(sqlite, tmp_path), session=spark, now_ms=NOW_MS, pause=no_wait)

    assert _rules(summary) == {
        ("business", "impossible_time", 2), ("message", "not_sent", 1), ("business", "message_unsent", 1),
        ("message", "not_in_broker", 1), ("business", "message_lost", 1), ("message", "stored", 8),
        ("business", "announced", 6), ("delivery", "done", 11), ("delivery", "inbox_out_of_reach", 1),
    }, "no source is complete since 1970 because one of its rows says so"  # fmt: skip
    notes = _notes(summary)
    assert "3 of 10 rows have a time that cannot be true" in notes["business paid orders are announced"]
    assert "(the first: 5 at 1969-12-31T23:59:59+00:00)" in notes["business paid orders are announced"]
    assert "2 of 5 rows" in notes["inbox tickets"]
    assert "(the first: hasty at 1970-01-01" in notes["inbox tickets"]
    assert "1 of 1 rows" in notes["outbox unsent messages"]
    assert "(the first: lost at 2300-01-01" in notes["archive sent messages"]
    assert "1 rows were sent before they were created (e.g. sent before)" in notes["archive sent messages"]
    assert "(the first: of 1970 at 1970-01-01T00:00:01+00:00)" in notes["broker message log"]
    assert notes["broker action log"] == ""
    assert summary.flow is not None
    assert summary.flow.axis.start_ms >= NOW_MS - 25 * HOUR_MS
    assert sum(summary.flow.events["stored"].values()) == 7, "those of 1970 are on no axis"
    assert max(one.longest_ms for one in summary.latencies) < 24 * HOUR_MS
    page = (Path(summary.folder) / "report.html").read_text()
    assert all("1970-" not in drawing.partition("</svg>")[0] for drawing in page.split("<svg")[1:])


@pytest.mark.spark
def test_by_the_hour_a_row_with_such_a_time_still_asks_for_its_message_an_effect_counts_and_no_reach_is_of_1970(
    sqlite: Database, tmp_path: Path, spark: SparkSession
) -> None:
    world = _world()
    _purge_an_effect_and_date_another_back(world)
    world.sent("of nowhere", key=None, topic="newsletter")
    world.archive[-1].update(created_at_us=-1_000_000, sent_at_us=-1_000_000)

    summary = _by_the_hour(world.write(sqlite, tmp_path), spark)

    assert summary.balanced, summary.sentence
    assert _rules(summary) == {
        ("message", "stored", 5), ("business", "announced", 5), ("delivery", "done", 9),
        ("delivery", "inbox_out_of_reach", 1),
    }  # fmt: skip
    notes = _notes(summary)
    assert "1 of 5 rows have a time that cannot be true" in notes["business paid orders are announced"]
    assert "1 of 4 rows have a time that cannot be true" in notes["inbox tickets"]
    assert "(the first: of nowhere at 1969-12-31T23:59:59+00:00)" in notes["archive sent messages"]


def _world() -> World:
    """Three orders for which all is well, and one whose time is of another unit: its message is there."""
    world = World()
    world.groups()
    for _ in range(4):
        world.settled()
    world.orders[-1]["paid_at_us"] = (NOW_MS - HOUR_MS) // 1000
    return world


def _purge_an_effect_and_date_another_back(world: World) -> None:
    old = world.settled(age_ms=100 * MINUTE_MS)
    world.inbox[:] = [row for row in world.inbox if row["message_id"] != old]
    world.inbox[0]["handled_at_us"] = 5_000_000


def _handled_in_1970_though_it_was_due_later(world: World) -> None:
    order = world.order()
    world.sent("hasty", key=str(order), deliver_at_ms=HASTY_DUE_MS)
    world.store("hasty", key=str(order), deliver_at_ms=HASTY_DUE_MS, scheduled=True)
    sequence = world.fire("hasty", age_ms=20 * MINUTE_MS, topic=PAID)
    for group in (TICKETS, MAIL):
        world.done("hasty", sequence, group, age_ms=20 * MINUTE_MS)
    world.inbox[-1]["handled_at_us"] = 5_000_000


def _by_the_hour(settings: Settings, spark: SparkSession) -> Summary:
    return run_windows(
        replace(settings, complete_since_ms=1), since_ms=NOW_MS - 2 * HOUR_MS, now_ms=NOW_MS, session=spark,
        pause=no_wait,
    )  # fmt: skip


def _notes(summary: Summary) -> dict[str, str]:
    return {f"{one.source} {one.what}": one.note for one in summary.inputs}


def _rules(summary: Summary) -> set[tuple[str, str, int]]:
    counts: dict[tuple[str, str], int] = {}
    for one in summary.verdict_counts:
        counts[one.scope, one.rule] = counts.get((one.scope, one.rule), 0) + one.count
    return {(*place, count) for place, count in counts.items()}
