"""A whole run looks twice, as one by the hour does: what came between both looks is no finding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from messaging import journal
from spark_reconcile import Settings, Summary, run, second_look
from spark_reconcile.sources.segments import survey
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MAIL, NOW_MS, PAID, TICKETS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
_PLAIN = {"stored", "done", "announced"}
_COUNTS = ("messages", "message_groups", "stored", "delivered", "acknowledged", "business_rows", "sentence", "books")


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
        _stored(world, f"of-{slow}", slow, archived=True)
        world.write_tables(sqlite)
        _append(settings, "messages", world.stored[known[0] :])
        _append(settings, "actions", world.actions[known[1] :])

    waiting = replace(settings, grace=replace(settings.grace, confirm_after_seconds=7))
    summary = run(waiting, session=spark, now_ms=NOW_MS, pause=pause)
    again = run(settings, session=spark, now_ms=NOW_MS, pause=_never)

    assert waits == [7]
    assert (summary.resolved, summary.sentence) == (3, "Not balanced: 1 lost.")
    assert _findings(summary) == {(f"of-{lost}", "not_in_broker", True), (str(lost), "message_lost", True)}
    assert [getattr(summary, name) for name in _COUNTS] == [getattr(again, name) for name in _COUNTS]
    folder = Path(summary.folder)
    assert json.loads((folder / "run.json").read_text())["resolved"] == 3
    assert "3 suspects were cleared by a second look" in (folder / "report.html").read_text()
    assert pq.read_table(folder / "verdicts").num_rows == summary.messages + summary.message_groups


def test_more_suspects_than_are_looked_at_again_are_findings_that_nobody_confirmed(
    spark: SparkSession, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _world()
    for _ in range(3):
        order = world.order()
        world.sent(f"of-{order}", key=str(order))
    settings = world.write(sqlite, tmp_path)

    monkeypatch.setattr(second_look, "SUSPECTS_MAX", 2)
    summary = run(settings, session=spark, now_ms=NOW_MS, pause=_never)

    assert (summary.resolved, summary.sentence) == (0, "Not balanced: 3 lost.")
    assert {confirmed for *_, confirmed in _findings(summary)} == {False}


def _world() -> World:
    world = World()
    world.groups()
    for _ in range(3):
        world.settled(age_ms=2 * HOUR_MS)
    return world


def _stored(world: World, message: str, order: int, *, archived: bool = False) -> None:
    """The rest of the message's way."""
    if not archived:
        world.sent(message, key=str(order))
    sequence = world.store(message, key=str(order))
    for group in (TICKETS, MAIL):
        world.done(message, sequence, group, age_ms=HOUR_MS, topic=PAID)


def _append(settings: Settings, log: str, records: list[Any]) -> None:
    with Path(survey(settings.broker_data, log)[-1].path).open("ab") as file:
        file.write(b"".join(journal.frame(journal.encode_record(record)) for record in records))


def _findings(summary: Summary) -> set[tuple[str, str, bool]]:
    folder = Path(summary.folder)
    rows = [*pq.read_table(folder / "verdicts").to_pylist(), *pq.read_table(folder / "business_verdicts").to_pylist()]
    return {
        (row.get("message_id") or row["message_key"], row["rule"], row["confirmed"])
        for row in rows
        if row["rule"] not in _PLAIN
    }


def _never(_: float) -> None:
    """No time passes, and nothing comes meanwhile."""
