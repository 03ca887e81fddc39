"""Cancels that are good for some topics: Spark matches the topics of their scopes as the broker does.

What such a cancel says of messages is in test_cancels, and of one id on two topics in test_reconciliation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox_broker.common.cancel_topic_patterns import covers
from outbox_core.journal import journal
from outbox_core.journal.block import FrameKind
from spark_reconcile.sources.broker_logs import LoggedFrame, action_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.parametrize("scope", [("lim.*", "x.?"), ("[ab].c",), ("a-b_c",), ("a.b",), ("*.end", "begin.*.end")])
def test_the_rows_of_a_cancel_name_the_topics_that_the_broker_takes_it_for(
    spark: SparkSession, scope: tuple[str, ...]
) -> None:
    topics = [
        "lim.a",
        "lim.",
        "lim",
        "xlim.a",
        "x.1",
        "x.12",
        "a.c",
        "b.c",
        "c.c",
        "a-b_c",
        "a.b",
        "axb",
        "begin.x.end",
    ]
    cancel = journal.Canceled(at_ms=1, ids=["m"], topics=[""], scope=scope)
    (row,) = action_rows(LoggedFrame(FrameKind.CHANGE, 0, journal.encode_record(cancel), stored_ms=0, position=0))
    frame = spark.createDataFrame([(one, row[9]) for one in topics], "topic string, within string")

    found = [row["topic"] for row in frame.where("rlike(topic, within)").collect()]

    assert found == [one for one in topics if covers(scope, one)]
    assert found
