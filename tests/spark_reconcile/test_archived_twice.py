"""Archive rows that are there twice are named, and neither sums nor a second look count them twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_reconcile import InboxSource, run, run_windows
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, TICKETS, World, archived, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.parametrize("hourly", [False, True])
def test_an_archive_row_that_is_there_twice_is_named_and_counted_once(
    sqlite: Database, tmp_path: Path, spark: SparkSession, *, hourly: bool
) -> None:
    world = World()
    world.groups()
    for _ in range(4):
        world.settled()
    world.archive[0].update(attempts=2, outcome="duplicate")
    lost = world.sent("lost", key=None, topic="newsletter")
    again = {**world.archive[1], "sent_at_us": world.archive[1]["sent_at_us"] + 1}
    moved = [world.archive[0], world.archive[-1]]
    world.archive.append(again)
    suspect = world.settled()  # in the table alone, from which a second look reads it once more
    world.archive[-1].update(attempts=2, outcome="duplicate")
    world.inbox[:] = [row for row in world.inbox if row["message_id"] != suspect]
    settings = archived(world.write(sqlite, tmp_path), tmp_path / "moved", moved)
    settings = replace(settings, inboxes=[InboxSource(group=TICKETS, complete_since_ms=1)])

    if hourly:
        summary = run_windows(settings, since_ms=NOW_MS - 2 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait)
    else:
        summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)

    assert {one.id: one.rule for one in summary.examples if one.state == "lost"} == {
        lost: "not_in_broker", suspect: "acknowledged_not_handled"
    }  # fmt: skip
    assert {(one.scope, one.rule): one.count for one in summary.verdict_counts if one.scope == "message"} == {
        ("message", "stored"): 3, ("message", "archived_twice"): 2, ("message", "not_in_broker"): 1,
    }, "the suspect's row was read twice, and stands there once"  # fmt: skip
    assert (summary.findings, summary.messages, summary.resent, summary.deduplicated_by_broker) == (2, 6, 2, 2)
