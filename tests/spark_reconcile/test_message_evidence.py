"""Evidence on messages: which cancels of the broker's log count for a message, by when they and it came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from outbox_broker.schedule import recent_cancels
from spark_reconcile.core.dataframes import listed
from spark_reconcile.evidence.message_evidence import CANCEL_MEMORY_MS, business_keys, message_evidence
from spark_reconcile.sources.broker_logs import ACTION_SCHEMA, MESSAGE_SCHEMA
from spark_reconcile.sources.sql_statements import INPUT_SCHEMA
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, REMINDER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STORED_MS: Final = NOW_MS - HOUR_MS
DUE_MS: Final = NOW_MS - HOUR_MS // 2
LONG_BEFORE_MS: Final = STORED_MS - CANCEL_MEMORY_MS - 1
SOON_BEFORE_MS: Final = STORED_MS - CANCEL_MEMORY_MS + 1


@pytest.mark.spark
def test_a_cancel_that_came_more_than_a_week_before_its_message_takes_nothing_back(spark: SparkSession) -> None:
    plain = {"sequence": 1, "stored_ms": STORED_MS, "due_ms": None}
    marker = {"sequence": None, "stored_ms": STORED_MS, "due_ms": DUE_MS}
    copy = {"sequence": 2, "stored_ms": None, "due_ms": DUE_MS}
    cases = {
        "forgotten": ([plain], LONG_BEFORE_MS, 0),
        "forgotten, and fell due": ([marker, copy], LONG_BEFORE_MS, 0),
        "remembered": ([plain], SOON_BEFORE_MS, 1),
        "remembered, and fell due": ([marker, copy], SOON_BEFORE_MS, 1),
        "canceled while it was scheduled": ([marker, copy], STORED_MS + 1, 1),
        "dead on arrival": ([marker], LONG_BEFORE_MS, 1),
        "canceled later": ([plain], STORED_MS + 1, 0),
        "known by its copy alone": ([copy], LONG_BEFORE_MS, 1),
    }
    messages = [
        (name, REMINDER, None, one["sequence"], "hash", STORED_MS, one["stored_ms"], one["due_ms"], None)
        for name, (records, _, _) in cases.items() for one in records
    ]  # fmt: skip
    canceled = [
        ("canceled", None, None, name, None, number, at_ms, None, None, None, None)
        for number, (name, (_, at_ms, _)) in enumerate(cases.items())
    ]
    answered = ("answered", None, None, "forgotten, and answered", None, None, STORED_MS, None, None, None, None)
    messages.append(("forgotten, and answered", REMINDER, None, 3, "hash", STORED_MS, STORED_MS, None, None))
    rows = listed(spark, [], INPUT_SCHEMA)

    found = message_evidence(
        rows, listed(spark, messages, MESSAGE_SCHEMA), listed(spark, [*canceled, answered], ACTION_SCHEMA),
        business=business_keys(rows), reaches={}, until={}, known_topics=[], is_few=True,
    ).collect()  # fmt: skip

    assert {row["id"]: row["canceled"] for row in found} == {
        **{name: count for name, (_, _, count) in cases.items()}, "forgotten, and answered": 1,
    }  # fmt: skip


def test_the_broker_remembers_cancels_for_as_long_as_the_reconciliation_believes() -> None:
    assert recent_cancels.CANCEL_MEMORY_MS == CANCEL_MEMORY_MS
