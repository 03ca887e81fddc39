"""From buckets that disagree to the rows that must be looked at: all records of each message in them, and of its key.

DataFrames in, DataFrames out: it says which rows, and judges none.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.digests import Legs
from spark_reconcile.reading import in_parallel
from spark_reconcile.slots import KEY_SLOT, NO_SLOT, period, slot
from spark_reconcile.sources.statements import Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BROADCAST_ROWS_MAX: Final = 1_000_000
"""Up to so many ids are sent to every worker; more are shuffled."""


def drilled(legs: Legs, *, buckets: DataFrame, keys: DataFrame, covered: list[str]) -> Legs:
    """The rows of messages in unclean `buckets` (topic, slot) or under unclean `keys` (topic, period, key_slot).

    A message whose id carries no time is always among them. Where a rule covers the topic, so is everything under the
    same key: a business row is judged with all its messages.
    """
    among = f"topic in ({', '.join(repr(topic) for topic in covered)})" if covered else "false"
    outbox = legs.rows.where(f"leg in ('{Leg.OUTBOX}', '{Leg.ARCHIVE}')")
    business = legs.rows.where(f"leg = '{Leg.BUSINESS}'")
    buckets, keys = in_parallel(lambda: _places(buckets, _BUCKET), lambda: _places(keys, _PART))
    stored = [_marked(frame, buckets) for frame in (outbox, legs.messages)]
    asked = [
        *(
            frame.where(f"looked or unclean_key and {among}").where(among).select("topic", "message_key")
            for frame in (_key_marked(frame, keys) for frame in stored)
        ),
        _key_marked(business, keys).where("unclean_key").select("topic", "message_key"),
    ]
    wanted = _sent_along(reduce(_union, asked).where("coalesce(message_key, '') != ''").distinct())
    asked_for = _places(wanted, _KEY)
    chosen = [_keyed(frame, asked_for).where("looked or wanted is not null") for frame in stored]
    asking = _keyed(_key_marked(business, keys), asked_for).where(
        "wanted is not null or (unclean_key and coalesce(message_key, '') = '')"
    )
    rows, messages = in_parallel(
        (_union(chosen[0].select(*legs.rows.columns), asking.select(*legs.rows.columns))).localCheckpoint,
        chosen[1].select(*legs.messages.columns).localCheckpoint,
    )
    published = rows.where(f"leg != '{Leg.BUSINESS}'").select("id")
    ids = _sent_along(_union(published, messages.select("id")).distinct())
    actions, inboxes = in_parallel(
        _by_id(legs.actions, buckets, ids).localCheckpoint, _by_id(legs.inboxes, buckets, ids).localCheckpoint
    )
    return Legs(rows=rows, messages=messages, actions=actions, inboxes=inboxes)


_BUCKET: Final = "xxhash64(coalesce(topic, ''), slot)"
_PART: Final = "xxhash64(topic, period, key_slot)"
_KEY: Final = "xxhash64(topic, message_key)"
"""Numbers are looked up in a third of the time of texts. Two that share one cost a look, and change no verdict."""


def _places(frame: DataFrame, place: str) -> DataFrame:
    """A set of buckets, parts or keys by number, sent to every worker where it is small."""
    return _sent_along(frame.selectExpr(f"{place} as place").distinct())


def _marked(frame: DataFrame, buckets: DataFrame) -> DataFrame:
    """With `looked`: whether the row's bucket is unclean, or its id carries no time."""
    slotted = frame.selectExpr("*", f"{slot()} as slot").selectExpr("*", f"{_BUCKET} as place")
    joined = slotted.join(buckets.selectExpr("place", "true as unclean"), "place", "left").drop("place")
    return joined.selectExpr("*", f"(unclean is not null or slot = '{NO_SLOT}') as looked").drop("unclean")


def _key_marked(frame: DataFrame, keys: DataFrame) -> DataFrame:
    parts = frame.selectExpr("*", f"{period('created_ms')} as period", f"{KEY_SLOT} as key_slot")
    placed = parts.selectExpr("*", f"{_PART} as place")
    joined = placed.join(keys.selectExpr("place", "true as found"), "place", "left").drop("place")
    return joined.selectExpr("*", "(found is not null) as unclean_key").drop("found")


def _keyed(frame: DataFrame, wanted: DataFrame) -> DataFrame:
    placed = frame.selectExpr("*", f"{_KEY} as place")
    return placed.join(wanted.selectExpr("place", "true as wanted"), "place", "left").drop("place")


def _by_id(frame: DataFrame, buckets: DataFrame, ids: DataFrame) -> DataFrame:
    """Of records that have no key: those in unclean buckets, and those of the messages that were chosen."""
    marked = _marked(frame, buckets).join(ids.selectExpr("id", "true as chosen"), "id", "left")
    # A cancel names no topic.
    return marked.where("looked or chosen is not null or (id is not null and topic is null)").select(*frame.columns)


def _sent_along(frame: DataFrame) -> DataFrame:
    """A set that was worked out; small, it goes to every worker, so that the legs need not be shuffled."""
    from pyspark.sql.functions import broadcast

    kept = frame.localCheckpoint()
    # A checkpoint keeps its columns' identities: joined with the frame that it came from, they would be one.
    known = kept.selectExpr(*(f"{name} as {name}" for name in kept.columns))
    return broadcast(known) if known.count() <= BROADCAST_ROWS_MAX else known


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other)
