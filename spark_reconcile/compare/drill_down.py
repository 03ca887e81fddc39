"""Drills down from mismatching parts and buckets to rows: all records of each message, and of its key.

A part is scanned once more, and keys on which the sources agree are settled in bulk; the few others are classified row
by row. Selects rows of DataFrames; classifies none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark_reconcile.compare.id_digests import Inputs
from spark_reconcile.compare.key_digests import (
    KEY_HASH,
    PART_HASH,
    PARTED,
    covered_topic,
    unsettled,
)
from spark_reconcile.core.dataframes import computed, fetched, in_parallel, union
from spark_reconcile.core.time_buckets import NO_SLOT, Span, hour, slot, within
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BROADCAST_ROWS_MAX: Final = 1_000_000
"""Up to so many places are broadcast; more are shuffled."""
KEYS_MAX: Final = 1_000
"""Up to so many keys are matched by name; more by hash."""
_BUCKET: Final = "xxhash64(coalesce(topic, ''), slot)"
_KEY: Final = "xxhash64(topic, message_key)"
_MESSAGE: Final = "xxhash64(topic, id)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatches:
    """Mismatches of the sources: all parts of the time range, in the columns of key_digests.clean_parts(), and buckets
    (topic, slot) of the evaluated windows; None if there are no records by id.

    `asked`: how many messages are in these parts; `much`: they are scanned again instead of cached. `span`: the time
    range of the business rows that are read.
    """

    parts: DataFrame
    asked: int
    much: bool
    buckets: DataFrame | None
    span: Span | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedRows:
    """The rows to classify; and, of business and archive, those that correct what was settled in bulk: `sign` 1, a row
    that agrees though its part does not; -1, one that is classified though its part is clean.
    """

    inputs: Inputs
    changes: DataFrame


def drill_down(
    near: Inputs, inputs: Inputs, unclean: Mismatches, *, covered: Sequence[str], has_unsent: bool, is_few: bool
) -> SelectedRows:
    """Returns the rows of messages and keys in mismatching parts and buckets. Messages whose id carries no time are
    always among them, if there are records by id alone. If a rule covers the topic, so are all rows with the same key:
    a business row is classified with all its messages; and a row that stands in the outbox, with all rows of its id.
    `near`: at least the rows of `inputs` in these parts and buckets; `has_unsent`: there are rows in the outbox;
    `is_few`: there are few rows in all.
    """
    marks = _Marks(
        parts=_distinct(unclean.parts, PART_HASH),
        slots=None if unclean.buckets is None else _distinct(unclean.buckets, _BUCKET),
    )
    placed = [frame.where("asked or by_id") for frame in _placed(near, marks)]
    if not unclean.much:
        placed = _kept(*placed)
    marked, named = _marked(placed, covered=covered, has_unsent=has_unsent, is_few=is_few)
    more = _named_elsewhere(inputs, marks, named, unclean, is_few=is_few)
    rows, messages = _kept(
        union(*(_rows(inputs.rows, *pair) for pair in zip(marked[:2], more[:2], strict=True))),
        _rows(inputs.messages, marked[2], more[2]),
    )
    selected = Inputs(rows=rows, messages=messages, actions=inputs.actions, inboxes=inputs.inboxes)
    changes = union(*(_changes(*pair) for pair in zip(marked[:2], more[:2], strict=True)))
    if marks.slots is not None:
        selected = _with_events(selected, marks.slots, is_few=is_few)
    return SelectedRows(inputs=selected, changes=changes)


def windows_beside(inputs: Inputs, batch: str, *, covered: Sequence[str]) -> set[int]:
    """Returns the windows that have rows with a key of a batch of windows; `batch`: a condition on `window_ms`."""
    keyed = _keyed(covered)
    placed = [
        frame.where(keyed).selectExpr("topic", "message_key", f"{hour('created_ms')} as window_ms")
        for frame in (inputs.rows, inputs.messages)
    ]
    windows = union(*placed).distinct()
    batch_keys = windows.where(batch).select("topic", "message_key")
    beside = windows.join(batch_keys, ["topic", "message_key"], "left_semi").select("window_ms").distinct()
    return {row["window_ms"] for row in beside.collect()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """Keys on covered topics of the rows to classify, and messages whose rows stand in the outbox (None: no row does):
    all rows with one of these are classified with them.
    """

    keys: DataFrame
    unsent: DataFrame | None

    def marked(self, frame: DataFrame) -> DataFrame:
        """Add the column `named`: whether a row has one of these keys, or is of one of these messages."""
        keyed = _looked_up(frame, _KEY, self.keys.selectExpr(f"{_KEY} as row_hash"), "under_key")
        if self.unsent is None:
            return keyed.withColumnRenamed("under_key", "named")
        of_these = self.unsent.selectExpr(f"{_MESSAGE} as row_hash")
        with_unsent = _looked_up(keyed, f"if(id is null, null, {_MESSAGE})", of_these, "unsent")
        return with_unsent.selectExpr("*", "under_key or unsent as named").drop("under_key", "unsent")


def _marked(
    placed: Sequence[DataFrame], *, covered: Sequence[str], has_unsent: bool, is_few: bool
) -> tuple[list[DataFrame], _Named]:
    """Returns the rows with `wanted`: whether they disagree, or are named by a row that does; and what those name."""
    in_parts = [frame.where("asked") for frame in placed]
    apart = _sent_along(unsettled(union(*in_parts[:2]), in_parts[2], covered=covered), is_few=is_few)
    chosen = [_looked_up(frame, KEY_HASH, apart, "apart") for frame in placed]
    keys = _sent_along(union(*(_keys(frame, covered) for frame in chosen)).distinct(), is_few=is_few)
    # A message that was sent in another hour is not unsent: its sender died before it removed the row.
    unsent = chosen[1].where(f"input_kind = '{InputKind.OUTBOX}' and {_LOOKED}").select("topic", "id").distinct()
    named = _Named(keys=keys, unsent=_sent_along(unsent, is_few=is_few) if has_unsent else None)
    return [named.marked(frame).selectExpr("*", f"({_LOOKED} or named) as wanted") for frame in chosen], named


_LOOKED: Final = "(asked and apart or by_id)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """Hashes of mismatching parts and buckets."""

    parts: DataFrame
    slots: DataFrame | None


def _placed(inputs: Inputs, marks: _Marks) -> list[DataFrame]:
    """Business, outbox, messages, with `asked`: whether a row's part mismatches, and `by_id`: its bucket does."""
    all_placed = []
    for frame, slots in ((_business(inputs), None), (_outbox(inputs), marks.slots), (inputs.messages, marks.slots)):
        placed = _asked(frame, marks.parts)
        all_placed.append(placed.selectExpr("*", "false as by_id") if slots is None else _by_bucket(placed, slots))
    return all_placed


def _asked(frame: DataFrame, parts: DataFrame) -> DataFrame:
    return _looked_up(frame.selectExpr("*", *PARTED), PART_HASH, parts, "asked").select(*frame.columns, "asked")


def _business(inputs: Inputs) -> DataFrame:
    return inputs.rows.where(f"input_kind = '{InputKind.BUSINESS}'")


def _outbox(inputs: Inputs) -> DataFrame:
    return inputs.rows.where(f"input_kind in ('{InputKind.OUTBOX}', '{InputKind.ARCHIVE}')")


def _by_bucket(frame: DataFrame, slots: DataFrame) -> DataFrame:
    """Add `by_id`: whether the row's bucket mismatches, or its id carries no time."""
    slotted = frame.selectExpr("*", f"{slot()} as slot")
    marked = _looked_up(slotted, _BUCKET, slots, "unclean")
    return marked.selectExpr("*", f"(id is not null and (unclean or slot = '{NO_SLOT}')) as by_id").drop(
        "unclean", "slot"
    )


def _looked_up(frame: DataFrame, value: str, among_these: DataFrame, name: str) -> DataFrame:
    """Add the column `name`: whether the value is one of `row_hash`."""
    placed = frame.selectExpr("*", f"{value} as row_hash").join(
        among_these.selectExpr("row_hash", "true as found"), "row_hash", "left"
    )
    return placed.selectExpr("*", f"(found is not null) as {name}").drop("row_hash", "found")


def _keys(frame: DataFrame, covered: Sequence[str]) -> DataFrame:
    """Returns the keys of rows to classify, on covered topics."""
    return frame.where(f"{_LOOKED} and {_keyed(covered)}").select("topic", "message_key")


def _keyed(covered: Sequence[str]) -> str:
    """SQL condition: a row is classified with all rows that have its key."""
    return f"{covered_topic(covered)} and coalesce(message_key, '') != ''"


def _named_elsewhere(
    inputs: Inputs, marks: _Marks, named: _Named, unclean: Mismatches, *, is_few: bool
) -> list[DataFrame]:
    """Returns the other rows with these keys, or of these messages. In a clean part every message has its business row:
    without business rows of these keys there are none; nor if business rows are not read.
    """
    keys = [row["message_key"] for row in named.keys.limit(KEYS_MAX + 1).collect()]
    ids = [] if named.unsent is None else [row["id"] for row in named.unsent.limit(KEYS_MAX + 1).collect()]

    def other_rows(frame: DataFrame, condition: str) -> DataFrame:
        # A list of literals can prune the row groups of a file; a join cannot.
        is_listed = frame["message_key"].isin(keys) | frame["id"].isin(ids)
        listed = frame.where(is_listed) if max(len(keys), len(ids)) <= KEYS_MAX else frame
        return named.marked(listed.where(condition)).where("named")

    def no_more(frames: Sequence[DataFrame]) -> list[DataFrame]:
        return [other_rows(frame, "false") for frame in frames]

    placed = _placed(inputs, marks)
    if not keys and not ids:
        return no_more(placed)
    asking = computed(other_rows(placed[0], "not asked"), is_few=is_few)
    if asking.is_empty() and not ids:
        return [asking.frame, *no_more(placed[1:])]
    times = f"not asked and not by_id and (created_ms is null or {within(unclean.span)})"
    return [asking.frame, *_kept(*(other_rows(frame, times) for frame in placed[1:]))]


def _rows(like: DataFrame, marked: DataFrame, more: DataFrame) -> DataFrame:
    return union(marked.where("wanted").select(*like.columns), more.select(*like.columns))


def _changes(marked: DataFrame, more: DataFrame) -> DataFrame:
    """Returns, with `sign`, rows that correct what was settled in bulk."""
    columns = [*(name for name in more.columns if name not in {"asked", "by_id", "named"}), "sign"]
    sign = "if(asked, if(wanted, 0, 1), if(wanted, -1, 0))"
    signed = marked.selectExpr("*", f"{sign} as sign").select(*columns)
    return union(signed, more.selectExpr("*", "-1 as sign").select(*columns)).where("sign != 0")


def _with_events(selected: Inputs, slots: DataFrame, *, is_few: bool) -> Inputs:
    """Add records by id alone: of mismatching buckets, of the messages to classify, and of cancels."""
    published = selected.rows.where(f"input_kind != '{InputKind.BUSINESS}'").selectExpr(f"{_MESSAGE} as row_hash")
    everything = union(published, selected.messages.selectExpr(f"{_MESSAGE} as row_hash"))
    named = _sent_along(everything.distinct(), is_few=is_few)

    def chosen(frame: DataFrame) -> DataFrame:
        marked = _looked_up(_by_bucket(frame, slots), _MESSAGE, named, "named")
        # A cancel names no topic.
        return marked.where("by_id or named or (id is not null and topic is null)").select(*frame.columns)

    actions, inboxes = _kept(chosen(selected.actions), chosen(selected.inboxes))
    return Inputs(rows=selected.rows, messages=selected.messages, actions=actions, inboxes=inboxes)


def _kept(*frames: DataFrame) -> list[DataFrame]:
    """Compute and cache all frames concurrently."""
    return in_parallel(*(frame.localCheckpoint for frame in frames))


def _sent_along(frame: DataFrame, *, is_few: bool) -> DataFrame:
    """Compute a set; if it is small, it is broadcast, so that the inputs need not be shuffled."""
    whole = computed(frame, is_few=is_few)
    small = fetched(whole.frame) if whole.table is None else whole
    if small is not None:
        return small.frame.hint("broadcast")
    # A checkpoint keeps the ids of its columns: joined with the frame that it came from, they would be ambiguous.
    renamed = whole.frame.selectExpr(*(f"{name} as {name}" for name in whole.frame.columns))
    return renamed.hint("broadcast") if renamed.count() <= BROADCAST_ROWS_MAX else renamed


def _distinct(whole: DataFrame, hash_sql: str) -> DataFrame:
    """Returns the distinct hashes of cached rows: computing them twice costs less than caching them, too."""
    distinct_hashes = whole.selectExpr(f"{hash_sql} as row_hash").distinct()
    small = fetched(distinct_hashes)
    return _sent_along(distinct_hashes, is_few=False) if small is None else small.frame.hint("broadcast")
