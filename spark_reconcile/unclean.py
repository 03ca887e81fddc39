"""What must be scanned once more: in parts that disagree the keys that differ, where their sums tell these, or all; and
buckets that disagree. It reads digests, and no rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from spark_reconcile.bringing import FEW_ROWS_MAX
from spark_reconcile.decoding import KEYS, decoded
from spark_reconcile.parts import PLACE
from spark_reconcile.sources.statements import Span

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

LEGS: Final = 3
"""A message has a row in each of so many."""
PARTS_MAX: Final = 1_000_000
"""Up to so many parts are fetched, and sent to every worker; more are shuffled."""
KEPT_SHARE_MAX: Final = 0.1
"""Up to so much of the messages, those that are asked for are kept by Spark; more are scanned again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts that disagree, to be joined with: `places`, each with the numbers of its keys (KEYS), or null for all of
    them. `by_key`: the sums of those with keys; None: there are none. `asked`: about how many messages are asked for;
    `much`: these are scanned again rather than kept.
    """

    places: DataFrame
    by_key: pa.Table | None
    asked: int
    much: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclean:
    """Where the sources disagree: parts of the windows that are judged, and buckets (topic, slot); None where nothing
    is known by id. `elsewhere`: parts of other windows of the span disagree, too. `span`: the times of which business
    rows are read.
    """

    parts: Parts
    buckets: DataFrame | None
    elsewhere: bool
    span: Span | None

    def by_part(self) -> Unclean:
        """The same with every part asked for whole."""
        return replace(self, parts=replace(self.parts, places=_whole(self.parts.places), by_key=None, much=True))


def disagreeing(parts: DataFrame, *, count: int, asked: int, messages: int) -> Parts:
    """Of parts that disagree, in the columns of parts.clean_parts(), what is asked for.

    `count`: how many they are; `asked`: how many messages stand in them, of `messages` in all. Few are asked for whole.
    """
    import pyarrow.compute as pc

    found = parts.selectExpr("*", f"{PLACE} as place")
    whole = Parts(places=_whole(found).distinct(), by_key=None, asked=asked, much=asked > KEPT_SHARE_MAX * messages)
    if count > PARTS_MAX:
        return whole
    listed = found.toArrow()
    places = listed.group_by("place").aggregate([])
    if LEGS * asked > FEW_ROWS_MAX and places.num_rows == listed.num_rows:
        told = decoded(listed)
        by_part = pc.sum(told.whole["n"]).as_py() or 0
        # Where much is asked for whole, keys would save little; and what they leave is checked by rows that are kept.
        if told.by_key.num_rows and by_part <= KEPT_SHARE_MAX * messages:
            sent = _sent_along(parts.sparkSession, told.by_key, told.whole)
            return Parts(places=sent, by_key=told.by_key, asked=by_part + told.keys, much=False)
    return replace(whole, places=_sent_along(parts.sparkSession, places))


def _sent_along(session: SparkSession, *parts: pa.Table) -> DataFrame:
    """The numbers of parts, and of their keys where these are known, for every worker."""
    import pyarrow as pa

    def column(table: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
        return table[name] if name in table.column_names else pa.nulls(table.num_rows, pa.int64())

    named = [pa.table({name: column(table, name) for name in ("place", *KEYS)}) for table in parts]
    return session.createDataFrame(pa.concat_tables(named)).hint("broadcast")


def _whole(parts: DataFrame) -> DataFrame:
    return parts.selectExpr("place", *(f"cast(null as bigint) as {name}" for name in KEYS))
