"""Detects messages whose copies name two topics: published to one, stored by the broker on another, with one id.

A message is identified by its topic and its id, so these look like one that was lost and one that was not published.
They are one mismatch: the broker's copy gets the verdict, since consumers saw that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.verdict_override import overruled, rule_named
from spark_reconcile.core.dataframes import computed, grouped
from spark_reconcile.rules.message_rules import MESSAGE_RULES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PUBLISHED_ALONE: Final = "topic is not null and cancel = 0 and broker = 0 and outbox + archive > 0"
BROADCAST_MAX: Final = 1_000_000
_STORED_ALONE: Final = "topic is not null and broker > 0 and outbox + archive = 0"


def with_topic_mismatches(messages: DataFrame, *, is_few: bool) -> DataFrame:
    """Returns classified messages with the column `is_other_copy`: whether the copy on another topic has the message's
    verdict. Those whose copies name two topics get `topic_differs`, unless a rule of higher precedence applies.

    An id with several copies on either side is not changed.
    """
    pairs = _pairs_of_few(messages) if is_few else _pairs_of_many(messages)
    if pairs is None:
        return messages.selectExpr("*", "false as is_other_copy")
    marked = messages.join(pairs.hint("broadcast"), "id", "left")
    differing = f"is_pair and (({_PUBLISHED_ALONE}) or ({_STORED_ALONE}))"
    rule = rule_named(MESSAGE_RULES, "topic_differs")
    before = ", ".join(f"'{earlier.name}'" for earlier in MESSAGE_RULES[: MESSAGE_RULES.index(rule)])
    judged = overruled(marked, rule, where=f"{differing} and rule not in ({before})")
    return judged.selectExpr(*messages.columns, f"coalesce({differing} and broker = 0, false) as is_other_copy")


def _pairs_of_few(messages: DataFrame) -> DataFrame | None:
    """Returns the ids with one copy on either side, with `is_pair`, by one job; None: there are none."""
    alone = messages.where(f"({_PUBLISHED_ALONE}) or ({_STORED_ALONE})")
    counted = grouped(alone, "id", published=f"count_if({_PUBLISHED_ALONE})", stored=f"count_if({_STORED_ALONE})")
    pairs = computed(counted.where("published = 1 and stored = 1").selectExpr("id", "true as is_pair"), is_few=True)
    return None if pairs.is_empty() else pairs.frame


def _pairs_of_many(messages: DataFrame) -> DataFrame | None:
    """Returns the same. Another publisher's messages, which may be very many, are joined before they are grouped."""
    published = messages.where(_PUBLISHED_ALONE).select("id", "topic").localCheckpoint()
    count = published.count()
    if not count:
        return None
    single = grouped(published, "id", n="count(*)").where("n = 1").select("id")
    # After a long outage of the broker millions of rows are unsent: too many to broadcast.
    single = single.hint("broadcast") if count <= BROADCAST_MAX else single
    stored = messages.where(_STORED_ALONE).select("id").join(single, "id", "left_semi")
    pairs = grouped(stored, "id", n="count(*)").where("n = 1").selectExpr("id", "true as is_pair").localCheckpoint()
    return None if pairs.isEmpty() else pairs
