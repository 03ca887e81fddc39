"""Brings rows into this process where they are few, and keeps frames where they are. It judges and chooses none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from spark_reconcile.digests import Legs
from spark_reconcile.in_memory import Memory, as_spark, few, to_spark
from spark_reconcile.reading import in_parallel
from spark_reconcile.sources.frames import ACTION_SCHEMA, MESSAGE_SCHEMA
from spark_reconcile.sources.statements import LEG_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FEW_ROWS_MAX: Final = 100_000
"""Up to so many rows are judged in this process; of so few a query of Spark's costs more than its rows."""


def brought(memory: Memory, frames: Sequence[DataFrame]) -> list[DataFrame] | None:
    """The same rows in memory; None: they are too many. Frames that are there already are counted, too."""
    # One more than that: these are too many.
    asked = [frame.limit(FEW_ROWS_MAX + 1).toArrow for frame in frames if few(frame) is None]
    found = iter(tables := in_parallel(*asked))
    if sum(table.num_rows for table in tables) + sum(frame.count() for frame in filter(few, frames)) > FEW_ROWS_MAX:
        return None
    return [frame if few(frame) else as_spark(memory.of_arrow(next(found))) for frame in frames]


def in_one_place(memory: Memory, legs: Legs, session: SparkSession) -> Legs:
    """All legs here, where their rows are few; else all of them where Spark has them."""
    frames = (legs.rows, legs.messages, legs.actions, legs.inboxes)
    rows, messages, actions, inboxes = brought(memory, frames) or (
        to_spark(session, frame, schema)
        for frame, schema in zip(frames, (LEG_SCHEMA, MESSAGE_SCHEMA, ACTION_SCHEMA, LEG_SCHEMA), strict=True)
    )
    return Legs(rows=rows, messages=messages, actions=actions, inboxes=inboxes)


def beside_keys(keys: DataFrame, *frames: DataFrame) -> list[DataFrame] | None:
    """Each worked out, and kept where `keys` are; None: they are too many for that."""
    here = few(keys)
    return kept(*frames) if here is None else brought(here.sparkSession, frames)


def held(frame: DataFrame) -> DataFrame:
    """Few rows worked out and kept, as they are asked for again and again; what Spark has is left as it is."""
    return frame.localCheckpoint() if few(frame) else frame


def kept(*frames: DataFrame) -> list[DataFrame]:
    """Each worked out and kept: by Spark side by side, few rows one after the other."""
    if any(map(few, frames)):
        return [frame.localCheckpoint() for frame in frames]
    return in_parallel(*(frame.localCheckpoint for frame in frames))
