"""The table's two languages agree on any evidence. SQL runs on SQLite here, so that there may be many examples."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, fields
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spark_reconcile.verdict import RULES, Evidence, Policy, Verdict, classify, severity_of, verdict_sql

MOMENTS = st.sampled_from([0, 1, 99, 100, 101, 199, 200, 201, 300])
COUNTS = st.sampled_from([0, 0, 1, 1, 2])
EVIDENCE = st.builds(
    Evidence, **{one.name: MOMENTS if one.name.endswith("_ms") else COUNTS for one in fields(Evidence)}
)
POLICIES = st.builds(
    Policy, now_ms=st.just(300), fresh_after_ms=MOMENTS, late_after_ms=st.sampled_from([0, 1, 100]),
    archive_since_ms=MOMENTS, inbox_since_ms=MOMENTS,
)  # fmt: skip


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    """Evaluates the CASE."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.create_function("greatest", 3, max, deterministic=True)
        yield connection


@given(evidence=EVIDENCE, policy=POLICIES)
@example(evidence=Evidence(), policy=Policy(now_ms=0, fresh_after_ms=0, late_after_ms=0))
def test_sql_and_python_agree_on_any_evidence(database: sqlite3.Connection, evidence: Evidence, policy: Policy) -> None:
    facts = {**asdict(evidence), **asdict(policy)}
    columns = ", ".join(f":{name} AS {name}" for name in facts)

    (verdict,) = database.execute(f"SELECT {verdict_sql()} FROM (SELECT {columns})", facts).fetchone()

    assert verdict == classify(evidence, policy)


@given(evidence=EVIDENCE, policy=POLICIES)
def test_what_is_nowhere_wrong_is_no_finding(evidence: Evidence, policy: Policy) -> None:
    # The conditions of every error, said once more and independently of their order.
    amiss = (
        evidence.hashes > 1
        or evidence.stored > 1
        or evidence.effects > 1
        or (evidence.deliveries and (evidence.first_delivery_ms < evidence.due_ms or evidence.canceled))
        or (evidence.stored and not evidence.in_outbox and not evidence.archived)
        or (evidence.covered and not evidence.business)
        or (not evidence.stored and (evidence.in_outbox or evidence.archived))
        or (evidence.acks and evidence.has_inbox and not evidence.effects)
    )

    error = severity_of(classify(evidence, policy)) == "error"

    assert amiss or not error


@given(evidence=EVIDENCE)
def test_in_its_grace_nothing_is_lost_unsent_or_invented(evidence: Evidence) -> None:
    young = Policy(now_ms=300, fresh_after_ms=-1, late_after_ms=1_000)

    verdict = classify(evidence, young)

    assert verdict not in {Verdict.LOST, Verdict.UNSENT}
    assert verdict is not Verdict.PHANTOM or (evidence.canceled and evidence.deliveries)


def test_each_line_of_the_table_decides_for_some_evidence(random_seed: int) -> None:
    seed = Random(random_seed)
    policy = Policy(now_ms=300, fresh_after_ms=200, late_after_ms=100, archive_since_ms=100, inbox_since_ms=100)
    missing = {rule.evidence for rule in RULES}

    for _ in range(200_000):
        facts = {
            one.name: seed.choice((0, 99, 100, 150, 200, 201) if one.name.endswith("_ms") else (0, 0, 1, 1, 2))
            for one in fields(Evidence)
        }
        evidence = Evidence(**facts)
        missing.discard(next(rule.evidence for rule in RULES if rule.matches(evidence, policy)))
        if not missing:
            break

    assert missing == set()
