"""Finds business rows and messages whose keys differ only in case or trailing blanks, among the findings alone.

Spark compares keys byte by byte; MySQL's default collations compare such keys as equal, so the code that published the
message may have seen one key where Spark reads two. Without this the row would be lost, and its message a phantom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.verdict_override import overruled, rule_named
from spark_reconcile.core.dataframes import computed
from spark_reconcile.rules.business_row_rules import BUSINESS_ROW_RULES
from spark_reconcile.rules.message_rules import MESSAGE_RULES
from spark_reconcile.rules.verdict_rule import Scope, VerdictRule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_UNASKED: Final = f"scope = '{Scope.MESSAGE}' and rule = 'no_business_row' and message_key is not null"
_UNANSWERED: Final = "rule in ('no_message', 'too_few_messages')"
_FOLDED: Final = "lower(rtrim(message_key)) as folded"
_OF_MESSAGE: Final = "key_spelling_differs"
_OF_ROW: Final = "message_key_spelling_differs"


def with_key_spelling_differences(
    table: DataFrame, business: DataFrame, *, is_few: bool
) -> tuple[DataFrame, DataFrame]:
    """Returns both verdict tables; a phantom message and the row that requires it get the rule `key_spelling_differs`.

    Rows with other verdicts are not changed. Of many rows nothing is joined if either side has none.
    """
    unanswered = business.where(_UNANSWERED).selectExpr("topic", "message_key", _FOLDED)
    unasked = table.where(_UNASKED).selectExpr("message_id", "topic", _FOLDED)
    if not is_few and (unanswered.isEmpty() or unasked.isEmpty()):
        return table, business
    pairs = computed(unasked.join(unanswered, ["topic", "folded"]), is_few=is_few)
    if pairs.is_empty():
        return table, business
    messages = pairs.frame.select("message_id", "topic").distinct()
    rows = pairs.frame.select("topic", "message_key").distinct()
    return (
        _renamed(table, messages, ["message_id", "topic"], rule_named(MESSAGE_RULES, _OF_MESSAGE), where=_UNASKED),
        _renamed(business, rows, ["topic", "message_key"], rule_named(BUSINESS_ROW_RULES, _OF_ROW), where=_UNANSWERED),
    )


def _renamed(frame: DataFrame, among: DataFrame, on: list[str], rule: VerdictRule, *, where: str) -> DataFrame:
    """Apply the rule to the rows that are also in `among`."""
    marked = frame.join(among.selectExpr("*", "true as respelled"), on, "left")
    return overruled(marked, rule, where=f"respelled and {where}").select(*frame.columns)
