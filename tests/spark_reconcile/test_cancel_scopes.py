"""Cancels that are good for some topics: they say nothing of messages on others, whatever their ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from outbox_broker.common.cancel_topic_patterns import covers
from outbox_core.journal import journal
from outbox_core.journal.journal import Frame
from spark_reconcile import run, run_windows
from spark_reconcile.sources.log_records import action_rows
from tests.fixtures.databases import Database
from tests.spark_reconcile.test_cancels import SINCE_MS, _found, _found_in, _world
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, REMINDER, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CANCELS = {
    "on its topic": ([REMINDER], (REMINDER,)),
    "before it came": ([""], ("order.*", REMINDER)),
    "before it came, on all": ([""], None),
    "of the version before": ([], None),
    "on another topic": (["lim.a"], ("lim.*",)),
    "on others before it came": ([""], ("lim.*", "x.?")),
}
ANSWERED = {"noted": ([REMINDER], (REMINDER,)), "noted of another": (["lim.a"], ("lim.*",))}
"""Cancels whose own archive has the broker's answer that they were taken."""
NOT_CANCELED = {"on another topic", "on others before it came"}


@pytest.mark.spark
def test_a_cancel_settles_the_message_of_its_topics_and_no_other_of_its_id(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    for name in CANCELS | ANSWERED:
        _scheduled(world, name)
    for name, (topics, scope) in (CANCELS | ANSWERED).items():
        world.actions.append(journal.Canceled(at_ms=NOW_MS - 3 * HOUR_MS, ids=[name], topics=topics, scope=scope))
    for name in ANSWERED:
        world.sent_cancel(f"cancel {name}", name, "canceled", age_ms=3 * HOUR_MS)
    before = [row["id"] for row in world.archive]
    with_timed_ids(world)
    names = {row["id"]: name for row, name in zip(world.archive, before, strict=True)}
    settings = world.write(sqlite, tmp_path)

    summary = run_windows(settings, since_ms=SINCE_MS, now_ms=NOW_MS, session=spark, pause=no_wait)
    whole = run(replace(settings, output=tmp_path / "whole"), session=spark, now_ms=NOW_MS)

    assert _found(settings) == _found_in(whole)
    rules = {(names[one], rule) for one, _, rule in _found_in(whole)}
    assert rules == {
        *((name, "not_fired" if name in NOT_CANCELED else "canceled") for name in CANCELS),
        *((name, "canceled") for name in ANSWERED),
        ("cancel noted", "cancel_taken"),
        ("cancel noted of another", "cancel_not_noted"),
    }
    assert summary.sentence == "Not balanced: 1 lost."


@pytest.mark.spark
def test_a_cancel_for_one_of_two_topics_with_the_same_id_is_noted_and_takes_that_one_back(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    due_ms = NOW_MS - 2 * HOUR_MS
    _scheduled(world, "twice")
    world.sent("twice", key="k", topic="lim.a", deliver_at_ms=due_ms, age_ms=5 * HOUR_MS)
    world.store("twice", key="k", topic="lim.a", deliver_at_ms=due_ms, scheduled=True, age_ms=5 * HOUR_MS)
    world.actions.append(
        journal.Canceled(at_ms=NOW_MS - 3 * HOUR_MS, ids=["twice"], topics=["lim.a"], scope=("lim.*",))
    )
    world.sent_cancel("cancel", "twice", "canceled", age_ms=3 * HOUR_MS)

    summary = run(world.write(sqlite, tmp_path), session=spark, now_ms=NOW_MS)

    table = pq.read_table(Path(summary.folder) / "verdicts", filters=[("message_id", "in", ["twice", "cancel"])])
    rules = {(row["topic"], row["scope"], row["rule"]) for row in table.to_pylist()}
    assert rules == {
        (REMINDER, "message", "stored"), (REMINDER, "delivery", "not_fired"), ("lim.a", "message", "canceled"),
        ("(cancels)", "message", "cancel_taken"),
    }  # fmt: skip


def _scheduled(world: World, message: str) -> None:
    """A message that was due two hours ago, and that never fell due."""
    due_ms = NOW_MS - 2 * HOUR_MS
    order = world.order(status="BOOKED", remind_at_ms=due_ms, age_ms=4 * HOUR_MS)
    world.sent(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, age_ms=4 * HOUR_MS)
    world.store(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, scheduled=True, age_ms=4 * HOUR_MS)


@pytest.mark.spark
@pytest.mark.parametrize("scope", [("lim.*", "x.?"), ("[ab].c",), ("a-b_c",), ("a.b",), ("*.end", "begin.*.end")])
def test_the_rows_of_a_cancel_name_the_topics_that_the_broker_takes_it_for(
    spark: SparkSession, scope: tuple[str, ...]
) -> None:
    topics = [
        "lim.a",
        "lim.",
        "lim",
        "xlim.a",
        "x.1",
        "x.12",
        "a.c",
        "b.c",
        "c.c",
        "a-b_c",
        "a.b",
        "axb",
        "begin.x.end",
    ]
    cancel = journal.Canceled(at_ms=1, ids=["m"], topics=[""], scope=scope)
    (row,) = action_rows(Frame(0, journal.encode_record(cancel)))
    frame = spark.createDataFrame([(one, row[9]) for one in topics], "topic string, within string")

    found = [row["topic"] for row in frame.where("rlike(topic, within)").collect()]

    assert found == [one for one in topics if covers(scope, one)]
    assert found
