"""Loads, by key, business rows that a run by the hour has not read because their times are in other hours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.dataframes import listed, union
from spark_reconcile.core.settings import Settings
from spark_reconcile.load.evidence import Evidence, sql_frame, united
from spark_reconcile.load.read_plan import Read
from spark_reconcile.rules.verdict_rule import Scope
from spark_reconcile.sources.dbapi_reader import Place, reading
from spark_reconcile.sources.sql_statements import Leg, business_statement, narrowed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UNASKED: Final = "no_business_row"
"""The rule of a message without a business row in the time range that was read."""
KEYS_MAX: Final = 1_000
"""Limit of keys that are queried; they suffice to detect whether rows share an offset."""


def with_displaced_rows(
    session: SparkSession, settings: Settings, evidence: Evidence, table: DataFrame
) -> Evidence:  # fmt: skip
    """Returns the evidence of messages without a business row, and the business rows with their keys, of any time.

    `table`: verdicts on messages. Raises DatabaseUnavailable.
    """
    unasked = table.where(f"scope = '{Scope.MESSAGE}' and rule = '{UNASKED}' and message_key is not null")
    key_rows = unasked.select("topic", "message_key").distinct().limit(KEYS_MAX).collect()
    keys = [(row["topic"], row["message_key"]) for row in key_rows]
    named = listed(session, keys, "topic string, message_key string").hint("broadcast")
    theirs = evidence.rows.where(f"leg = '{Leg.ARCHIVE}'").join(named, ["topic", "message_key"], "left_semi")
    rows = united(session, [sql_frame(session, read) for read in _reads(settings, keys)])
    counts = [count for count in evidence.counts if count.leg != Leg.BUSINESS]
    return replace(evidence, rows=union(theirs.select(*rows.columns), rows), counts=counts)


def _reads(settings: Settings, keys: Sequence[tuple[str, str]]) -> Iterator[Read]:
    for rule_number, rule in enumerate(settings.rules):
        topic_keys = [key for topic, key in keys if topic == rule.topic]
        for url in settings.urls_of(rule):
            with reading(Place.of(url)) as reader:
                statement = narrowed(business_statement(reader, rule, rule_number), ids=[], keys=topic_keys)
            if statement is not None:
                yield Read(url, (statement,), snapshot=True)
