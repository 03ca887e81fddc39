"""Totals of what was settled in bulk: each message counts once, with a rule on its topic and without."""

from __future__ import annotations

import pytest
from pyspark.sql import Row

from spark_reconcile import BusinessRule
from spark_reconcile.evidence.delivery_evidence import GroupFacts
from spark_reconcile.results.window_totals import Tally, bulk_of, tally_bulk
from spark_reconcile.rules.verdict_rule import Scope

RULE = BusinessRule(name="paid", table="orders", key_column="id", time_column="at", topic="order.paid")


@pytest.mark.parametrize(("topic", "note", "asked"), [("order.paid", 0, 5), ("newsletter", -1, 0)])
def test_resent_and_deduplicated_messages_count_once_with_a_rule_on_their_topic_and_without(
    topic: str, note: int, asked: int
) -> None:
    sums = [
        Row(window_ms=0, topic=topic, clean=clean, note=note, timeless=False, n=5, asked=asked, resent=3, repeated=2)
        for clean in (True, False)
    ]
    tally = Tally()

    tally_bulk({0: tally}, bulk_of(sums), [GroupFacts(topic=topic, consumer_group="mail")], [RULE])

    assert {name: count for name, count in tally.totals.items() if count} == {
        "messages": 5, "stored": 5, "resent": 3, "deduplicated_by_broker": 2, "message_groups": 5, "delivered": 5,
        "acknowledged": 5,
    }  # fmt: skip
    assert {place: count for place, count in tally.counts.items() if count} == {
        (Scope.MESSAGE, topic, "", "stored"): 5,
        (Scope.DELIVERY, topic, "mail", "done"): 5,
        **({(Scope.BUSINESS, topic, "paid", "announced"): 5} if asked else {}),
    }
