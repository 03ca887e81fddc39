"""From parts and buckets that disagree to the rows that must be looked at: of each message all records, and of its key.

A part is scanned once more, and what agrees in it key by key is settled; the rest, which is little, is looked at.
DataFrames in, DataFrames out: it says which rows, and judges none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.digests import Legs, union
from spark_reconcile.parts import KEY_PLACE, PARTED, PLACE, among, unsettled
from spark_reconcile.reading import in_parallel
from spark_reconcile.slots import NO_SLOT, slot, within
from spark_reconcile.sources.statements import Leg, Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BROADCAST_ROWS_MAX: Final = 1_000_000
"""Up to so many places are sent to every worker; more are shuffled."""
_BUCKET: Final = "xxhash64(coalesce(topic, ''), slot)"
_KEY: Final = "xxhash64(topic, message_key)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclean:
    """Where the sources disagree: parts (number of the topic, period, part; asked: in a window that is judged), and
    buckets (topic, slot); None where nothing is known by id. `span`: the times of which business rows are read.
    """

    parts: DataFrame
    buckets: DataFrame | None
    span: Span | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    """The rows that are looked at; and, of business and archive, those that change what clean parts say was settled:
    `sign` 1, a row that agrees though its part does not; -1, one that is looked at though its part is clean.
    """

    legs: Legs
    changes: DataFrame


def drilled(legs: Legs, unclean: Unclean, *, covered: Sequence[str], much: bool = False) -> Drilled:
    """The rows of messages and keys in what is unclean. A message whose id carries no time, where something is known by
    id alone, is always among them. Where a rule covers the topic, so is everything under the same key: a business row
    is judged with all its messages. `much`: what lies in unclean parts is scanned again rather than kept.
    """
    places = _sent_along(_numbered(unclean.parts))
    slots = (
        None if unclean.buckets is None else _sent_along(unclean.buckets.selectExpr(f"{_BUCKET} as place").distinct())
    )
    placed = [
        _placed(_business(legs), places, None),
        *(_placed(frame, places, slots) for frame in (_outbox(legs), legs.messages)),
    ]
    found = [frame.where("asked is not null or by_id") for frame in placed]
    if not much:
        found = in_parallel(*(frame.localCheckpoint for frame in found))
    in_parts = [frame.where("asked is not null") for frame in found]
    apart = _sent_along(unsettled(union(*in_parts[:2]), in_parts[2], covered=covered))
    chosen = [_looked_up(frame, KEY_PLACE, apart, "apart") for frame in found]
    keys = _sent_along(reduce(union, (_keys(frame, covered) for frame in chosen)).distinct())
    marked = [
        _looked_up(frame, _KEY, keys, "under_key").selectExpr("*", f"({_LOOKED} or under_key) as wanted")
        for frame in chosen
    ]
    more = [frame.where("under_key") for frame in _under_keys(placed, keys, unclean.span)]
    rows, messages = in_parallel(
        reduce(union, (_rows(legs.rows, *pair) for pair in zip(marked[:2], more[:2], strict=True))).localCheckpoint,
        _rows(legs.messages, marked[2], more[2]).localCheckpoint,
    )
    judged = Legs(rows=rows, messages=messages, actions=legs.actions, inboxes=legs.inboxes)
    changes = reduce(union, (_changes(*pair) for pair in zip(marked[:2], more[:2], strict=True)))
    return Drilled(legs=judged if slots is None else _with_events(judged, slots), changes=changes)


_LOOKED: Final = "coalesce(asked, false) and apart or by_id"


def _numbered(parts: DataFrame) -> DataFrame:
    """Parts by number, each once."""
    numbered = parts.selectExpr(f"{PLACE} as place", "asked")
    return numbered.groupBy("place").agg({"asked": "max"}).withColumnRenamed("max(asked)", "asked")


def _business(legs: Legs) -> DataFrame:
    return legs.rows.where(f"leg = '{Leg.BUSINESS}'")


def _outbox(legs: Legs) -> DataFrame:
    return legs.rows.where(f"leg in ('{Leg.OUTBOX}', '{Leg.ARCHIVE}')")


def _placed(frame: DataFrame, places: DataFrame, slots: DataFrame | None) -> DataFrame:
    """With `asked`, null outside of unclean parts, and `by_id`: whether the row's bucket is unclean."""
    parted = frame.selectExpr("*", *PARTED).selectExpr("*", f"{PLACE} as place").drop("number", "period", "part")
    joined = parted.join(places, "place", "left").drop("place")
    return joined.selectExpr("*", "false as by_id") if slots is None else _by_bucket(joined, slots)


def _by_bucket(frame: DataFrame, slots: DataFrame) -> DataFrame:
    """With `by_id`: whether the row's bucket is unclean, or its id carries no time."""
    slotted = frame.selectExpr("*", f"{slot()} as slot")
    marked = _looked_up(slotted, _BUCKET, slots, "unclean")
    return marked.selectExpr("*", f"(id is not null and (unclean or slot = '{NO_SLOT}')) as by_id").drop(
        "unclean", "slot"
    )


def _looked_up(frame: DataFrame, value: str, among_these: DataFrame, name: str) -> DataFrame:
    """With `name`: whether the value is one of `place`."""
    placed = frame.selectExpr("*", f"{value} as place").join(
        among_these.selectExpr("place", "true as found"), "place", "left"
    )
    return placed.selectExpr("*", f"(found is not null) as {name}").drop("place", "found")


def _keys(frame: DataFrame, covered: Sequence[str]) -> DataFrame:
    """The keys of what is looked at, on covered topics."""
    keyed = frame.where(f"({_LOOKED}) and {among('topic', covered)} and coalesce(message_key, '') != ''")
    return keyed.selectExpr(f"{_KEY} as place")


def _under_keys(placed: Sequence[DataFrame], keys: DataFrame, span: Span | None) -> list[DataFrame]:
    """What was not found yet under these keys. In a clean part no message is without its business row: where there is
    none of these, there is nothing; nor where these are not read.
    """
    if keys.isEmpty():
        return [_looked_up(frame.where("false"), _KEY, keys, "under_key") for frame in placed]
    business, *stored = (
        _looked_up(frame.where("asked is null and not by_id"), _KEY, keys, "under_key") for frame in placed
    )
    asking = business.where("under_key").localCheckpoint()
    if asking.isEmpty():
        return [asking, *(frame.where("false") for frame in stored)]
    return [asking, *in_parallel(*(frame.where(f"under_key and {within(span)}").localCheckpoint for frame in stored))]


def _rows(like: DataFrame, marked: DataFrame, more: DataFrame) -> DataFrame:
    return union(marked.where("wanted").select(*like.columns), more.select(*like.columns))


def _changes(marked: DataFrame, more: DataFrame) -> DataFrame:
    """With `sign`, what clean parts do not say rightly."""
    columns = [*(name for name in more.columns if name not in {"asked", "by_id", "under_key"}), "sign"]
    sign = "if(asked is null, if(wanted, -1, 0), if(wanted, 0, 1))"
    signed = marked.selectExpr("*", f"{sign} as sign").select(*columns)
    return union(signed, more.selectExpr("*", "-1 as sign").select(*columns)).where("sign != 0")


def _with_events(judged: Legs, slots: DataFrame) -> Legs:
    """With what was noted by id alone: in unclean buckets, of the messages that are looked at, and of cancels."""
    published = judged.rows.where(f"leg != '{Leg.BUSINESS}'").select("id")
    ids = _sent_along(union(published, judged.messages.select("id")).distinct().withColumnRenamed("id", "place"))

    def chosen(frame: DataFrame) -> DataFrame:
        marked = _looked_up(_by_bucket(frame, slots), "id", ids, "named")
        # A cancel names no topic.
        return marked.where("by_id or named or (id is not null and topic is null)").select(*frame.columns)

    actions, inboxes = in_parallel(chosen(judged.actions).localCheckpoint, chosen(judged.inboxes).localCheckpoint)
    return Legs(rows=judged.rows, messages=judged.messages, actions=actions, inboxes=inboxes)


def _sent_along(frame: DataFrame) -> DataFrame:
    """A set that was worked out; small, it goes to every worker, so that the legs need not be shuffled."""
    from pyspark.sql.functions import broadcast

    kept = frame.localCheckpoint()
    # A checkpoint keeps its columns' identities: joined with the frame that it came from, they would be one.
    known = kept.selectExpr(*(f"{name} as {name}" for name in kept.columns))
    return broadcast(known) if known.count() <= BROADCAST_ROWS_MAX else known
