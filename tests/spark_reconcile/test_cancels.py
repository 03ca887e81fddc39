"""Cancels in the books: what became of one is judged in the hour of its row, and of its message in the message's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from outbox_core.journal import journal
from spark_reconcile import Settings, Summary, run, run_windows
from spark_reconcile.repair.apply import apply_repairs
from spark_reconcile.repair.findings import confirmed_suspects, hour_folders
from spark_reconcile.repair.plan import RepairAction, plan_repairs
from spark_reconcile.results.window_store import WindowStore
from tests.fixtures.databases import Database
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, REMINDER, World, append, archived, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINCE_MS = NOW_MS - 5 * HOUR_MS
TAKEN = "canceled"


@pytest.mark.spark
@pytest.mark.parametrize("in_files", [False, True], ids=["archive table", "parquet archive"])
def test_an_answer_that_comes_later_opens_the_hour_of_the_message_that_was_handed_out_all_the_same(
    spark: SparkSession, sqlite: Database, tmp_path: Path, in_files: bool
) -> None:
    world = _world()
    handed_out = _reminded(world, "handed-out", age_ms=4 * HOUR_MS)
    world.done("handed-out", handed_out, MAIL, age_ms=3 * HOUR_MS, topic=REMINDER)
    world.sent_cancel("broken", "handed-out", TAKEN, age_ms=2 * HOUR_MS)
    world.sent_cancel("too-late", "handed-out", "too_late", age_ms=2 * HOUR_MS)
    with_timed_ids(world)
    message, broken, too_late = (row["id"] for row in world.archive[-3:])
    answers = world.archive[-2:]
    del world.archive[-2:]
    settings = world.write(sqlite, tmp_path)
    before = _run(settings, spark)

    if in_files:
        settings = archived(settings, tmp_path / "archive", answers)
    else:
        world.archive += answers
        world.write_tables(sqlite)
    summary = _run(settings, spark, now_ms=NOW_MS + MINUTE_MS)
    whole = run(replace(settings, output=tmp_path / "whole"), session=spark, now_ms=NOW_MS + MINUTE_MS)

    assert before.balanced
    assert summary.windows is not None
    assert (summary.windows.judged, summary.sentence) == (2, "Not balanced: 1 lost, 1 phantom.")
    assert _found(settings) == _found_in(whole) == {
        (message, "", "canceled"), (message, MAIL, "handed_out_after_cancel"), (broken, "", "cancel_not_noted"),
        (too_late, "", "cancel_without_effect"),
    }  # fmt: skip
    (lost,) = [one for one in summary.examples if one.rule == "cancel_not_noted"]
    assert (lost.id, lost.key, lost.topic) == (broken, message, "(cancels)")


@pytest.mark.spark
def test_a_note_that_comes_by_the_second_look_clears_its_cancel(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    world.sent("scheduled", key=None, topic="newsletter", age_ms=2 * HOUR_MS, deliver_at_ms=NOW_MS + HOUR_MS)
    world.store("scheduled", key=None, topic="newsletter", age_ms=2 * HOUR_MS, deliver_at_ms=NOW_MS + HOUR_MS,
                scheduled=True)  # fmt: skip
    world.sent_cancel("noted late", "scheduled", TAKEN, age_ms=2 * HOUR_MS)
    world.sent_cancel("forgotten", "of no message here", TAKEN, age_ms=2 * HOUR_MS)
    with_timed_ids(world)
    message, late, forgotten = (row["id"] for row in world.archive[-3:])
    settings = world.write(sqlite, tmp_path)

    def note(_: float) -> None:
        append(settings, "actions", [journal.Canceled(at_ms=NOW_MS, ids=[message])])

    summary = _run(settings, spark, pause=note)

    assert summary.windows is not None
    assert (summary.windows.resolved, summary.sentence) == (1, "Not balanced: 1 lost.")
    assert _found(settings) == {
        (message, "", "canceled"), (late, "", "cancel_taken"), (forgotten, "", "cancel_not_noted")
    }  # fmt: skip


@pytest.mark.spark
def test_a_cancel_that_was_not_sent_is_told_whatever_its_age_and_made_due_by_a_repair(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    world = _world()
    world.unsent_cancel("of the span", "a message", age_ms=2 * HOUR_MS)
    world.unsent_cancel("of last week", "a message", age_ms=200 * HOUR_MS)
    world.unsent_cancel("refused", "a message", age_ms=2 * HOUR_MS, state="parked")
    far_us = (NOW_MS + 365 * 24 * HOUR_MS) * 1000
    for row in world.outbox:
        row["due_at_us"] = far_us
    with_timed_ids(world)
    settings = world.write(database, tmp_path)
    of_span, older, refused = (row["id"] for row in world.outbox)

    summary = _run(settings, spark)
    suspects = confirmed_suspects(hour_folders(settings.output, since_ms=SINCE_MS, until_ms=NOW_MS))
    repairs = plan_repairs(settings, suspects, repairs_max=10)
    done = apply_repairs(repairs)

    assert summary.sentence == "Not balanced: 2 unsent."
    assert {one.id: one.rule for one in summary.examples} == {
        of_span: "not_sent", older: "not_sent", refused: "parked"
    }  # fmt: skip
    assert [(one.message_id, one.action) for one in repairs] == [(of_span, RepairAction.MAKE_DUE)]
    assert done == repairs
    assert _due(database)[of_span] < far_us == _due(database)[refused]


def _world() -> World:
    world = World()
    world.groups()
    for number in range(6):
        world.settled(age_ms=4 * HOUR_MS - number * MINUTE_MS)
    return world


def _reminded(world: World, message: str, *, age_ms: int) -> int:
    """A scheduled message that fell due an hour after it was made; its sequence."""
    due_ms = NOW_MS - age_ms + HOUR_MS
    order = world.order(status="BOOKED", remind_at_ms=due_ms, age_ms=age_ms)
    world.sent(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, age_ms=age_ms)
    world.store(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, scheduled=True, age_ms=age_ms)
    return world.fire(message, age_ms=age_ms - HOUR_MS)


def _run(settings: Settings, spark: SparkSession, *, now_ms: int = NOW_MS, pause: Any = no_wait) -> Summary:
    return run_windows(settings, since_ms=SINCE_MS, now_ms=now_ms, session=spark, pause=pause)


def _found(settings: Settings) -> set[tuple[str, str, str]]:
    store = WindowStore(settings.output)
    folders = [store.folder(start) / "verdicts" for start in store.windows]
    return set().union(*(_unsettled(folder) for folder in folders if folder.exists()))


def _found_in(whole: Summary) -> set[tuple[str, str, str]]:
    return _unsettled(Path(whole.folder) / "verdicts")


def _unsettled(folder: Path) -> set[tuple[str, str, str]]:
    rows = pq.read_table(folder).to_pylist()
    found = {(row["message_id"], row["consumer_group"] or "", row["rule"]) for row in rows}
    return {one for one in found if one[2] not in {"stored", "done"}}


def _due(database: Database) -> dict[str, int]:
    table = f"{database.schema}.message" if database.schema else "outbox_message"
    engine = create_engine(database.url)
    try:
        with engine.connect() as connection:
            return {row.id: row.due_at_us for row in connection.execute(text(f"SELECT id, due_at_us FROM {table}"))}
    finally:
        engine.dispose()
