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
KEYS_MAX: Final = 1_000
"""Up to so many keys are looked for by name; more by number."""
LISTED_ROWS_MAX: Final = 5_000
"""Up to so many rows of a set are fetched, and stand in the plans that ask for them."""
_BUCKET: Final = "xxhash64(coalesce(topic, ''), slot)"
_KEY: Final = "xxhash64(topic, message_key)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclean:
    """Where the sources disagree: parts (number of the topic, period, part) of the windows that are judged, and buckets
    (topic, slot); None where nothing is known by id. `elsewhere`: parts of other windows of the span disagree, too.
    `span`: the times of which business rows are read.
    """

    parts: DataFrame
    buckets: DataFrame | None
    elsewhere: bool
    span: Span | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    """The rows that are looked at; and, of business and archive, those that change what clean parts say was settled:
    `sign` 1, a row that agrees though its part does not; -1, one that is looked at though its part is clean.
    """

    legs: Legs
    changes: DataFrame


def drilled(near: Legs, legs: Legs, unclean: Unclean, *, covered: Sequence[str], much: bool = False) -> Drilled:
    """The rows of messages and keys in what is unclean. A message whose id carries no time, where something is known by
    id alone, is always among them. Where a rule covers the topic, so is everything under the same key: a business row
    is judged with all its messages. `near`: of `legs`, at least what stands in the unclean parts and buckets. `much`:
    that is scanned again rather than kept.
    """
    marks = _Marks(
        places=_sent_along(unclean.parts.selectExpr(f"{PLACE} as place").distinct()),
        slots=None
        if unclean.buckets is None
        else _sent_along(unclean.buckets.selectExpr(f"{_BUCKET} as place").distinct()),
    )
    found = [frame.where("asked or by_id") for frame in _placed(near, marks)]
    if not much:
        found = in_parallel(*(frame.localCheckpoint for frame in found))
    in_parts = [frame.where("asked") for frame in found]
    apart = _sent_along(unsettled(union(*in_parts[:2]), in_parts[2], covered=covered))
    chosen = [_looked_up(frame, KEY_PLACE, apart, "apart") for frame in found]
    keys = _sent_along(reduce(union, (_keys(frame, covered) for frame in chosen)).distinct())
    marked = [
        _looked_up(frame, _KEY, _places_of(keys), "under_key").selectExpr("*", f"({_LOOKED} or under_key) as wanted")
        for frame in chosen
    ]
    more = _under_keys(legs, marks, keys, unclean)
    rows, messages = in_parallel(
        reduce(union, (_rows(legs.rows, *pair) for pair in zip(marked[:2], more[:2], strict=True))).localCheckpoint,
        _rows(legs.messages, marked[2], more[2]).localCheckpoint,
    )
    judged = Legs(rows=rows, messages=messages, actions=legs.actions, inboxes=legs.inboxes)
    changes = reduce(union, (_changes(*pair) for pair in zip(marked[:2], more[:2], strict=True)))
    return Drilled(legs=judged if marks.slots is None else _with_events(judged, marks.slots), changes=changes)


_LOOKED: Final = "(asked and apart or by_id)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """Unclean parts and buckets, by number."""

    places: DataFrame
    slots: DataFrame | None


def _placed(legs: Legs, marks: _Marks) -> list[DataFrame]:
    """Business, outbox, messages, with `asked`: whether a row's part is unclean, and `by_id`: whether its bucket."""
    found = []
    for frame, slots in ((_business(legs), None), (_outbox(legs), marks.slots), (legs.messages, marks.slots)):
        parted = frame.selectExpr("*", *PARTED)
        placed = _looked_up(parted, PLACE, marks.places, "asked").drop("number", "period", "part")
        found.append(placed.selectExpr("*", "false as by_id") if slots is None else _by_bucket(placed, slots))
    return found


def _business(legs: Legs) -> DataFrame:
    return legs.rows.where(f"leg = '{Leg.BUSINESS}'")


def _outbox(legs: Legs) -> DataFrame:
    return legs.rows.where(f"leg in ('{Leg.OUTBOX}', '{Leg.ARCHIVE}')")


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
    keyed = frame.where(f"{_LOOKED} and {among('topic', covered)} and coalesce(message_key, '') != ''")
    return keyed.select("topic", "message_key")


def _places_of(keys: DataFrame) -> DataFrame:
    return keys.selectExpr(f"{_KEY} as place")


def _under_keys(legs: Legs, marks: _Marks, keys: DataFrame, unclean: Unclean) -> list[DataFrame]:
    """What was not found yet under these keys. In a clean part no message is without its business row: where there is
    none of these, and no other part is unclean, there is nothing; nor where these are not read.
    """
    few = [row["message_key"] for row in keys.limit(KEYS_MAX + 1).collect()]

    def under(frame: DataFrame, condition: str) -> DataFrame:
        # A list can choose what is opened of a file; a join cannot.
        listed = frame.where(frame["message_key"].isin(few)) if len(few) <= KEYS_MAX else frame
        return _looked_up(listed.where(condition), _KEY, _places_of(keys), "under_key").where("under_key")

    placed = _placed(legs, marks)
    if not few:
        return [under(frame, "false") for frame in placed]
    asking = under(placed[0], "not asked").localCheckpoint()
    if not unclean.elsewhere and asking.isEmpty():
        return [asking, *(under(frame, "false") for frame in placed[1:])]
    times = f"not asked and not by_id and (created_ms is null or {within(unclean.span)})"
    return [asking, *in_parallel(*(under(frame, times).localCheckpoint for frame in placed[1:]))]


def _rows(like: DataFrame, marked: DataFrame, more: DataFrame) -> DataFrame:
    return union(marked.where("wanted").select(*like.columns), more.select(*like.columns))


def _changes(marked: DataFrame, more: DataFrame) -> DataFrame:
    """With `sign`, what clean parts do not say rightly."""
    columns = [*(name for name in more.columns if name not in {"asked", "by_id", "under_key"}), "sign"]
    sign = "if(asked, if(wanted, 0, 1), if(wanted, -1, 0))"
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
    found = kept.limit(LISTED_ROWS_MAX + 1).toArrow()
    if found.num_rows <= LISTED_ROWS_MAX:
        # A list is part of the plan: whoever joins with it starts no job of its own.
        return broadcast(frame.sparkSession.createDataFrame(found))
    # A checkpoint keeps its columns' identities: joined with the frame that it came from, they would be one.
    known = kept.selectExpr(*(f"{name} as {name}" for name in kept.columns))
    return broadcast(known) if known.count() <= BROADCAST_ROWS_MAX else known
