"""Digests by key: counts and sums of hashes by topic, period and part of the keys, one scan of each source.

Business rows, the outbox, its archive and the broker are partitioned alike, so one digest a source compares all four. A
part is clean if they agree and it has no odd rows: each of its messages was required, committed, sent and stored, each
exactly once. What consumers did with them is compared by id, in id_digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark_reconcile.compare.id_digests import sums
from spark_reconcile.core.dataframes import grouped, listed, union
from spark_reconcile.core.time_buckets import KEYED, NO_PERIOD, PART, PERIOD_MS, hour, period
from spark_reconcile.sources.sql_statements import Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

MESSAGES: Final = "messages"
"""The leg of the broker's messages."""
_WHOLE: Final = "xxhash64(id, coalesce(message_key, ''), body_sha256)"
_KEY: Final = "xxhash64(coalesce(message_key, ''))"
# Compared with no other source; a window is evaluated again if they change, since verdicts depend on them.
_STANDS: Final = "xxhash64(id, coalesce(message_key, ''), body_sha256, note)"
_DUE: Final = "if(deliver_at_ms is null, 0L, xxhash64(coalesce(message_key, ''), deliver_at_ms))"
_ODD: Final = {
    Leg.BUSINESS: "deliver_at_ms is not null or coalesce(message_key, '') = '' or created_ms is null",
    Leg.ARCHIVE: "deliver_at_ms is not null",
    MESSAGES: "deliver_at_ms is not null or sequence is null or sequence < 0 or stored_ms is null",
}
"""Odd rows, always classified: rows that are due later, or whose time or place is not known yet."""
_SUMMED: Final = ("n", "low", "high", "key_low", "key_high", "odd", "resent", "repeated")
PLACE: Final = "xxhash64(number, period, part)"
"""Hash of a part: compared in a third of the time of texts. A collision costs a drill-down, not a wrong verdict."""
PARTED: Final = ("xxhash64(coalesce(topic, '')) as number", f"{period('created_ms')} as period", f"{PART} as part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The SQL expressions that are summed over a leg's rows; None: 0."""

    odd: str
    note: str = "-1"
    whole: str | None = None
    key: str | None = None
    resent: str | None = None
    repeated: str | None = None


DIGESTS: Final[Mapping[str, Digest]] = {
    Leg.BUSINESS: Digest(
        note="cast(note as int)", whole=_DUE, key=_KEY, odd=f"if({_ODD[Leg.BUSINESS]}, 1, 0)"
    ),
    Leg.ARCHIVE: Digest(
        whole=_WHOLE, odd=f"if({_ODD[Leg.ARCHIVE]}, 1, 0)", resent="if(attempts > 1, 1, 0)",
        repeated="if(note = 'duplicate', 1, 0)",
    ),
    Leg.OUTBOX: Digest(whole=_STANDS, odd="1"),
    MESSAGES: Digest(whole=_WHOLE, key=_KEY, odd=f"if({_ODD[MESSAGES]}, 1, 0)"),
}  # fmt: skip
_PLACED: Final = ("leg", "number", "period", "part", "note")
_TOLD: Final = "leg, topic, period, part, note, n, low, high, key_low, key_high, odd, resent, repeated"
_DIGESTED: Final = ("digests", "digest_low", "digest_high")
SUMS_SCHEMA: Final = "piece bigint, leg string, number bigint, period bigint, part bigint, note int, " + ", ".join(
    f"{name} bigint" for name in _SUMMED
)


def digest(frame: DataFrame, leg: str, *, piece: str = "0L") -> DataFrame:
    """Returns sums of one leg by piece, hash of its topic, period, part and note, as SUMS_SCHEMA; lazy."""
    chosen = DIGESTS[leg]
    values = {
        "h": chosen.whole, "k": chosen.key, "odd": chosen.odd, "resent": chosen.resent, "repeated": chosen.repeated,
    }  # fmt: skip
    known = [name for name, value in values.items() if value is not None]
    rows = frame.selectExpr(
        f"{piece} as piece", *PARTED, f"{chosen.note} as note", *(f"{values[name]} as {name}" for name in known)
    )
    summed = {"n": "count(*)", **{name: f"sum({name})" for name in known if name not in {"h", "k"}}}
    if chosen.whole:
        summed |= sums("h", "low", "high")
    if chosen.key:
        summed |= sums("k", "key_low", "key_high")
    return grouped(rows, "piece", *_PLACED[1:], **summed).selectExpr(
        "piece", f"'{leg}' as leg", "number", "period", "cast(part as bigint) as part", "note",
        *(name if name in summed else f"0L as {name}" for name in _SUMMED),
    )  # fmt: skip


def parts(session: SparkSession, found: Sequence[DataFrame], *, topics: Sequence[str]) -> DataFrame:
    """Returns (leg, topic, number, period, part, note) with counts and sums; lazy. `topics`: all known topics.

    `found`: digests of all legs. Sums are grouped by hashes of topics, at half of the cost of texts; an unknown topic
    is never clean.
    """
    from pyspark.sql.functions import broadcast

    whole = grouped(union(*found), *_PLACED, **{name: f"sum({name})" for name in _SUMMED})
    names = listed(session, [(one,) for one in sorted(set(topics))], "topic string")
    numbered = broadcast(names.selectExpr("topic", "xxhash64(topic) as number"))
    return whole.join(numbered, "number", "left")


def clean_parts(found: DataFrame, *, covered: Sequence[str]) -> DataFrame:
    """Returns each (topic, number, period, part) once: its window, whether it is `clean`, and then its messages.

    Also the number of its business rule (`note`) and of that rule's rows (`asked`), and the number and sums of hashes,
    in halves, of its digests (`digests`, `digest_low`, `digest_high`): these change if any of its records does.
    """
    sent = " and ".join(f"archive_{name} = messages_{name}" for name in ("n", "low", "high"))
    asked = " and ".join(f"business_{name} = messages_{name}" for name in ("n", "key_low", "key_high"))
    single = f"topic is not null and period != {NO_PERIOD} and rules <= 1"
    return _sides(found).selectExpr(
        "topic", "number", "period", "part", f"{hour(f'period * {PERIOD_MS}L')} as window_ms", "messages_n as n",
        f"({single} and odd = 0 and {sent} and (not {among('topic', covered)} or ({asked}))) as clean",
        "archive_resent as resent", "archive_repeated as repeated", "note", "business_n as asked", *_DIGESTED,
    )  # fmt: skip


def _sides(found: DataFrame) -> DataFrame:
    """Returns the sums of each part, a column for each leg."""
    pairs = [("archive", name) for name in ("n", "low", "high", "resent", "repeated")]
    pairs += [("messages", name) for name in ("n", "low", "high", "key_low", "key_high")]
    pairs += [("business", name) for name in ("n", "key_low", "key_high")]
    return grouped(
        found.selectExpr("*", f"xxhash64({_TOLD}) as h"), "topic", "number", "period", "part",
        **{f"{leg}_{name}": f"sum(if(leg = '{leg}', {name}, 0L))" for leg, name in pairs},
        odd="sum(odd)",
        # Rows of each rule are summed separately.
        rules=f"count_if(leg = '{Leg.BUSINESS}')", note=f"max(if(leg = '{Leg.BUSINESS}', note, -1))",
        digests="count(*)", **sums("h", "digest_low", "digest_high"),
    )  # fmt: skip


def sums_of(clean: DataFrame) -> list[Row]:
    """Sum the result of clean_parts() by window, topic, rule and whether it is clean: few rows, collected once."""
    summed = ("n", "resent", "repeated", "asked", *_DIGESTED)
    placed = clean.selectExpr("*", f"period = {NO_PERIOD} as timeless")
    by_window = grouped(
        placed, "window_ms", "topic", "clean", "note", "timeless", **{name: f"sum({name})" for name in summed}
    )
    return by_window.collect()


def unsettled(rows: DataFrame, messages: DataFrame, *, covered: Sequence[str]) -> DataFrame:
    """Returns, for rows in mismatching parts, the keys on which the sources disagree, each as a `place`, a KEY_PLACE.

    Compares like clean_parts(), with one part a key: matching keys are settled, whatever else their part holds.
    """
    asked = f"if({among('topic', covered)}, 1, 0)"
    sided = rows.selectExpr(
        f"{KEY_PLACE} as place", f"if(leg = '{Leg.ARCHIVE}', 1, 0) as n", "1 as side",
        f"if(leg = '{Leg.ARCHIVE}', {_WHOLE}, 0L) as h", f"if(leg = '{Leg.BUSINESS}', {asked}, 0) as asked",
        f"if(leg = '{Leg.OUTBOX}' or if(leg = '{Leg.BUSINESS}', {_ODD[Leg.BUSINESS]}, {_ODD[Leg.ARCHIVE]}), 1, 0)"
        " as odd",
        f"if(leg = '{Leg.BUSINESS}', cast(note as int), null) as rule",
    ).unionByName(
        messages.selectExpr(
            f"{KEY_PLACE} as place", "-1 as n", "-1 as side", f"{_WHOLE} as h", f"-{asked} as asked",
            f"if({_ODD[MESSAGES]}, 1, 0) as odd", "cast(null as int) as rule",
        )
    )  # fmt: skip
    totals = grouped(
        sided, "place",
        **{name: f"sum({name})" for name in ("n", "asked", "odd")}, **sums("h", "low", "high", sign="side * "),
        # A message too many for one rule must not cancel out one too few for another.
        of_rules="coalesce(min(rule) != max(rule), false)",
    )  # fmt: skip
    return totals.where("n != 0 or asked != 0 or odd != 0 or low != 0 or high != 0 or of_rules").select("place")


KEY_PLACE: Final = f"xxhash64(coalesce(topic, ''), {period('created_ms')}, {KEYED})"
"""Hash of a key in its topic and period."""


def among(column: str, names: Sequence[str]) -> str:
    """SQL condition: a column is one of these topics, which are checked names: they contain no quote."""
    return f"coalesce({column} in ({', '.join(repr(name) for name in names)}), false)" if names else "false"
