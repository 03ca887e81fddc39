"""The table of verdicts: its SQL and its Python say the same of every row of evidence, and each row gets one."""

from __future__ import annotations

import random
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

import pytest

from spark_reconcile.verdict import RULES, Evidence, Policy, Verdict, classify, severity_of, verdict_sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLICY = Policy(
    now_ms=1_000_000, fresh_after_ms=940_000, late_after_ms=60_000, archive_since_ms=850_000, inbox_since_ms=820_000
)
MOMENTS = (0, 800_000, 930_000, 940_000, 940_001, 990_000, 1_050_000)
ROWS = 4_000


def evidence(seed: random.Random) -> Evidence:
    """A row anywhere in the cube of counts and moments, consistent or not."""
    values: dict[str, int] = {}
    for one in fields(Evidence):
        choices = MOMENTS if one.name.endswith("_ms") else (0, 0, 1, 1, 2)
        values[one.name] = seed.choice(choices)
    return Evidence(**values)


@pytest.mark.spark
def test_sql_and_python_give_every_row_the_same_single_verdict(spark: SparkSession, random_seed: int) -> None:
    source = random.Random(random_seed)
    cube = [evidence(source) for _ in range(ROWS)]
    schema = ", ".join(f"{one.name} bigint" for one in fields(Evidence))

    frame = spark.createDataFrame([tuple(asdict(one).values()) for one in cube], schema)
    moments = [f"cast({getattr(POLICY, one.name)} as bigint) as {one.name}" for one in fields(Policy)]
    by_sql = [
        row["verdict"] for row in frame.selectExpr("*", *moments).selectExpr(f"{verdict_sql()} as verdict").collect()
    ]

    by_python = [classify(one, POLICY).value for one in cube]
    assert by_sql == by_python
    assert set(by_python) == {verdict.value for verdict in Verdict}


def test_every_verdict_stands_in_the_table_and_the_last_line_always_holds() -> None:
    assert {rule.verdict for rule in RULES} == set(Verdict)
    assert RULES[-1].matches(Evidence(), POLICY)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.verdict}: {rule.evidence[:40]}")
def test_every_line_says_what_it_means_and_what_to_do(rule: object) -> None:
    assert getattr(rule, "meaning").endswith(".")  # noqa: B009 - rules are read as a table
    assert getattr(rule, "repair").endswith(".")  # noqa: B009


@pytest.mark.parametrize(
    ("first", "second", "row"),
    [
        (Verdict.MISMATCH, Verdict.EARLY, Evidence(hashes=2, deliveries=1, first_delivery_ms=1, due_ms=2)),
        (Verdict.EARLY, Verdict.DUPLICATE, Evidence(deliveries=1, first_delivery_ms=1, due_ms=2, stored=2, archived=1)),
        (Verdict.PHANTOM, Verdict.DUPLICATE, Evidence(stored=2, stored_ms=900_000)),
        (Verdict.DUPLICATE, Verdict.UNKNOWN, Evidence(stored=2, stored_ms=800_000)),
        (Verdict.CANCELED, Verdict.PHANTOM, Evidence(stored=1, stored_ms=900_000, canceled=1, covered=1)),
        (Verdict.PHANTOM, Verdict.CANCELED, Evidence(stored=1, archived=1, canceled=1, deliveries=1)),
        (Verdict.DEAD, Verdict.LATE, Evidence(stored=1, archived=1, has_group=1, deliveries=1, deaths=1,
                                              first_delivery_ms=60_001)),
        (Verdict.UNKNOWN, Verdict.SETTLED, Evidence(stored=1, stored_ms=800_000)),
        (Verdict.DUPLICATE, Verdict.SETTLED, Evidence(stored=1, archived=1, effects=2, has_group=1, acks=1)),
        (Verdict.LATE, Verdict.SETTLED, Evidence(stored=1, archived=1, has_group=1, deliveries=1, acks=1,
                                                 first_delivery_ms=60_001)),
        (Verdict.SETTLED, Verdict.DEAD, Evidence(stored=1, archived=1, has_group=1, deliveries=1, acks=1, deaths=1,
                                                 first_delivery_ms=1)),
    ],
)  # fmt: skip
def test_of_two_verdicts_that_fit_the_graver_is_given(first: Verdict, second: Verdict, row: Evidence) -> None:
    assert classify(row, POLICY) is first
    assert first is not second


def test_a_finding_is_what_is_an_error() -> None:
    errors = {verdict for verdict in Verdict if severity_of(verdict) == "error"}

    assert errors == {
        Verdict.LOST, Verdict.PHANTOM, Verdict.EARLY, Verdict.DUPLICATE, Verdict.MISMATCH, Verdict.UNSENT
    }  # fmt: skip
