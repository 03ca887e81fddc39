"""A world that a seed chooses: every planted fault gets its verdict, and nothing else in it is a finding.

Fifty times as much: `python -m benchmarks.reconcile.random_world --seed N --messages 20000 --faults 500`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.reconcile.random_world import FAULT_KINDS, KINDS_MIN, UNUSUAL_KINDS, differences, write_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES, FAULTS = 2_000, 60


@pytest.mark.spark
def test_a_random_world_gives_exactly_its_faults(spark: SparkSession, tmp_path: Path, random_seed: int) -> None:
    planted = write_world(tmp_path, seed=random_seed, messages=MESSAGES, faults=FAULTS)

    whole, verdicts = differences(tmp_path, planted, spark)

    assert whole == [], f"seed {random_seed}: {planted['kinds']}"
    assert verdicts >= FAULTS


@pytest.mark.spark
@pytest.mark.slow
def test_by_the_hour_a_random_world_gives_the_same_of_the_hours_that_are_over(
    spark: SparkSession, tmp_path: Path, random_seed: int
) -> None:
    planted = write_world(tmp_path, seed=random_seed, messages=MESSAGES, faults=FAULTS)

    hourly, verdicts = differences(tmp_path, planted, spark, hourly=True)

    assert hourly == [], f"seed {random_seed}: {planted['kinds']}"
    assert verdicts > 0


def test_a_seed_gives_the_same_records_and_at_least_twenty_kinds_of_faults(tmp_path: Path, random_seed: int) -> None:
    first, again = (
        write_world(tmp_path / name, seed=random_seed, messages=MESSAGES, faults=FAULTS) for name in ("one", "two")
    )
    other = write_world(tmp_path / "other", seed=random_seed + 1, messages=MESSAGES, faults=FAULTS)

    names = {kind.__name__ for kind in FAULT_KINDS}
    assert first == again
    assert first["expected"] != other["expected"]
    assert len(names & first["kinds"].keys()) >= KINDS_MIN
    assert sum(count for name, count in first["kinds"].items() if name in names) == FAULTS
    assert {kind.__name__ for kind in UNUSUAL_KINDS} & first["kinds"].keys()
    for name in ("one", "two"):
        assert (tmp_path / name / "broker" / "messages").is_dir()
