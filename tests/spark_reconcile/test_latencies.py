"""How long hops took is summed up by the hour, in steps, so that hours of several runs give one set of percentiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_reconcile.results.latencies import _STEP, Hop, Hour, keep_hours, kept_hour, latencies_of, step_of, value_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VALUES = [*range(3_000), *((1 << bits) + more for bits in range(12, 41) for more in (-1, 0, 1, 7))]


def test_a_step_is_a_value_or_no_further_from_it_than_a_thirtieth() -> None:
    assert [value_of(step_of(value)) for value in range(32)] == list(range(32))
    assert all(abs(value_of(step_of(value)) - value) <= value / 30 for value in VALUES)
    assert sorted(VALUES, key=lambda value: (step_of(value), value)) == sorted(VALUES)


@pytest.mark.spark
def test_spark_counts_a_value_in_the_same_step(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(value,) for value in VALUES], "v bigint").selectExpr("v", f"{_STEP} as step")

    assert [(row["v"], row["step"]) for row in rows.collect()] == [(value, step_of(value)) for value in VALUES]


def test_hours_of_different_samples_are_put_together_as_what_they_stand_for(tmp_path: Path) -> None:
    whole = Hour(one_in=1, hops=[_hop({10: 90, step_of(1_000): 10}, longest_ms=1_001)])
    sampled = Hour(one_in=10, hops=[_hop({20: 10}, longest_ms=20), _hop({5: 1}, longest_ms=5, of="mail")])
    folders = {hour: tmp_path / str(hour) for hour in (1, 2, 3)}
    for hour in (1, 2):
        folders[hour].mkdir()

    keep_hours(folders, {1: whole, 2: sampled, 3: whole})
    keep_hours(folders, {1: sampled})
    first, second = latencies_of(one for folder in folders.values() if (one := kept_hour(folder)))

    assert (first.of, first.count, first.p50_ms, first.p95_ms, first.longest_ms) == ("", 200, 20, 20, 1_001)
    assert 967 <= first.p99_ms <= 1_001
    assert (second.of, second.count, second.p50_ms, second.longest_ms) == ("mail", 10, 5, 5)
    (folders[1] / "latencies.json").write_text("{")
    assert [kept_hour(folder) for folder in folders.values()] == [None, sampled, None]


def _hop(steps: dict[int, int], *, longest_ms: int, of: str = "") -> Hop:
    return Hop(hop="commit to broker", topic="t", of=of, longest_ms=longest_ms, steps=steps)
