"""Evidence of few rows is in one partition. Verdicts on many partitions are compared in test_reconciliation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_reconcile import Settings
from spark_reconcile.core.dataframes import gathered
from spark_reconcile.core.run_limits import RunLimits
from spark_reconcile.load.evidence import read_all
from spark_reconcile.load.read_plan import check_sources
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
