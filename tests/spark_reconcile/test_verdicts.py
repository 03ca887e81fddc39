"""The rule tables: complete, in the documented order, and the same in SQL and in plain words.

The SQL is the one that Spark is given; where a test needs no Spark, SQLite evaluates it.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import chain, product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_reconcile.classify.classification import RULES, with_verdicts
from spark_reconcile.core.dataframes import listed
from spark_reconcile.report.page import WORDS
from spark_reconcile.rules.business_row_rules import BUSINESS_ROW_RULES
from spark_reconcile.rules.delivery_rules import DELIVERY_RULES
from spark_reconcile.rules.message_rules import MESSAGE_RULES
from spark_reconcile.rules.verdict_rule import UNEXPLAINED, Severity, State, VerdictRule, case_sql, facts_asked
from tests.spark_reconcile import oracle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOW_MS = 10_000_000
BOUNDS = {
    "now_ms": NOW_MS, "grace_ms": 60_000, "late_after_ms": 120_000, "clock_skew_ms": 1_000,
    "archive_reach_ms": 2_000_000, "archive_until_ms": 6_000_000, "broker_reach_ms": 1_000_000,
    "broker_seen_ms": NOW_MS - 60_000, "earliest_ms": 1, "latest_ms": NOW_MS + 86_400_000,
}  # fmt: skip
# Before any reach, within it, at the edges of the grace time, now, ahead, and further ahead than can be.
TIMES = [
    0, 500_000, 1_500_000, 5_000_000, NOW_MS - 60_001, NOW_MS - 60_000, NOW_MS - 59_999, NOW_MS, NOW_MS + 600_000,
    NOW_MS + 86_400_001,
]  # fmt: skip
FLAG, COUNT = [0, 1], [0, 1, 2]

MESSAGE_FACTS: Mapping[str, Sequence[int]] = {
    "outbox": COUNT, "parked": FLAG, "archive": COUNT, "broker": COUNT, "canceled": FLAG, "discarded": FLAG,
    "covered": FLAG,
    "business": COUNT, "topic_known": FLAG, "body_differs": FLAG, "topic_differs": FLAG, "key_differs": FLAG,
    "due_differs": FLAG, "created_ms": TIMES, "sent_ms": TIMES, "accepted_ms": TIMES, "deliver_at_ms": TIMES,
    "repeated": FLAG, "business_reach_ms": [0, 3_000_000], "cancels_reach_ms": [0, 3_000_000],
    "business_until_ms": [4_000_000, NOW_MS], "cancel": FLAG, "took_effect": FLAG, "cancel_noted": [-1, 0, 1],
    "respelled": FLAG, "delay_cluster": FLAG, "timed": FLAG, "recurring": FLAG,
}  # fmt: skip
DELIVERY_FACTS: Mapping[str, Sequence[int]] = {
    "stored": COUNT, "deliveries": COUNT, "acks": COUNT, "nacks": COUNT, "redrives": FLAG, "seeks": FLAG, "edits": FLAG,
    "deleted": FLAG, "effects": COUNT, "has_inbox": FLAG, "canceled": FLAG, "paused": FLAG, "filtered": FLAG,
    "last_kind": [0, 1, 2, 3, 4, 5, 6], "sequence": [-1, 0, 5], "floor": [0, 3],
    "deliver_at_ms": TIMES, "ready_ms": TIMES, "stored_ms": TIMES,
    "first_delivered_ms": TIMES, "first_ack_ms": TIMES, "effect_ms": TIMES, "last_ms": TIMES,
    "visible_ms": [0, NOW_MS - 120_000, NOW_MS - 119_999, NOW_MS + 1], "inbox_reach_ms": [0, 3_000_000],
    "inbox_until_ms": [4_000_000, NOW_MS], "actions_reach_ms": [0, 3_000_000], "wanted": [-2, -1, 0, 1],
    "delay_cluster": FLAG,
}  # fmt: skip
BUSINESS_FACTS: Mapping[str, Sequence[int]] = {
    "keyless": FLAG, "impossible": FLAG, "respelled": FLAG, "asked": [1, 2], "messages": [0, 1, 2, 3],
    "due_differs": FLAG, "newest_ms": TIMES, "oldest_ms": TIMES, "newest_message_ms": TIMES,
    "business_until_ms": [4_000_000, NOW_MS], "lost": FLAG, "unsent": FLAG, "pending": FLAG, "parked": FLAG,
    "canceled": FLAG, "discarded": FLAG, "mismatch": FLAG,
    "duplicate": FLAG, "unknown": FLAG,
}  # fmt: skip
Scope = tuple[tuple[VerdictRule, ...], Mapping[str, Sequence[int]], Callable[[Mapping[str, int]], str]]
SCOPES: dict[str, Scope] = {
    "message": (MESSAGE_RULES, MESSAGE_FACTS, oracle.message_rule),
    "delivery": (DELIVERY_RULES, DELIVERY_FACTS, oracle.delivery_rule),
    "business": (BUSINESS_ROW_RULES, BUSINESS_FACTS, oracle.business_rule),
}
every_scope = pytest.mark.parametrize("scope", SCOPES)


def _possible(scope: str, facts: Mapping[str, int]) -> bool:
    """Evidence that can come about: a row exists because some source has it."""
    if scope == "message":
        if facts["discarded"] and (facts["outbox"] or not facts["archive"]):
            return False
        if facts["cancel"]:
            # Of no topic, so no rule asks for it; never due, and never stored by a broker.
            nothing = not any(facts[name] for name in ("broker", "covered", "deliver_at_ms"))
            return nothing and bool(facts["outbox"] or facts["archive"])
        return bool(facts["outbox"] or facts["archive"] or facts["broker"] or facts["canceled"])
    if scope == "delivery":
        return bool(facts["stored"] or facts["deliveries"] or facts["acks"] or facts["effects"] or facts["last_kind"])
    return facts["canceled"] + facts["discarded"] <= facts["messages"]


def _facts(scope: str) -> st.SearchStrategy[dict[str, int]]:
    domain = SCOPES[scope][1]
    strategy = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in domain.items()})
    return strategy.filter(lambda facts: _possible(scope, facts))


@pytest.mark.slow
@every_scope
@settings(max_examples=40)
@given(data=st.data())
def test_every_evidence_gets_the_verdict_that_plain_words_give_it(scope: str, data: st.DataObject) -> None:
    _, _, plain = SCOPES[scope]
    cube = data.draw(st.lists(_facts(scope), min_size=1, max_size=30))

    found = _rules_of(scope, cube)

    assert UNEXPLAINED not in found
    assert found == [plain({**facts, **BOUNDS}) for facts in cube]


@pytest.mark.slow
def test_every_combination_of_presence_and_count_of_a_message_is_explained() -> None:
    small = {
        **MESSAGE_FACTS, "created_ms": [500_000, 5_000_000, NOW_MS], "sent_ms": [500_000, 5_000_000, NOW_MS],
        "accepted_ms": [500_000, 5_000_000, NOW_MS - 60_000, NOW_MS],
        "deliver_at_ms": [0, 500_000, 9_000_000, NOW_MS - 100_000, NOW_MS],
        "business": FLAG, "business_reach_ms": [0], "cancels_reach_ms": [1_000_000], "delay_cluster": [0],
    }  # fmt: skip
    for name in ("body_differs", "topic_differs", "key_differs", "due_differs", "timed"):
        small[name] = [0]
    small["recurring"] = [0]
    plain = {**small, "cancel": [0], "took_effect": [0], "cancel_noted": [-1]}
    of_no_topic = ("broker", "covered", "business", "business_until_ms", "deliver_at_ms", "topic_known")
    cancels = {**small, "cancel": [1], **{name: [0] for name in of_no_topic}}
    recurring = {**plain, "recurring": [1], "created_ms": [5_000_000], "sent_ms": [5_000_000], "deliver_at_ms": [0]}
    cube = [
        dict(zip(small, values, strict=True))
        for values in chain.from_iterable(product(*some.values()) for some in (plain, cancels, recurring))
    ]
    cube = [facts for facts in cube if _possible("message", facts)]

    found = _rules_of("message", cube)

    wrong = [facts for rule, facts in zip(found, cube, strict=True) if rule != oracle.message_rule({**facts, **BOUNDS})]
    assert wrong == []
    seen = set(found)
    assert UNEXPLAINED not in seen
    left_out = {
        "body_differs", "topic_differs", "key_differs", "due_differs", "business_out_of_reach", "held_until_due",
    }  # fmt: skip
    assert seen == {rule.name for rule in MESSAGE_RULES} - left_out


@pytest.mark.spark
@every_scope
def test_spark_gives_the_verdicts_of_plain_words_over_the_evidence_cube(
    scope: str, spark: SparkSession, random_seed: int
) -> None:
    rules, domain, plain = SCOPES[scope]
    random = Random(random_seed)
    cube = [{name: random.choice(values) for name, values in domain.items()} for _ in range(20_000)]
    cube = [facts for facts in cube if _possible(scope, facts)]

    found = with_verdicts(_frame(spark, cube, domain), rules, BOUNDS).select("rule", "state", "severity").collect()

    wrong = [
        (row["rule"], expected, facts)
        for row, facts in zip(found, cube, strict=True)
        if row["rule"] != (expected := plain({**facts, **BOUNDS}))
    ]
    assert wrong == []
    by_name = {rule.name: rule for rule in rules}
    for row in found:
        assert (row["state"], row["severity"]) == (by_name[row["rule"]].state, by_name[row["rule"]].severity)
    assert len({row["rule"] for row in found}) > len(rules) // 2


def _rules_of(scope: str, cube: Sequence[Mapping[str, int]], bounds: Mapping[str, int] = BOUNDS) -> list[str]:
    """The rule that decides on each of these facts, by the SQL that Spark is given, evaluated by SQLite."""
    rules, domain, _ = SCOPES[scope]
    names = [name for name in domain if name not in bounds]
    by_rule = re.sub(r"\b(\d+)L\b", r"\1", case_sql(rules, bounds))
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"create table evidence ({', '.join(names)})")
        places = ", ".join("?" * len(names))
        rows = ([facts[name] for name in names] for facts in cube)
        database.executemany(f"insert into evidence values ({places})", rows)
        return [rule for (rule,) in database.execute(f"select {by_rule} from evidence order by rowid")]


def _frame(spark: SparkSession, cube: Sequence[Mapping[str, int]], names: Iterable[str]) -> DataFrame:
    """The facts as rows of a plan, in their order."""
    columns = list(names)
    rows = [tuple(facts[name] for name in columns) for facts in cube]
    return listed(spark, rows, ", ".join(f"{name} bigint" for name in columns))


@every_scope
def test_every_rule_can_decide(scope: str, random_seed: int) -> None:
    rules, domain, _ = SCOPES[scope]
    random = Random(random_seed)
    missing = {rule.name for rule in rules}

    # Bounds that let the message log be complete or not, and ages of every kind.
    for reach_ms, seen_ms in product([0, 1_000_000], [0, NOW_MS]):
        cube = [{name: random.choice(values) for name, values in domain.items()} for _ in range(50_000)]
        for facts in cube:
            alike = [name for name in ("body_differs", "topic_differs", "key_differs", "due_differs") if name in facts]
            facts.update({name: 0 for name in alike if random.random() < 0.7})
        bounds = {**BOUNDS, "broker_reach_ms": reach_ms, "broker_seen_ms": seen_ms}
        missing -= set(_rules_of(scope, cube, bounds))

    assert missing == set()


@every_scope
def test_rules_ask_only_for_facts_that_the_evidence_has(scope: str) -> None:
    rules, domain, _ = SCOPES[scope]

    assert facts_asked(rules) <= {*domain, *BOUNDS}


def test_every_rule_says_what_it_means_and_findings_say_what_to_do() -> None:
    for rules in RULES.values():
        names = [rule.name for rule in rules]
        assert len(names) == len(set(names))
        for rule in rules:
            assert rule.name.replace("_", "").isalpha()
            assert rule.meaning.endswith(".")
            if rule.severity in {Severity.FINDING, Severity.ATTENTION} and not rule.echo:
                assert rule.cause.endswith(".")
                assert rule.cure.endswith(".")
            assert rule.state is not State.UNEXPLAINED


def test_every_verdict_but_those_that_are_well_is_said_in_words_on_the_report() -> None:
    assert set(WORDS) == set(State) - {State.SETTLED, State.CANCELED, State.UNEXPLAINED}


def test_the_documentation_prints_the_tables_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reconciliation.md").read_text(encoding="utf-8")

    for rules in RULES.values():
        lines = [
            f"| {rule.state} | `{rule.name}` | {rule.severity} | {rule.meaning} | {rule.cause} | {rule.cure} |"
            for rule in rules
        ]
        assert "\n".join(lines) in page
