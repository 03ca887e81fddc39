"""From buckets that disagree to the rows that must be looked at: all records of each message in them, and of its key.

DataFrames in, DataFrames out: it says which rows, and judges none.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.digests import Legs
from spark_reconcile.slots import KEY_SLOT, NO_SLOT, period, period_of_message, slot
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
    buckets, keys = buckets.localCheckpoint(), keys.localCheckpoint()
    stored = [_marked(frame, buckets) for frame in (outbox, legs.messages)]
    asked = [
        *(
            frame.where(f"looked or ({among} and unclean_key)").where(among).selectExpr("topic", "message_key")
            for frame in (_key_marked(frame, keys, period_of_message("created_ms")) for frame in stored)
        ),
        _key_marked(business, keys, period("created_ms")).where("unclean_key").selectExpr("topic", "message_key"),
    ]
    wanted = _sent_along(reduce(_union, asked).where("coalesce(message_key, '') != ''").distinct())
    chosen = [
        _keyed(frame, wanted).where("looked or wanted is not null").select(*leg.columns).localCheckpoint()
        for frame, leg in zip(stored, (legs.rows, legs.messages), strict=True)
    ]
    ids = _sent_along(reduce(_union, (frame.select("id") for frame in chosen)).distinct())
    rows = _union(
        chosen[0],
        _keyed(_key_marked(business, keys, period("created_ms")), wanted)
        .where("wanted is not null or (unclean_key and coalesce(message_key, '') = '')")
        .select(*legs.rows.columns),
    )
    return Legs(
        rows=rows.localCheckpoint(),
        messages=chosen[1],
        actions=_by_id(legs.actions, buckets, ids).localCheckpoint(),
        inboxes=_by_id(legs.inboxes, buckets, ids).localCheckpoint(),
    )


def _marked(frame: DataFrame, buckets: DataFrame) -> DataFrame:
    """With `looked`: whether the row's bucket is unclean, or its id carries no time."""
    from pyspark.sql.functions import broadcast

    slotted = frame.selectExpr("*", "coalesce(topic, '') as bucket_topic", f"{slot()} as slot")
    unclean = buckets.selectExpr("topic as bucket_topic", "slot", "true as unclean")
    joined = slotted.join(broadcast(unclean), ["bucket_topic", "slot"], "left")
    return joined.selectExpr("*", f"(unclean is not null or slot = '{NO_SLOT}') as looked")


def _key_marked(frame: DataFrame, keys: DataFrame, period_: str) -> DataFrame:
    from pyspark.sql.functions import broadcast

    parts = frame.selectExpr("*", f"coalesce({period_}, '') as period", f"{KEY_SLOT} as key_slot")
    unclean = keys.selectExpr("topic", "period", "key_slot", "true as found")
    joined = parts.join(broadcast(unclean), ["topic", "period", "key_slot"], "left")
    return joined.selectExpr("*", "(found is not null) as unclean_key")


def _keyed(frame: DataFrame, wanted: DataFrame) -> DataFrame:
    return frame.join(wanted.selectExpr("topic", "message_key", "true as wanted"), ["topic", "message_key"], "left")


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
