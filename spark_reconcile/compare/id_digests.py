"""Digests by id: counts and sums of hashes by topic, group and slot, of records without a key, and their mismatches.

Partial sums, so little is shuffled. A bucket (topic, slot) is clean if the broker's messages, their deliveries, and
what was acknowledged and handled agree: each message in it was delivered in time, handled and acknowledged, exactly
once, in each group. The way of messages to the broker is compared by key, in key_digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.dataframes import among, grouped, listed, union
from spark_reconcile.core.time_buckets import NO_SLOT, SLOT_MS, hour, slot, slot_start
from spark_reconcile.evidence.delivery_evidence import GroupFacts
from spark_reconcile.sources.broker_logs import ASIDE
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_LOW_BITS: Final = 32
_LOW: Final = (1 << _LOW_BITS) - 1
APART_MS_MAX: Final = 60_000
"""If a message's id names a time further from its row's, records that name it may belong to another hour."""
CANCELED: Final = "('canceled', 'answered')"
"""Kinds of action that record a message's cancellation: the broker's note, and its answer in the archive."""
_STEPS: Final = ("delivered", "acked")
_ODD_STEPS: Final = ("requeued", "extended", "died", "redriven", "redrive_stopped", "discarded", "edited", ASIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Limits beyond which agreement is not enough: of late deliveries, and of ids' distance from their rows' times."""

    late_after_ms: int
    slack_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The rows of the sources, as they are read."""

    rows: DataFrame
    messages: DataFrame
    actions: DataFrame
    inboxes: DataFrame


def buckets(inputs: Inputs, *, tolerance: Tolerance) -> DataFrame:
    """Returns (topic, consumer_group, slot, input_kind) with counts, sums, times and odd rows; lazy."""
    apart_ms = min(tolerance.slack_ms, APART_MS_MAX)
    parts = [
        # The copy of a scheduled message is no second message; key_digests counts it as odd.
        _digest(inputs.messages, input_kind="if(stored_ms is null, 'copies', 'messages')", time="stored_ms",
                apart_ms=apart_ms),
        _digest(inputs.actions.where(among("kind", _STEPS)), input_kind="kind", time="at_ms", group="consumer_group"),
        _digest(inputs.actions.where(among("kind", _ODD_STEPS)), input_kind="'other'", odd="1", time="at_ms",
                group="consumer_group"),
        # A cancel names no topic: it makes its slot odd on every topic. Dispatched messages were scheduled.
        _digest(inputs.actions.where(f"kind in {CANCELED}"), input_kind="'canceled'", time="at_ms", topic="''",
                odd="1"),
        _digest(inputs.actions.where("kind = 'fired'"), input_kind="'other'", time="at_ms", odd="1"),
        _digest(inputs.inboxes, input_kind=f"'{InputKind.INBOX}'", time="at_ms", group="consumer_group"),
    ]  # fmt: skip
    return union(*parts)


def clean_buckets(
    session: SparkSession, digests: DataFrame, groups: Sequence[GroupFacts], *, late_ms: int
) -> DataFrame:
    """Returns each (topic, slot) once: whether it is `clean`, and the windows to which its messages may belong.

    `astray`: an id in it names a time far from its row's, so its window may be another; such a bucket is never clean.
    """
    from pyspark.sql.functions import broadcast, expr

    stored = digests.where("input_kind in ('messages', 'copies')").groupBy("topic", "slot").agg(
        *(_of("messages", name) for name in ("n", "id_low", "id_high")),
        expr("sum(astray)").alias("astray"),
        expr("min(if(input_kind = 'messages', first_ms, null))").alias("stored_first_ms"),
    )  # fmt: skip
    per_group = _disagreeing_groups(session, digests, stored, groups, late_ms=late_ms)
    canceled = digests.where("input_kind = 'canceled'").selectExpr("slot", "1 as canceled").distinct()
    first, last = windows_of_slot()
    return (
        stored.join(per_group, ["topic", "slot"], "full")
        .join(broadcast(canceled), "slot", "left")
        .selectExpr(
            "topic", "slot", f"{first} as first_window", f"{last} as last_window",
            "coalesce(astray, 0L) > 0 as astray",
            f"(coalesce(wrong, 0L) = 0 and canceled is null and slot != '{NO_SLOT}' and coalesce(astray, 0L) = 0)"
            " as clean",
        )
    )  # fmt: skip


def windows_of_slot() -> tuple[str, str]:
    """SQL for the first and the last hour in which a message whose id names a slot may have been created."""
    begins = slot_start("slot")
    return hour(f"{begins} - {APART_MS_MAX}L"), hour(f"{begins} + {SLOT_MS + APART_MS_MAX}L")


def _disagreeing_groups(
    session: SparkSession, digests: DataFrame, stored: DataFrame, groups: Sequence[GroupFacts], *, late_ms: int
) -> DataFrame:
    """Returns how many groups of each bucket disagree with what the broker stored; unknown groups always do."""
    from pyspark.sql.functions import broadcast, expr

    groups_frame = listed(
        session,
        [(facts.topic, facts.consumer_group, facts.has_inbox) for facts in groups],
        "topic string, consumer_group string, has_inbox bigint",
    )
    expected = stored.join(broadcast(groups_frame), "topic").selectExpr(
        "topic", "slot", "consumer_group", "has_inbox", "messages_n as n", "id_low", "id_high", "stored_first_ms"
    )
    taken = (
        digests.where("input_kind not in ('messages', 'copies', 'canceled')")
        .groupBy("topic", "slot", "consumer_group")
        .agg(
            *(_of(input_kind, name) for input_kind in (*_STEPS, "inbox") for name in ("n", "id_low", "id_high")),
            expr("sum(odd)").alias("odd"),
            expr("max(if(input_kind = 'delivered', last_ms, 0L))").alias("delivered_last_ms"),
        )
    )
    return (
        expected.join(taken, ["topic", "slot", "consumer_group"], "full")
        .selectExpr("topic", "slot", f"if({_group_agrees(late_ms)}, 0, 1) as wrong")
        .groupBy("topic", "slot")
        .agg(expr("sum(wrong)").alias("wrong"))
    )


def _digest(
    frame: DataFrame, *, input_kind: str, time: str, topic: str = "coalesce(topic, '')", group: str = "''",
    odd: str = "0", apart_ms: int | None = None,
) -> DataFrame:  # fmt: skip
    """Returns sums by (topic, group, slot, input_kind). `apart_ms`: for rows that have a creation time."""
    named = frame.selectExpr(
        f"{input_kind} as input_kind", f"{topic} as topic", f"coalesce({group}, '') as consumer_group",
        f"{slot()} as slot",
        "xxhash64(id) as i", f"{time} as t", *(["created_ms"] if apart_ms is not None else []),
    )  # fmt: skip
    summed = grouped(
        named, "input_kind", "topic", "consumer_group", "slot",
        n="count(*)", **sums("i", "id_low", "id_high"), first_ms="min(t)", last_ms="max(t)",
        **({"c0": "min(created_ms)", "c1": "max(created_ms)"} if apart_ms is not None else {}),
    )  # fmt: skip
    return summed.selectExpr(
        "input_kind", "topic", "consumer_group", "slot", "n", "id_low", "id_high",
        f"{'n' if odd == '1' else '0L'} as odd", "first_ms", "last_ms",
        f"{'0L' if apart_ms is None else _astray(apart_ms)} as astray",
    )  # fmt: skip


def _astray(apart_ms: int) -> str:
    """SQL: 1 if the time of a row in the bucket is far from its id's."""
    far = " or ".join(f"abs({slot_start('slot')} - {bound}) > {apart_ms}L" for bound in ("c0", "c1"))
    return f"if(slot != '{NO_SLOT}' and coalesce({far}, false), 1L, 0L)"


def _group_agrees(late_ms: int) -> str:
    """SQL: every stored message was delivered in time, acknowledged and, if there is an inbox, handled; once each."""
    same = " and ".join(f"{step}_{name} = {name}" for step in _STEPS for name in ("n", "id_low", "id_high"))
    handled = " and ".join(f"inbox_{name} = if(has_inbox = 1, {name}, 0L)" for name in ("n", "id_low", "id_high"))
    in_time = f"delivered_last_ms - stored_first_ms <= {late_ms}L"
    return f"coalesce({same} and {handled} and odd = 0 and {in_time}, false)"


def _of(input_kind: str, name: str) -> Column:
    from pyspark.sql.functions import expr

    plain = name if input_kind == "messages" and name.startswith("id_") else f"{input_kind}_{name}"
    return expr(f"sum(if(input_kind = '{input_kind}', {name}, 0L))").alias(plain)


def sums(value: str, low: str, high: str) -> dict[str, str]:
    """Aggregates, by name, that sum a 64-bit hash in halves: neither sum can overflow."""
    return {name: f"sum({half})" for name, half in halved(value, low, high).items()}


def halved(value: str, low: str, high: str) -> dict[str, str]:
    """The halves of a 64-bit hash, by name."""
    return {low: f"({value} & {_LOW}L)", high: f"shiftright({value}, {_LOW_BITS})"}
