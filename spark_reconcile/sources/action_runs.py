"""Actions on runs of messages as actions on each, by name: the message log says which id stands at which sequence.

It relies on the log's rule that what was handed out was durable before, a scheduled message's copy too. It reads and
judges nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_reconcile.sources.log_records import ACTION_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def named_runs(runs: DataFrame, messages: DataFrame, *, is_whole: bool) -> DataFrame:
    """Rows of RUN_SCHEMA that concern runs, as rows of ACTION_SCHEMA, one for each message.

    `is_whole`: both logs begin at their beginnings. Then a message that they do not hold is named by its place, so that
    it is judged as what it is; else it was dropped, and tells nothing.
    """
    concerned = runs.where("messages is not null").withColumn("first", runs["sequence"])
    each = concerned.selectExpr(
        *(name for name in _names() if name != "sequence"), "explode(sequence(first, first + messages - 1)) as sequence"
    )
    places = messages.where("sequence is not null").selectExpr("topic", "sequence", "id as known")
    joined = each.join(places, ["topic", "sequence"], "left" if is_whole else "inner")
    return joined.selectExpr(*("coalesce(known, topic || '#' || sequence) as id" if name == "id" else name
                               for name in _names()))  # fmt: skip


def single(runs: DataFrame) -> DataFrame:
    """The rows of RUN_SCHEMA that name their message, or concern a whole group, as rows of ACTION_SCHEMA."""
    return runs.where("messages is null").select(*_names())


def _names() -> list[str]:
    return [column.split()[0] for column in ACTION_SCHEMA.split(", ")]
