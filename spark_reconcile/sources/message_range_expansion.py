"""Expands actions on runs of messages to one action for each message: the message log gives the id of each sequence.

Relies on the log's rule that messages, including copies of scheduled ones, are durable before they are delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_reconcile.sources.log_records import ACTION_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def named_runs(runs: DataFrame, messages: DataFrame, *, is_whole: bool) -> DataFrame:
    """Expands rows of RUN_SCHEMA on runs to rows of ACTION_SCHEMA, one for each message.

    `is_whole`: nothing of both logs was dropped. Then a message that they do not have gets its sequence as a name, so
    that it is classified; else it was dropped, and is no evidence.
    """
    concerned = runs.where("messages is not null").withColumn("first", runs["sequence"])
    expanded = concerned.selectExpr(
        *(name for name in _names() if name != "sequence"), "explode(sequence(first, first + messages - 1)) as sequence"
    )
    ids_by_sequence = messages.where("sequence is not null").selectExpr("topic", "sequence", "id as known")
    joined = expanded.join(ids_by_sequence, ["topic", "sequence"], "left" if is_whole else "inner")
    return joined.selectExpr(*("coalesce(known, topic || '#' || sequence) as id" if name == "id" else name
                               for name in _names()))  # fmt: skip


def single(runs: DataFrame) -> DataFrame:
    """Returns the rows of RUN_SCHEMA on one message or a whole group, as rows of ACTION_SCHEMA."""
    return runs.where("messages is null").select(*_names())


def _names() -> list[str]:
    return [column.split()[0] for column in ACTION_SCHEMA.split(", ")]
