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
    settings = archived(world.write(sqlite, tmp_path), tmp_path / "moved", moved)

    if hourly:
        summary = run_windows(settings, since_ms=NOW_MS - 2 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait)
    else:
        summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)

    assert lost == "lost"
    assert {(one.scope, one.rule): one.count for one in summary.books if one.scope == "message"} == {
        ("message", "stored"): 2, ("message", "archived_twice"): 2, ("message", "not_in_broker"): 1,
    }  # fmt: skip
    assert (summary.findings, summary.messages, summary.resent, summary.deduplicated_by_broker) == (1, 5, 1, 1)


@pytest.mark.spark
def test_a_second_look_counts_the_archive_rows_of_a_table_once_where_others_stand_in_files(
    sqlite: Database, tmp_path: Path, spark: SparkSession
) -> None:
    world = World()
    world.groups()
    suspect, moved = world.settled(), world.settled()
    world.archive[0].update(attempts=2, outcome="duplicate")
    world.inbox[:] = [row for row in world.inbox if row["message_id"] != suspect]
    settings = archived(world.write(sqlite, tmp_path), tmp_path / "moved", [world.archive[1]])
    settings = replace(settings, inboxes=[InboxSource(group=TICKETS, complete_since_ms=1)])

    summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)

    rules = {one.rule: one.count for one in summary.books if one.scope == "message"}
    assert moved != suspect
    assert rules == {"stored": 1, "archived_twice": 1}, "the suspect's row was read twice, and stands there once"
    assert summary.findings == 1
    assert (summary.resent, summary.deduplicated_by_broker) == (1, 1)
