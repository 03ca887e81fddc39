"""Few rows are in one partition, and literals. Verdicts on many partitions are compared in test_reconciliation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.functions import expr

from spark_reconcile import Settings
from spark_reconcile.core.dataframes import LITERAL_ROWS_MAX, computed, gathered
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.load.read_plan import check_sources
from spark_reconcile.load.source_reader import read_all
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import NOW_MS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_up_to_the_limit_rows_are_gathered_and_more_are_not(spark: SparkSession) -> None:
    frame = spark.range(0, 100, 1, 4)

    few, many = gathered(frame, rows=100, rows_max=100), gathered(frame, rows=101, rows_max=100)

    assert (few.rdd.getNumPartitions(), many.rdd.getNumPartitions()) == (1, 4)
    assert few.collect() == many.collect()


def test_few_rows_are_fetched_by_one_job_and_are_those_of_a_checkpoint(spark: SparkSession) -> None:
    scoped = "collect_list(named_struct('scope', if(id % 2 = 0, null, 's'), 'time_ms', id)) as cancels"
    frame = spark.range(0, 10, 1, 4).selectExpr("id", "id % 3 as place").groupBy("place").agg({"id": "max"})
    nested = spark.range(0, 10, 1, 1).groupBy().agg(expr(scoped))

    with _jobs(spark, "few rows") as jobs:
        few = computed(frame, is_few=True)
        read = (few.count(), few.is_empty(), sorted(few.rows()))
        assert len(jobs()) == 1
    many = computed(frame, is_few=False)

    assert (few.table is None, many.table is None) == (False, True)
    assert read == (many.count(), many.is_empty(), sorted(many.rows())) == (3, False, [(0, 9), (1, 7), (2, 8)])
    assert sorted(few.frame.collect()) == sorted(many.frame.collect())
    assert computed(nested, is_few=True).frame.collect() == computed(nested, is_few=False).frame.collect()


def test_none_and_too_many_rows_are_computed_as_what_they_are(spark: SparkSession) -> None:
    none, many = (computed(spark.range(rows), is_few=True) for rows in (0, LITERAL_ROWS_MAX + 1))

    assert (none.is_empty(), none.rows(), none.frame.columns) == (True, [], ["id"])
    assert (many.table, many.count(), many.is_empty()) == (None, LITERAL_ROWS_MAX + 1, False)


@contextmanager
def _jobs(spark: SparkSession, group: str) -> Iterator[Callable[[], Sequence[int]]]:
    """What is yielded returns the jobs that Spark has started within this context."""
    spark.sparkContext.setJobGroup(group, group)
    try:
        yield lambda: spark.sparkContext.statusTracker().getJobIdsForGroup(group)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]


def test_evidence_of_few_rows_is_in_one_partition_each_and_that_of_many_is_as_it_was_read(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = World()
    world.groups()
    for _ in range(3):
        world.settled()
    settings = world.write(sqlite, tmp_path, records_a_segment=1)
    none = replace(settings, limits=RunLimits(one_partition_rows_max=0))

    assert _partitions(spark, settings) == {"inboxes": 1, "messages": 1, "actions": 1, "rows": 1}
    assert _partitions(spark, none)["messages"] == 3
    assert _partitions(spark, none)["actions"] >= len(world.actions)


def _partitions(spark: SparkSession, settings: Settings) -> dict[str, int]:
    evidence = read_all(spark, settings, check_sources(settings), now_ms=NOW_MS, say=lambda _: None)
    try:
        frames = {
            "inboxes": evidence.inboxes, "messages": evidence.messages, "actions": evidence.actions,
            "rows": evidence.rows,
        }  # fmt: skip
        return {name: frame.rdd.getNumPartitions() for name, frame in frames.items()}
    finally:
        evidence.release()
