"""Evidence on business rows: whether the due times that they name are those of their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pytest

from spark_reconcile.core.dataframes import listed
from spark_reconcile.evidence.business_evidence import business_evidence
from spark_reconcile.sources.sql_statements import INPUT_SCHEMA, InputKind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
TOPIC: Final = "trip.reminder"
REMINDER, RECEIPT = "0", "1"
"""Two rules on one topic: rows of the first name a due time, those of the second name none."""
DUE_MS: Final = 2_000_000_000_000
LATER_MS: Final = DUE_MS + 60_000
_MESSAGES: Final = (
    "topic string, message_key string, published_key string, deliver_at_ms bigint, created_ms bigint, "
    "business_until_ms bigint, state string"
)
Row = tuple[str, int | None] | tuple[str, int, int]
"""The number of a rule, a due time, and its unit, by default a millisecond."""
Message = tuple[int, str]
"""A due time, 0 for none, and a verdict."""
AGREEING: Final[Mapping[str, tuple[Sequence[Row], Sequence[Message]]]] = {
    "a reminder, and a receipt at once": ([(REMINDER, DUE_MS), (RECEIPT, None)], [(DUE_MS, "settled"), (0, "settled")]),
    "a receipt that its code sends later": (
        [(REMINDER, DUE_MS), (RECEIPT, None)], [(DUE_MS, "settled"), (LATER_MS, "settled")]
    ),
    "a row of the same rule without a time": (
        [(REMINDER, DUE_MS), (REMINDER, None)], [(DUE_MS, "settled"), (0, "settled")]
    ),
    "a reminder that was moved": (
        [(REMINDER, LATER_MS), (RECEIPT, None)], [(DUE_MS, "canceled"), (LATER_MS, "settled"), (0, "settled")]
    ),
    "two reminders, one of them canceled": (
        [(REMINDER, DUE_MS), (REMINDER, LATER_MS)], [(DUE_MS, "canceled"), (LATER_MS, "settled")]
    ),
    "a reminder in place of one that was discarded": (
        [(REMINDER, LATER_MS)], [(DUE_MS, "discarded"), (LATER_MS, "settled")]
    ),
    "a receipt alone": ([(RECEIPT, None)], [(DUE_MS, "settled")]),
    "a millisecond that was rounded down": ([(REMINDER, DUE_MS)], [(DUE_MS + 1, "settled")]),
    "a second that was rounded half up": ([(REMINDER, DUE_MS, 1000)], [(DUE_MS - 500, "settled")]),
    "a second that was cut off": ([(REMINDER, DUE_MS, 1000)], [(DUE_MS + 999, "settled")]),
    "a day": ([(REMINDER, DUE_MS, 86_400_000)], [(DUE_MS + 80_000_000, "settled")]),
    "seconds, and a receipt that its code sends later": (
        [(REMINDER, DUE_MS, 1000), (RECEIPT, None)], [(DUE_MS - 500, "settled"), (LATER_MS, "settled")]
    ),
}  # fmt: skip
DIFFERING: Final[Mapping[str, tuple[Sequence[Row], Sequence[Message]]]] = {
    "a reminder at another time": ([(REMINDER, DUE_MS)], [(LATER_MS, "settled")]),
    "a reminder two milliseconds later": ([(REMINDER, DUE_MS)], [(DUE_MS + 2, "settled")]),
    "a reminder two milliseconds earlier": ([(REMINDER, DUE_MS)], [(DUE_MS - 2, "settled")]),
    "a second, and more": ([(REMINDER, DUE_MS, 1000)], [(DUE_MS + 1001, "settled")]),
    "a second, and more, before": ([(REMINDER, DUE_MS, 1000)], [(DUE_MS - 1001, "settled")]),
    "seconds beside a receipt": (
        [(REMINDER, DUE_MS, 1000), (RECEIPT, None)], [(DUE_MS - 1001, "settled"), (0, "settled")]
    ),
    "a reminder at once": ([(REMINDER, DUE_MS)], [(0, "settled")]),
    "a later reminder beside a receipt": (
        [(REMINDER, DUE_MS), (RECEIPT, None)], [(LATER_MS, "settled"), (0, "settled")]
    ),
    "an earlier reminder beside a receipt": (
        [(REMINDER, LATER_MS), (RECEIPT, None)], [(DUE_MS, "settled"), (0, "settled")]
    ),
    "two messages at once": ([(REMINDER, DUE_MS), (RECEIPT, None)], [(0, "settled"), (0, "settled")]),
    "one more, at another time": ([(REMINDER, DUE_MS)], [(DUE_MS, "settled"), (LATER_MS, "settled")]),
}  # fmt: skip


def test_due_times_are_those_of_the_rows_that_name_one_and_canceled_messages_may_have_any(spark: SparkSession) -> None:
    cases = AGREEING | DIFFERING
    rows = [_row(key, *one) for key, (asked, _) in cases.items() for one in asked]
    messages = [(TOPIC, key, key, due_ms, 1, 0, state) for key, (_, found) in cases.items() for due_ms, state in found]

    found = business_evidence(
        listed(spark, rows, INPUT_SCHEMA), listed(spark, messages, _MESSAGES), is_shared=True
    ).collect()

    differing = {row["message_key"] for row in found if row["due_differs"]}
    assert differing == DIFFERING.keys()
    assert {row["message_key"] for row in found} == cases.keys()


def _row(key: str, rule: str, due_ms: int | None, unit_ms: int = 1) -> tuple[object, ...]:
    """A business row in the columns of all inputs."""
    at_ms = 1_000_000_000_000
    return InputKind.BUSINESS, None, TOPIC, key, None, None, due_ms, at_ms, at_ms, None, rule, unit_ms
