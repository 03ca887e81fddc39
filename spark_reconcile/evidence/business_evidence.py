"""One row of evidence for each rule and key: its business rows, and the verdicts of the messages with that key.

Rows without a key are one row for each rule and hour, so that counts do not depend on which windows are evaluated
together. Several rules on one topic may have rows with one key: each row requires a message of its own, so the messages
are compared with the rows of all these rules. Transforms DataFrames; reads and classifies nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spark_reconcile.core.dataframes import grouped, union
from spark_reconcile.core.time_buckets import hour
from spark_reconcile.rules.verdict_rule import State
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STATES: Final = (
    State.LOST, State.UNSENT, State.PENDING, State.PARKED, State.CANCELED, State.DISCARDED, State.MISMATCH,
    State.DUPLICATE, State.UNKNOWN,
)  # fmt: skip
"""Possible states of a message that a row requires. Not phantom: no row requires it, or only the broker has it."""
_TIMES: Final = ("created_ms", "deliver_at_ms")
_KEYLESS: Final = "coalesce(message_key, '') = ''"
_KEY: Final = f"if({_KEYLESS}, null, message_key) as message_key"
_OF_ALL: Final = (
    ("sum", "rows", "asked"), ("max", "last_ms", "newest_ms"), ("min", "time_ms", "oldest_ms"),
    ("max", "untimely", "impossible"),
    ("min", "least_due_ms", "least_of_all_ms"), ("max", "most_due_ms", "most_of_all_ms"),
    ("max", "unit_ms", "unit_of_all_ms"), ("sum", "due_rows", "due_rows_of_all"),
)  # fmt: skip

_LIVE_DUE: Final = f"if(state in ('{State.CANCELED}', '{State.DISCARDED}'), null, deliver_at_ms)"
# The one place where the due times of rows and messages are compared. A row has its due time in the unit of its column,
# rounded in a way that only the business knows: they are equal within one unit. `early` and `late` compare the broker's
# actions with the message's own due time, to the millisecond.
_FROM_MS: Final = "(least_of_all_ms - unit_of_all_ms)"
_TO_MS: Final = "(most_of_all_ms + unit_of_all_ms)"
# A row that was moved has the message that was canceled for it, too, or discarded: that may be due at any time, and no
# other may.
_DIFFERS: Final = (
    f"least_live_ms < {_FROM_MS} or most_live_ms > {_TO_MS}"
    " or least_found_ms > least_of_all_ms + unit_of_all_ms or most_found_ms < most_of_all_ms - unit_of_all_ms"
)
_LATER: Final = "if(deliver_at_ms > 0, deliver_at_ms, null)"
# Rows without a due time ask for a message at any time: messages for now are theirs. So may be scheduled ones, if there
# are more of these than rows with a due time.
_DIFFERS_FROM_SOME: Final = (
    "least_later_ms > least_of_all_ms + unit_of_all_ms or most_found_ms < most_of_all_ms - unit_of_all_ms"
    f" or (live_later <= due_rows_of_all and (least_live_later_ms < {_FROM_MS} or most_live_ms > {_TO_MS}))"
)


def business_evidence(rows: DataFrame, messages: DataFrame, *, is_shared: bool) -> DataFrame:
    """`rows`: the business inputs, `note` is the rule's number; `messages`: classified, with their `state`.

    `is_shared`: several rules may have rows with one key. If not, the sum over all rules is that of one rule.
    """
    of_all = "over (partition by topic, message_key)"
    placed = rows.where(f"input_kind = '{InputKind.BUSINESS}'").selectExpr(
        "note",
        "topic",
        _KEY,
        f"if({_KEYLESS}, {hour('created_ms')}, 0L) as hour_ms",
        *_TIMES,
        "at_ms",
        "due_unit_ms",
        "if(created_ms is null and at_ms is not null, 1, 0) as untimely",
    )
    row_facts = grouped(
        placed, "note", "topic", "message_key", "hour_ms",
        rows="count(*)", time_ms="max(created_ms)", last_ms="max(if(created_ms is null, null, at_ms))",
        least_due_ms="min(deliver_at_ms)",
        most_due_ms="max(deliver_at_ms)", unit_ms="coalesce(max(due_unit_ms), 1L)",
        due_rows="count(deliver_at_ms)", untimely="max(untimely)",
    ).selectExpr(
        "*",
        *(f"{f'{fold}({column}) {of_all}' if is_shared else column} as {name}" for fold, column, name in _OF_ALL),
    )  # fmt: skip
    message_facts = grouped(
        _under_each_key(messages).where("message_key != ''"), "topic", "message_key",
        messages="count(*)", least_found_ms="min(deliver_at_ms)", most_found_ms="max(deliver_at_ms)",
        least_live_ms=f"min({_LIVE_DUE})", most_live_ms=f"max({_LIVE_DUE})",
        least_later_ms=f"min({_LATER})", least_live_later_ms=f"min(if({_LIVE_DUE} > 0, deliver_at_ms, null))",
        live_later=f"count_if({_LIVE_DUE} > 0)",
        newest_message_ms="max(created_ms)", business_until_ms="max(business_until_ms)",
        **{state.value: f"count_if(state = '{state}')" for state in _STATES},
    )  # fmt: skip
    return row_facts.join(message_facts, ["topic", "message_key"], "left").selectExpr(
        "cast(note as int) as rule_number", "topic", "message_key", "rows", "asked",
        # Rows without a time belong to the hour of their newest message.
        *(f"coalesce({name}, newest_message_ms, 0L) as {name}" for name in ("time_ms", "newest_ms", "oldest_ms")),
        "coalesce(newest_message_ms, 0L) as newest_message_ms",
        "coalesce(business_until_ms, 0L) as business_until_ms",
        "impossible", "0L as respelled", "coalesce(messages, 0L) as messages", f"if({_KEYLESS}, 1, 0) as keyless",
        "if(messages > 0 and least_due_ms is not null"
        f" and if(due_rows_of_all < asked, {_DIFFERS_FROM_SOME}, {_DIFFERS}), 1, 0) as due_differs",
        *(f"coalesce({state}, 0L) as {state}" for state in _STATES),
    )  # fmt: skip


def _under_each_key(messages: DataFrame) -> DataFrame:
    """A message whose copies have two keys counts for rows of both: whichever copy is right, its row has a message."""
    columns = ["topic", "deliver_at_ms", "created_ms", "business_until_ms", "state"]
    return union(
        messages.select("message_key", *columns),
        messages.where("published_key != message_key").selectExpr("published_key as message_key", *columns),
    )
