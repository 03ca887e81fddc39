"""A whole run looks twice, as one by the hour does: what came between both looks is no finding."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from spark_reconcile import Summary, run, run_windows
from spark_reconcile.core.settings import RunLimits
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MAIL, NOW_MS, PAID, TICKETS, World, append, archived, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
_PLAIN = {"stored", "done", "announced"}


def test_what_arrives_between_both_looks_of_a_whole_run_is_no_finding(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    slow, lost, ahead = world.order(), world.order(), world.order()
    for order in (slow, lost):
        world.sent(f"of-{order}", key=str(order))
    _stored(world, f"of-{ahead}", ahead)
    late_row = world.orders.pop()
    settings = world.write(sqlite, tmp_path)
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        world.orders.append(late_row)
        known = len(world.stored), len(world.actions)
        _stored(world, f"of-{slow}", slow, is_sent=True)
        world.write_tables(sqlite)
        append(settings, "messages", world.stored[known[0] :])
        append(settings, "actions", world.actions[known[1] :])

    waiting = replace(settings, grace=replace(settings.grace, confirm_after_seconds=7))
    summary = run(waiting, session=spark, now_ms=NOW_MS, pause=pause)

    assert waits == [7]
    assert (summary.resolved, summary.sentence) == (3, "Not balanced: 1 lost.")
    assert _findings(summary) == {(f"of-{lost}", "not_in_broker", True), (str(lost), "message_lost", True)}
    assert (summary.business_rows, summary.messages, summary.stored) == (6, 6, 5)
    assert (summary.message_groups, summary.delivered, summary.acknowledged) == (10, 10, 10)
    assert _counts(summary) == {
        "stored": 5, "not_in_broker": 1, "done": 10, "announced": 5, "message_lost": 1
    }, "each is counted as the second look found it"  # fmt: skip
    folder = Path(summary.folder)
    assert json.loads((folder / "run.json").read_text())["resolved"] == 3
    assert "3 suspects were cleared by a second look" in (folder / "report.html").read_text()
    assert pq.read_table(folder / "verdicts").num_rows == summary.messages + summary.message_groups


def test_more_suspects_than_are_looked_at_again_are_findings_that_nobody_confirmed(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    for _ in range(3):
        order = world.order()
        world.sent(f"of-{order}", key=str(order))
    settings = replace(world.write(sqlite, tmp_path), limits=RunLimits(suspects_max=2))

    summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)

    assert (summary.resolved, summary.sentence) == (0, "Not balanced: 3 lost.")
    assert {confirmed for *_, confirmed in _findings(summary)} == {False}


@pytest.mark.parametrize("looked_at", ["whole", "by the hour"])
def test_what_came_between_both_looks_is_searched_with_what_an_archive_of_files_has(
    spark: SparkSession, sqlite: Database, tmp_path: Path, looked_at: str
) -> None:
    world = _world()
    slow, lost, changed = world.order(), world.order(), world.order()
    for order in (slow, lost, changed):
        world.sent(f"of-{order}", key=str(order))
    _stored(world, f"of-{changed}", changed, body="another", is_sent=True)
    sent = [world.archive.pop() for _ in range(len(world.archive))]
    settings = archived(world.write(sqlite, tmp_path), tmp_path / "archive", sent)

    def pause(_: float) -> None:
        known = len(world.stored), len(world.actions)
        _stored(world, f"of-{slow}", slow, is_sent=True)
        _stored(world, "another", 1_000, is_sent=True)
        world.write_tables(sqlite)
        append(settings, "messages", world.stored[known[0] :])
        append(settings, "actions", world.actions[known[1] :])

    if looked_at == "whole":
        summary = run(settings, session=spark, now_ms=NOW_MS, pause=pause)
        resolved = summary.resolved
    else:
        summary = run_windows(settings, since_ms=NOW_MS - 5 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=pause)
        assert summary.windows is not None
        resolved = summary.windows.resolved

    assert (resolved, summary.sentence) == (2, "Not balanced: 1 lost, 1 mismatch.")
    assert {one.id: one.rule for one in summary.examples} == {
        f"of-{lost}": "not_in_broker", f"of-{changed}": "body_differs"
    }  # fmt: skip
    assert {one.rule: one.count for one in summary.verdict_counts if one.rule not in _PLAIN} == {
        "not_in_broker": 1, "message_lost": 1, "body_differs": 1, "message_mismatch": 1
    }  # fmt: skip


def test_rows_that_came_under_a_key_between_both_looks_ask_for_messages_too(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    orders = [world.order(remind_at_ms=7) for _ in range(3)]
    world.order()
    world.sent("lost", key="7000")
    settings = world.write(sqlite, tmp_path)
    settings = replace(settings, rules=[replace(settings.rules[0], key_column="remind_at_us")])

    def pause(_: float) -> None:
        orders.extend(world.order(remind_at_ms=7) for _ in range(20))
        world.write_tables(sqlite)

    summary = run_windows(settings, since_ms=NOW_MS - 5 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=pause)

    found = {one.rule: one.count for one in summary.verdict_counts if one.rule not in _PLAIN}
    beside = {"no_key": 4, "no_business_row": 3}
    assert found == {**beside, "not_in_broker": 1, "too_few_messages": len(orders)}


def _world() -> World:
    world = World()
    world.groups()
    for _ in range(3):
        world.settled(age_ms=2 * HOUR_MS)
    return world


def _stored(world: World, message: str, order: int, *, body: str | None = None, is_sent: bool = False) -> None:
    """The rest of the message's way."""
    if not is_sent:
        world.sent(message, key=str(order))
    sequence = world.store(message, key=str(order), body=body)
    for group in (TICKETS, MAIL):
        world.done(message, sequence, group, age_ms=HOUR_MS, topic=PAID)


def _counts(summary: Summary) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for one in summary.verdict_counts:
        counts[one.rule] += one.count
    return dict(counts)


def _findings(summary: Summary) -> set[tuple[str, str, bool]]:
    folder = Path(summary.folder)
    rows = [*pq.read_table(folder / "verdicts").to_pylist(), *pq.read_table(folder / "business_verdicts").to_pylist()]
    return {
        (row.get("message_id") or row["message_key"], row["rule"], row["confirmed"])
        for row in rows
        if row["rule"] not in _PLAIN
    }
