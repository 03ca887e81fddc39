"""One row of evidence for each message id: a tagged union of all legs, one group-by, the business rows beside it.

DataFrames in, DataFrame out; nothing is read or judged here. Every fact is a number that is never null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.cancels import ANSWERED, APPLIES, EXTREMES, NOTED, TAKEN, UNNOTED
from spark_reconcile.in_memory import grouped
from spark_reconcile.sources.statements import CANCELS, Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TEXTS: Final = ("topic", "message_key", "within")
_COUNTS: Final = (
    "outbox", "parked", "archive", "resent", "repeated", "canceled", "canceled_within", "took_effect", "plain",
    "noted", "due",
)  # fmt: skip
_TIMES: Final = (
    "body_hash", "due_ms", "created_ms", "sent_ms", "stored_ms", "fired_ms", "sequence", "placed_ms", "fell_due_ms",
    "canceled_ms", "cancel_noted",
)  # fmt: skip

# A scheduled message stands in the log up to twice: a note while it waits, and itself once it is due. Either will do.
_BROKER: Final = "sum(plain) + greatest(sum(noted), sum(due))"
# The broker notes a cancel of an id that it has forgotten, too: after the message has its place it takes nothing back.
_CANCELED: Final = (
    "if(coalesce(min(canceled_ms) > coalesce(min(placed_ms), min(fell_due_ms)), false), 0L, sum(canceled))"
)
_FACTS: Final = {
    **{name: f"sum({name})" for name in ("outbox", "parked", "archive", "resent", "repeated", "took_effect")},
    "broker": _BROKER,
    "canceled": _CANCELED,
}


def message_evidence(
    rows: DataFrame, messages: DataFrame, actions: DataFrame, *, business: DataFrame, reaches: Mapping[str, int],
    until: Mapping[str, int], known_topics: Sequence[str],
) -> DataFrame:  # fmt: skip
    """`rows`: the outbox's and archive's legs; `business`: as business_keys() gives it; `reaches`: since when the
    business rows of each covered topic are complete, `until`: and until when; `known_topics`: what the outbox has
    ever published to.
    """
    united = reduce(lambda one, other: one.unionByName(other), _legs(rows, messages, actions))
    # The answer to a cancel that is not among the rows tells nothing.
    by_id = grouped(united, "id", **_aggregates()).where("cancel_noted < 0 or archive > 0")
    joined = by_id.join(business, ["topic", "message_key"], "left")
    return joined.selectExpr(
        "id", "topic", "message_key", *(name for name in _FACTS if name != "canceled"),
        f"if({APPLIES}, canceled, greatest(canceled - canceled_within, 0L)) as canceled",
        "body_differs", "topic_differs", "key_differs", "due_differs", "cancel_noted", "created_ms", "sent_ms",
        "stored_ms", "fired_ms", "sequence", "due_ms as deliver_at_ms",
        "greatest(stored_ms, due_ms) as ready_ms",
        "if(stored_ms > 0, stored_ms, created_ms) as accepted_ms",
        f"if({_among('topic', reaches)}, 1, 0) as covered",
        f"if({_among('topic', [CANCELS])}, 1, 0) as cancel",
        "coalesce(business_rows, 0L) as business",
        f"{_reach_case(reaches)} as business_reach_ms",
        f"{_reach_case(until)} as business_until_ms",
        f"if({_among('topic', known_topics)}, 1, 0) as topic_known",
    )  # fmt: skip


def business_keys(rows: DataFrame) -> DataFrame:
    """How many business rows ask for a message under each topic and key."""
    business = rows.where(f"leg = '{Leg.BUSINESS}'").where("message_key != ''")
    return grouped(business, "topic", "message_key", business_rows="count(*)")


def _legs(rows: DataFrame, messages: DataFrame, actions: DataFrame) -> list[DataFrame]:
    texts = {"topic": "topic", "message_key": "coalesce(message_key, '')"}
    # What a cancel cancels is shown as its key, where it is known.
    of_rows = {**texts, "message_key": f"if(topic = '{CANCELS}', null, coalesce(message_key, ''))"}
    body = {"body_hash": "xxhash64(body_sha256)", "due_ms": "coalesce(deliver_at_ms, 0L)", "created_ms": "created_ms"}
    return [
        _leg(rows.where(f"leg = '{Leg.OUTBOX}'"), **of_rows, **body, outbox="1L", parked="if(note = 'parked', 1L, 0L)"),
        _leg(
            rows.where(f"leg = '{Leg.ARCHIVE}'"), **of_rows, **body, archive="1L", sent_ms="at_ms",
            resent="if(attempts > 1, 1L, 0L)", repeated="if(note = 'duplicate', 1L, 0L)",
            took_effect=f"if(topic = '{CANCELS}' and note = '{TAKEN}', 1L, 0L)",
        ),
        _leg(
            messages, **texts, **body, stored_ms="stored_ms", sequence="sequence",
            plain="if(stored_ms is not null and sequence is not null, 1L, 0L)", noted="if(sequence is null, 1L, 0L)",
            due="if(stored_ms is null, 1L, 0L)", placed_ms="if(sequence is null, null, stored_ms)",
            fell_due_ms="if(stored_ms is null, deliver_at_ms, null)",
        ),
        _leg(actions.where("kind = 'fired'"), fired_ms="at_ms", sequence="sequence", placed_ms="at_ms"),
        _leg(
            actions.where("kind = 'canceled'"), canceled="1L", created_ms="at_ms", canceled_ms="at_ms",
            within="reason", canceled_within="if(reason is null, 0L, 1L)",
        ),
        # The broker's word, whenever it was noted: nothing that has a place already is canceled so.
        _leg(actions.where(f"kind = '{ANSWERED}'"), canceled="1L", canceled_ms="0L"),
        _leg(
            actions.where(f"kind in ('{NOTED}', '{UNNOTED}')"), message_key="reason",
            cancel_noted=f"if(kind = '{NOTED}', 1L, 0L)",
        ),
    ]  # fmt: skip


def _leg(frame: DataFrame, **columns: str) -> DataFrame:
    """A leg in the common shape: what it does not know is null, what it does not count is 0."""
    texts = [f"{columns.get(name, 'cast(null as string)')} as {name}" for name in _TEXTS]
    counts = [f"{columns.get(name, '0L')} as {name}" for name in _COUNTS]
    times = [f"{columns.get(name, 'cast(null as bigint)')} as {name}" for name in _TIMES]
    return frame.selectExpr("id", *texts, *counts, *times)


def _aggregates() -> dict[str, str]:
    differs = {"body": "body_hash", "topic": "topic", "key": "message_key", "due": "due_ms"}
    return {
        "message_key": "min(message_key)",
        "canceled_within": "sum(canceled_within)",
        **EXTREMES,
        **_FACTS,
        **{
            f"{name}_differs": f"if(coalesce(min({column}) != max({column}), false), 1, 0)"
            for name, column in differs.items()
        },
        **{name: f"coalesce(min({name}), 0L)" for name in ("due_ms", "created_ms", "sent_ms", "stored_ms")},
        "fired_ms": "coalesce(max(fired_ms), 0L)",
        **{name: f"coalesce(max({name}), -1L)" for name in ("sequence", "cancel_noted")},
    }


def _among(column: str, names: Iterable[str]) -> str:
    """Topics are checked names: they hold no quote."""
    quoted = ", ".join(f"'{name}'" for name in sorted(names))
    return f"coalesce({column} in ({quoted}), false)" if quoted else "false"


def _reach_case(reaches: Mapping[str, int]) -> str:
    arms = " ".join(f"when '{topic}' then {reach}L" for topic, reach in sorted(reaches.items()))
    return f"case topic {arms} else 0L end" if arms else "0L"
