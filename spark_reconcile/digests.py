"""The cheap pass: counts and sums of hashes by topic and slot, from each source alone, and which of them disagree.

Partial sums, so little is shuffled. A bucket (topic, slot) is clean where all sources agree on it and nothing in it
asks for a closer look: then each of its messages was committed, sent, stored, handed out in time, handled and
acknowledged, each exactly once, and is settled without being looked at. Drilling into the others stands elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.delivery_evidence import GroupFacts
from spark_reconcile.slots import KEY_SLOT, NO_SLOT, hour, period, slot, slot_start
from spark_reconcile.sources.statements import Leg

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_LOW: Final = 0xFFFF_FFFF
_WHOLE: Final = "xxhash64(id, coalesce(message_key, ''), body_sha256)"
APART_MS_MAX: Final = 60_000
"""A message whose id names a time further from its row's is looked at: its key is compared in the row's period."""
_STEPS: Final = ("delivered", "acked")
_ODD_STEPS: Final = ("requeued", "extended", "died", "redriven")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """When agreement is not enough: hand-outs later than this, and ids further from their rows' times than this."""

    late_after_ms: int
    slack_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Legs:
    """The sources' rows, as they are read."""

    rows: DataFrame
    messages: DataFrame
    actions: DataFrame
    inboxes: DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """What each source says of each bucket.

    `buckets`: (topic, consumer_group, slot, leg) with counts, sums, times and what asks for a look (`odd`).
    `keys`: (topic, period, key_slot, window_ms, note, side) with counts and sums, of topics that a rule covers.
    """

    buckets: DataFrame
    keys: DataFrame


def digests(legs: Legs, *, covered: Sequence[str], tolerance: Tolerance) -> Digests:
    """Digests of every leg; nothing runs yet."""
    parts = [
        *_stored_legs(legs, tolerance),
        _digest(
            legs.actions.where(f"kind in {_named(*_STEPS)}"), leg="kind", time="at_ms", group="consumer_group"
        ),
        _digest(
            legs.actions.where(f"kind in {_named(*_ODD_STEPS)}"), leg="'other'", time="at_ms",
            group="consumer_group", odd="1",
        ),
        # A cancel names no topic: it asks for a look at its slot on every topic. What was fired was scheduled.
        _digest(legs.actions.where("kind = 'canceled'"), leg="'canceled'", time="at_ms", topic="''", odd="1"),
        _digest(legs.actions.where("kind = 'fired'"), leg="'other'", time="at_ms", odd="1"),
        _digest(legs.inboxes, leg=f"'{Leg.INBOX}'", time="at_ms", group="consumer_group"),
    ]  # fmt: skip
    return Digests(buckets=reduce(_union, parts), keys=_union(_message_keys(legs, covered), _business_keys(legs)))


def clean_buckets(
    session: SparkSession, buckets: DataFrame, groups: Sequence[GroupFacts], *, late_ms: int
) -> DataFrame:
    """Each (topic, slot) once: its window, whether it is `clean`, and how many messages it then has.

    `astray`: an id in it names a time far from its row's, so its window may be another; it is never clean.
    """
    from pyspark.sql.functions import broadcast

    stored = _stored(buckets)
    per_group = _disagreeing_groups(session, buckets, stored, groups, late_ms=late_ms)
    canceled = buckets.where("leg = 'canceled'").selectExpr("slot", "1 as canceled").distinct()
    agrees = (
        "archive_n = messages_n and archive_low = messages_low and archive_high = messages_high and odd = 0"
        f" and coalesce(wrong, 0) = 0 and canceled is null and slot != '{NO_SLOT}'"
    )
    return (
        stored.join(per_group, ["topic", "slot"], "full")
        .join(broadcast(canceled), "slot", "left")
        .selectExpr(
            "topic", "slot", f"coalesce({agrees}, false) as clean", "coalesce(messages_n, 0L) as n",
            "coalesce(resent, 0L) as resent", "coalesce(repeated, 0L) as repeated",
            f"{hour(slot_start('slot'))} as window_ms", "coalesce(astray, 0L) > 0 as astray",
        )
    )  # fmt: skip


def clean_keys(keys: DataFrame) -> DataFrame:
    """Each (topic, period, key_slot) once, with `clean`."""
    from pyspark.sql.functions import expr

    sides = keys.groupBy("topic", "period", "key_slot").agg(
        *(
            expr(f"sum(if(side = '{side}', {name}, 0L))").alias(f"{side}_{name}")
            for side in ("business", "messages")
            for name in ("n", "low", "high")
        ),
        expr("sum(odd)").alias("odd"),
    )
    agrees = " and ".join(f"business_{name} = messages_{name}" for name in ("n", "low", "high"))
    return sides.selectExpr("topic", "period", "key_slot", f"({agrees} and odd = 0) as clean")


def _stored(buckets: DataFrame) -> DataFrame:
    """What the outbox, the archive and the broker say of each bucket, side by side."""
    from pyspark.sql.functions import expr

    return buckets.where("leg in ('outbox', 'archive', 'messages', 'copies')").groupBy("topic", "slot").agg(
        *(_of(leg, name) for leg in ("archive", "messages") for name in ("n", "low", "high")),
        *(_of("messages", name) for name in ("id_low", "id_high")),
        *(_of("archive", name) for name in ("resent", "repeated")),
        expr("sum(odd)").alias("odd"),
        expr("sum(astray)").alias("astray"),
        expr("min(if(leg = 'messages', first_ms, null))").alias("stored_first_ms"),
    )  # fmt: skip


def _disagreeing_groups(
    session: SparkSession, buckets: DataFrame, stored: DataFrame, groups: Sequence[GroupFacts], *, late_ms: int
) -> DataFrame:
    """How many groups of each bucket do not agree with what the broker stored; strangers' groups never do."""
    from pyspark.sql.functions import broadcast, expr

    known = session.createDataFrame(
        [(one.topic, one.consumer_group, one.has_inbox) for one in groups],
        "topic string, consumer_group string, has_inbox bigint",
    )
    expected = stored.join(broadcast(known), "topic").selectExpr(
        "topic", "slot", "consumer_group", "has_inbox", "messages_n as n", "id_low", "id_high", "stored_first_ms"
    )
    taken = (
        buckets.where("leg not in ('outbox', 'archive', 'messages', 'copies', 'canceled')")
        .groupBy("topic", "slot", "consumer_group")
        .agg(
            *(_of(leg, name) for leg in (*_STEPS, "inbox") for name in ("n", "id_low", "id_high")),
            expr("sum(odd)").alias("odd"),
            expr("max(if(leg = 'delivered', last_ms, 0L))").alias("delivered_last_ms"),
        )
    )
    return (
        expected.join(taken, ["topic", "slot", "consumer_group"], "full")
        .selectExpr("topic", "slot", f"if({_group_agrees(late_ms)}, 0, 1) as wrong")
        .groupBy("topic", "slot")
        .agg(expr("sum(wrong)").alias("wrong"))
    )


def _stored_legs(legs: Legs, tolerance: Tolerance) -> list[DataFrame]:
    # A row that is due later, or whose id names another time than the row, is looked at by itself.
    late = "deliver_at_ms is not null"
    apart_ms = min(tolerance.slack_ms, APART_MS_MAX)
    archive, messages = legs.rows.where(f"leg = '{Leg.ARCHIVE}'"), legs.messages
    outbox = legs.rows.where(f"leg = '{Leg.OUTBOX}'")
    odd = f"if({late}, 1, 0)"
    return [
        _digest(outbox, leg=f"'{Leg.OUTBOX}'", time="created_ms", odd="1", apart_ms=apart_ms),
        _digest(archive, leg=f"'{Leg.ARCHIVE}'", time="created_ms", odd=odd, apart_ms=apart_ms,
                resent="if(attempts > 1, 1, 0)", repeated="if(note = 'duplicate', 1, 0)"),
        # The copy of a scheduled message asks for a look, and is no second message.
        _digest(messages, leg="if(stored_ms is null, 'copies', 'messages')", time="stored_ms",
                odd=f"if({late} or sequence is null, 1, 0)", apart_ms=apart_ms),
    ]  # fmt: skip


def _digest(
    frame: DataFrame, *, leg: str, time: str, topic: str = "coalesce(topic, '')", group: str = "''", odd: str = "0",
    resent: str = "0", repeated: str = "0", apart_ms: int | None = None,
) -> DataFrame:  # fmt: skip
    """Sums by (topic, group, slot, leg). `apart_ms`: of rows with a key, a body and a time, which are summed, too.

    Nothing is summed that is the same for every row: each sum costs as much as reading a column.
    """
    from pyspark.sql.functions import expr

    counted = {"odd": odd, "resent": resent, "repeated": repeated}
    varied = {name: value for name, value in counted.items() if value not in {"0", "1"}}
    whole = apart_ms is not None
    named = frame.selectExpr(
        f"{leg} as leg", f"{topic} as topic", f"coalesce({group}, '') as consumer_group", f"{slot()} as slot",
        "xxhash64(id) as i", f"{time} as t", *(f"{value} as {name}" for name, value in varied.items()),
        *([f"{_WHOLE} as h", "created_ms"] if whole else []),
    )  # fmt: skip
    grouped = named.groupBy("leg", "topic", "consumer_group", "slot").agg(
        expr("count(*)").alias("n"),
        *_sums("i", "id_low", "id_high"),
        *(_sums("h", "low", "high") if whole else []),
        *(expr(f"sum({name})").alias(name) for name in varied),
        expr("min(t)").alias("first_ms"),
        expr("max(t)").alias("last_ms"),
        *([expr("min(created_ms)").alias("c0"), expr("max(created_ms)").alias("c1")] if whole else []),
    )
    values = {name: name if name in varied else ("n" if value == "1" else "0L") for name, value in counted.items()}
    astray = _astray(apart_ms) if apart_ms is not None else "0L"
    sums = "low, high" if whole else "0L as low, 0L as high"
    return grouped.selectExpr(
        "leg", "topic", "consumer_group", "slot", "n", *sums.split(", "), "id_low", "id_high",
        f"{values['odd']} + {astray} as odd", f"{values['resent']} as resent", f"{values['repeated']} as repeated",
        "first_ms", "last_ms", f"{astray} as astray",
    )  # fmt: skip


def _astray(apart_ms: int) -> str:
    """Whether a row of the bucket has a time that is not its id's."""
    far = " or ".join(f"abs({slot_start('slot')} - {bound}) > {apart_ms}L" for bound in ("c0", "c1"))
    return f"if(slot != '{NO_SLOT}' and coalesce({far}, false), 1L, 0L)"


def _message_keys(legs: Legs, covered: Sequence[str]) -> DataFrame:
    """Messages on covered topics, by period and part of the keys."""
    messages = legs.messages.where(f"stored_ms is not null and topic in {_named(*covered)}" if covered else "false")
    return _keyed(messages, window="0L", note="''", side="messages", odd="0L")


def _business_keys(legs: Legs) -> DataFrame:
    rows = legs.rows.where(f"leg = '{Leg.BUSINESS}'")
    return _keyed(
        rows, window=hour("created_ms"), note="note", side="business",
        odd="if(deliver_at_ms is not null or coalesce(message_key, '') = '' or created_ms is null, 1, 0)",
    )  # fmt: skip


def _keyed(frame: DataFrame, *, window: str, note: str, side: str, odd: str) -> DataFrame:
    from pyspark.sql.functions import expr

    named = frame.selectExpr(
        "topic", f"{period('created_ms')} as period", f"{KEY_SLOT} as key_slot",
        f"coalesce({window}, 0L) as window_ms", f"{note} as note", "xxhash64(coalesce(message_key, '')) as h",
        f"{odd} as odd",
    )  # fmt: skip
    return (
        named.groupBy("topic", "period", "key_slot", "window_ms", "note")
        .agg(expr("count(*)").alias("n"), *_sums("h", "low", "high"), expr("sum(odd)").alias("odd"))
        .selectExpr("*", f"'{side}' as side")
    )


def _group_agrees(late_ms: int) -> str:
    """Every stored message was handed out in time, acknowledged and, where there is an inbox, handled; once each."""
    same = " and ".join(f"{step}_{name} = {name}" for step in _STEPS for name in ("n", "id_low", "id_high"))
    handled = " and ".join(f"inbox_{name} = if(has_inbox = 1, {name}, 0L)" for name in ("n", "id_low", "id_high"))
    in_time = f"delivered_last_ms - stored_first_ms <= {late_ms}L"
    return f"coalesce({same} and {handled} and odd = 0 and {in_time}, false)"


def _of(leg: str, name: str) -> Column:
    from pyspark.sql.functions import expr

    plain = name if leg == "messages" and name.startswith("id_") else f"{leg}_{name}"
    return expr(f"sum(if(leg = '{leg}', {name}, 0L))").alias(name if name in {"resent", "repeated"} else plain)


def _sums(column: str, low: str, high: str) -> list[Column]:
    """A 64-bit hash summed in halves: neither sum can overflow."""
    from pyspark.sql.functions import expr

    return [
        expr(f"sum({column} & {_LOW}L)").alias(low),
        expr(f"sum(shiftright({column}, 32))").alias(high),
    ]


def _named(*names: str) -> str:
    """Checked names, or our own: they hold no quote."""
    return f"({', '.join(repr(str(name)) for name in names)})"


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other)
