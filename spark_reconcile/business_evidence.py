"""One row of evidence for each rule and key: its business rows, and how the messages under that key were judged.

DataFrames in, DataFrame out; nothing is read or judged here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spark_reconcile.sources.statements import Leg
from spark_reconcile.verdict import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STATES: Final = (
    State.LOST, State.UNSENT, State.PENDING, State.PARKED, State.CANCELED, State.MISMATCH, State.DUPLICATE,
    State.PHANTOM, State.UNKNOWN,
)  # fmt: skip


def business_evidence(rows: DataFrame, messages: DataFrame) -> DataFrame:
    """`rows`: the business legs, `note` the rule's number; `messages`: judged, with their `state`."""
    from pyspark.sql.functions import expr

    asked = (
        rows.where(f"leg = '{Leg.BUSINESS}'")
        .groupBy("note", "topic", "message_key")
        .agg(
            expr("count(*)").alias("rows"),
            expr("max(created_ms)").alias("time_ms"),
            expr("min(deliver_at_ms)").alias("least_due_ms"),
            expr("max(deliver_at_ms)").alias("most_due_ms"),
        )
    )
    found = (
        messages.where("message_key != ''")
        .groupBy("topic", "message_key")
        .agg(
            expr("count(*)").alias("messages"),
            expr("min(deliver_at_ms)").alias("least_found_ms"),
            expr("max(deliver_at_ms)").alias("most_found_ms"),
            expr("max(created_ms)").alias("newest_ms"),
            expr("max(business_until_ms)").alias("business_until_ms"),
            *(expr(f"count_if(state = '{state}')").alias(state.value) for state in _STATES),
        )
    )
    return asked.join(found, ["topic", "message_key"], "left").selectExpr(
        "cast(note as int) as rule_number", "topic", "message_key", "rows",
        # Rows without a time are of the hour of their newest message.
        "coalesce(time_ms, newest_ms, 0L) as time_ms",
        "coalesce(newest_ms, 0L) as newest_ms", "coalesce(business_until_ms, 0L) as business_until_ms",
        "coalesce(messages, 0L) as messages", "if(coalesce(message_key, '') = '', 1, 0) as keyless",
        "if(messages > 0 and least_due_ms is not null"
        " and (least_due_ms != least_found_ms or most_due_ms != most_found_ms), 1, 0) as due_differs",
        *(f"coalesce({state}, 0L) as {state}" for state in _STATES),
    )  # fmt: skip
