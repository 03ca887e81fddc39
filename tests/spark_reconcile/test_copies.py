"""Copies of a message that differ are one mismatch and accuse nobody; one id on two topics is two messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from spark_reconcile import State, Summary, run, run_windows
from tests.fixtures.databases import Database
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MAIL, NOW_MS, PAID, REMINDER, TICKETS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
SINCE_MS = NOW_MS - 5 * HOUR_MS
AGE_MS = 2 * HOUR_MS
OTHER = "newsletter"


DIFFERING = {"key_differs": 4, "topic_differs": 2, "message_mismatch": 6}
ON_TWO_TOPICS = {
    "not_sent": 1, "message_unsent": 1, "not_in_broker": 1, "message_lost": 1, "stored_twice": 1,
    "message_stored_twice": 1,
}  # fmt: skip
"""The findings of each of both worlds, by rule."""


@pytest.fixture(scope="module")
def summaries(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[Summary]:
    """A whole run, and one by the hour, over both worlds at once."""
    folder = tmp_path_factory.mktemp("copies")
    world = World()
    world.groups()
    for _ in range(3):
        world.settled(age_ms=AGE_MS)
    _plant_differing_copies(world)
    _plant_ids_on_two_topics(world)
    with_timed_ids(world)
    settings = world.write(Database(name="sqlite", url=f"sqlite:///{folder / 'business.db'}", schema=None), folder)
    whole = run(replace(settings, output=folder / "whole"), session=spark, now_ms=NOW_MS, pause=no_wait)
    hourly = run_windows(settings, since_ms=SINCE_MS, now_ms=NOW_MS, session=spark, pause=no_wait)
    assert _table_rows(whole) >= hourly.messages
    for summary in (whole, hourly):
        assert summary.sentence == "Not balanced: 1 unsent, 1 lost, 1 duplicate, 6 mismatch."
        assert _rules(summary) == DIFFERING | ON_TWO_TOPICS
    return [whole, hourly]


def test_copies_that_differ_are_one_mismatch_and_their_business_rows_and_deliveries_are_not_accused(
    summaries: list[Summary],
) -> None:
    for summary in summaries:
        assert summary.count(State.MISMATCH) == 6
        assert {rule: count for rule, count in _rules(summary).items() if rule in DIFFERING} == DIFFERING


def test_one_id_on_two_topics_is_two_messages(summaries: list[Summary]) -> None:
    for summary in summaries:
        assert {rule: count for rule, count in _rules(summary).items() if rule in ON_TWO_TOPICS} == ON_TWO_TOPICS
        assert {(one.topic, one.rule) for one in summary.examples if one.rule in ON_TWO_TOPICS} == {
            (REMINDER, "not_sent"), (REMINDER, "not_in_broker"), (REMINDER, "stored_twice"),
        }  # fmt: skip


def _plant_differing_copies(world: World) -> None:
    for stored_key in ("!", "~"):  # sorts before and behind all digits
        order = world.order(age_ms=AGE_MS)
        _published(world, f"stored {stored_key}", key=str(order), stored_key=stored_key)
        order = world.order(age_ms=AGE_MS)
        _published(world, f"archived {stored_key}", key=stored_key, stored_key=str(order))
    for stored_topic in ("a.topic", "z.topic"):
        order = world.order(age_ms=AGE_MS)
        _published(world, f"on {stored_topic}", key=str(order), stored_topic=stored_topic)


def _plant_ids_on_two_topics(world: World) -> None:
    """Ids of a message to order.paid, which goes all the way, and of one to trip.reminder, which has this fate."""
    for fate in ("whole", "lost", "unsent", "twice"):
        paid, booked = world.order(age_ms=AGE_MS), world.order(age_ms=AGE_MS, status="BOOKED")
        _published(world, f"{fate} message", key=str(paid))
        if fate == "unsent":
            world.unsent(f"{fate} message", key=str(booked), age_ms=AGE_MS, topic=REMINDER)
            continue
        world.sent(f"{fate} message", key=str(booked), age_ms=AGE_MS - 1, topic=REMINDER)
        for number in range({"whole": 1, "lost": 0, "twice": 2}[fate]):
            sequence = world.store(f"{fate} message", key=str(booked), age_ms=AGE_MS, topic=REMINDER)
            if not number:
                world.done(f"{fate} message", sequence, MAIL, age_ms=AGE_MS, topic=REMINDER)


def _published(
    world: World, name: str, *, key: str, stored_key: str | None = None, stored_topic: str = PAID
) -> None:  # fmt: skip
    """Sent to order.paid, stored as said, delivered and handled."""
    world.sent(name, key=key, age_ms=AGE_MS)
    sequence = world.store(name, key=stored_key or key, age_ms=AGE_MS, topic=stored_topic)
    if stored_topic == PAID:
        for group in (TICKETS, MAIL):
            world.done(name, sequence, group, age_ms=AGE_MS)


def _rules(summary: Summary) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for one in summary.verdict_counts:
        if one.rule not in {"stored", "done", "announced"}:
            counts[one.rule] += one.count
    return dict(counts)


def _table_rows(summary: Summary) -> int:
    table = pq.read_table(Path(summary.folder) / "verdicts").to_pylist()
    names = [(row["scope"], row["message_id"], row["topic"], row["consumer_group"]) for row in table]
    assert len(set(names)) == len(names) == summary.messages + summary.message_groups
    return len(names)
