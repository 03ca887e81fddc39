"""Digests by key: counts and sums of hashes by topic, period and part of the keys, one scan of each source.

Business rows, the outbox, its archive and the broker are partitioned alike, so one digest a source compares all four. A
part is clean if they agree and it has no odd rows: each of its messages was required, committed, sent and stored, each
exactly once. What consumers did with them is compared by id, in id_digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark_reconcile.compare.id_digests import halved, sums
from spark_reconcile.core.dataframes import among, grouped, listed, union
from spark_reconcile.core.time_buckets import KEYED, NO_PERIOD, PART, PERIOD_MS, hour, period
from spark_reconcile.sources.sql_statements import DISCARDED, InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

MESSAGES: Final = "messages"
"""The input of the broker's messages."""
_WHOLE: Final = "xxhash64(id, coalesce(message_key, ''), body_sha256)"
_KEY: Final = "xxhash64(coalesce(message_key, ''))"
# Compared with no other source; a window is evaluated again if they change, since verdicts depend on them.
_STANDS: Final = "xxhash64(id, coalesce(message_key, ''), body_sha256, note)"
_DUE: Final = "if(deliver_at_ms is null, 0L, xxhash64(coalesce(message_key, ''), deliver_at_ms))"
_ODD: Final = {
    InputKind.BUSINESS: "deliver_at_ms is not null or coalesce(message_key, '') = '' or created_ms is null",
    InputKind.ARCHIVE: f"deliver_at_ms is not null or note = '{DISCARDED}'",
    MESSAGES: "deliver_at_ms is not null or sequence is null or sequence < 0 or stored_ms is null",
}
"""Odd rows, always classified: those that are due later or were discarded, or whose time or place is not known yet."""
_SUMMED: Final = ("n", "low", "high", "key_low", "key_high", "odd", "resent", "repeated")
PART_HASH: Final = "xxhash64(number, period, part)"
"""Hash of a part: compared in a third of the time of texts. A collision costs a drill-down, not a wrong verdict."""
PARTED: Final = ("xxhash64(coalesce(topic, '')) as number", f"{period('created_ms')} as period", f"{PART} as part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The SQL expressions that are summed over an input's rows; None: 0."""

    odd: str
    note: str = "-1"
    whole: str | None = None
    key: str | None = None
    resent: str | None = None
    repeated: str | None = None


DIGESTS: Final[Mapping[str, Digest]] = {
    InputKind.BUSINESS: Digest(
        note="cast(note as int)", whole=_DUE, key=_KEY, odd=f"if({_ODD[InputKind.BUSINESS]}, 1, 0)"
    ),
    InputKind.ARCHIVE: Digest(
        whole=_WHOLE, odd=f"if({_ODD[InputKind.ARCHIVE]}, 1, 0)", resent="if(attempts > 1, 1, 0)",
        repeated="if(note = 'duplicate', 1, 0)",
    ),
    InputKind.OUTBOX: Digest(whole=_STANDS, odd="1"),
    MESSAGES: Digest(whole=_WHOLE, key=_KEY, odd=f"if({_ODD[MESSAGES]}, 1, 0)"),
}  # fmt: skip
_PLACED: Final = ("input_kind", "number", "period", "part", "note")
_DIGEST_COLUMNS: Final = "input_kind, topic, period, part, note, n, low, high, key_low, key_high, odd, resent, repeated"
_DIGESTED: Final = ("digests", "digest_low", "digest_high")
SUMS_SCHEMA: Final = (
    "piece bigint, input_kind string, number bigint, period bigint, part bigint, note int, "
    + ", ".join(f"{name} bigint" for name in _SUMMED)
)


def digest(frame: DataFrame, input_kind: str, *, piece: str = "0L") -> DataFrame:
    """Returns sums of one input by piece, hash of its topic, period, part and note, as SUMS_SCHEMA; lazy."""
    values = _values(DIGESTS[input_kind])
    rows = frame.selectExpr(f"{piece} as piece", *PARTED, *(f"{value} as {name}" for name, value in values.items()))
    summed = {"n": "count(*)", **{name: f"sum({name})" for name in values if name not in {"h", "k", "note"}}}
    if "h" in values:
        summed |= sums("h", "low", "high")
    if "k" in values:
        summed |= sums("k", "key_low", "key_high")
    return grouped(rows, "piece", *_PLACED[1:], **summed).selectExpr(
        "piece", f"'{input_kind}' as input_kind", "number", "period", "cast(part as bigint) as part", "note",
        *(name if name in summed else f"0L as {name}" for name in _SUMMED),
    )  # fmt: skip


def _values(chosen: Digest) -> dict[str, str]:
    """Returns the expressions of an input that are not 0, by column."""
    values = {
        "note": chosen.note, "h": chosen.whole, "k": chosen.key, "odd": chosen.odd, "resent": chosen.resent,
        "repeated": chosen.repeated,
    }  # fmt: skip
    return {name: value for name, value in values.items() if value is not None}


def parts(session: SparkSession, digests: Sequence[DataFrame], *, topics: Sequence[str]) -> DataFrame:
    """Returns (input_kind, topic, number, period, part, note) with counts and sums; lazy. `topics`: all known topics.

    `digests`: digests of all inputs. Sums are grouped by hashes of topics, at half of the cost of texts; an unknown
    topic is never clean.
    """
    from pyspark.sql.functions import broadcast

    whole = grouped(union(*digests), *_PLACED, **{name: f"sum({name})" for name in _SUMMED})
    names = listed(session, [(topic,) for topic in sorted(set(topics))], "topic string")
    numbered = broadcast(names.selectExpr("topic", "xxhash64(topic) as number"))
    return whole.join(numbered, "number", "left")


def _is_clean(*, is_known: str, is_covered: str) -> str:
    """SQL condition on the sums of a part, or of one key: the sources agree on each of its messages, and none needs a
    closer look. So the rules would call each of them `stored`, and each of its business rows `announced`.

    `is_known`, `is_covered`: conditions, see _known() and covered_topic().
    """
    sent, rows_agree = (" and ".join(f"{side}_{name} = 0" for name in names) for side, (_, names) in _APART.items())
    # A message too many for one rule must not cancel out one too few for another.
    return f"({is_known} and of_one_rule and odd = 0 and {sent} and (not {is_covered} or ({rows_agree})))"


def _known() -> str:
    """SQL condition: topic and period of a part or row are known."""
    return f"(topic is not null and period != {NO_PERIOD})"


def clean_parts(summed: DataFrame, *, covered: Sequence[str]) -> DataFrame:
    """Returns each (topic, number, period, part) once: its window, whether it is `clean`, and then its messages.

    Also the number of its business rule (`note`) and of that rule's rows (`asked`), and the number and sums of hashes,
    in halves, of its digests (`digests`, `digest_low`, `digest_high`): these change if any of its records does.
    """
    hashed = summed.selectExpr("*", f"xxhash64({_DIGEST_COLUMNS}) as h")
    sides = _sides(
        hashed, "topic", "number", "period", "part",
        **{
            name: f"sum(if(input_kind = '{input_kind}', n, 0L))"
            for name, input_kind in (("messages", MESSAGES), ("asked", InputKind.BUSINESS))
        },
        archive_resent=f"sum(if(input_kind = '{InputKind.ARCHIVE}', resent, 0L))", digests="count(*)",
        archive_repeated=f"sum(if(input_kind = '{InputKind.ARCHIVE}', repeated, 0L))",
        **sums("h", "digest_low", "digest_high"),
    )  # fmt: skip
    return sides.selectExpr(
        "topic", "number", "period", "part", f"{hour(f'period * {PERIOD_MS}L')} as window_ms", "messages as n",
        f"{_is_clean(is_known=_known(), is_covered=covered_topic(covered))} as clean",
        "archive_resent as resent", "archive_repeated as repeated", "note", "asked", *_DIGESTED,
    )  # fmt: skip


_APART: Final[Mapping[str, tuple[InputKind, Sequence[str]]]] = {
    "sent": (InputKind.ARCHIVE, ("n", "low", "high")), "asked": (InputKind.BUSINESS, ("n", "key_low", "key_high")),
}  # fmt: skip
"""The sums of an input that are those of the messages, where the two agree."""


def _sides(frame: DataFrame, *columns: str, **more: str) -> DataFrame:
    """Returns, for each part or key, by how much the sums of the other inputs exceed those of the messages, and `more`
    aggregates. Differences, since each sum of each key is shuffled.
    """
    apart = {
        f"{side}_{name}": (
            f"sum(case input_kind when '{input_kind}' then {name} when '{MESSAGES}' then -{name} else 0L end)"
        )
        for side, (input_kind, names) in _APART.items()
        for name in names
    }
    # Only business rows have a rule's number: it is -1 for all others.
    rule = "if(note >= 0, note, null)"
    return grouped(
        frame, *columns, **apart, odd="sum(odd)", of_one_rule=f"coalesce(min({rule}) = max({rule}), true)",
        note=f"coalesce(max({rule}), -1)", **more,
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
    """Returns, for rows in mismatching parts, the keys on which the sources disagree, each as a `row_hash`, a KEY_HASH.

    The condition is that of clean_parts(), with one part a key: matching keys are settled, whatever else their part
    holds.
    """
    digests = union(
        _of_key(rows, "input_kind", {name: _of_each_input(name) for name in _VALUES}),
        _of_key(messages, f"'{MESSAGES}'", {name: _values(DIGESTS[MESSAGES]).get(name, "0L") for name in _VALUES}),
    )
    # Topic and period are in the hash: what is asked of them is a number, and no key of the shuffle.
    standing = f"if({_known()}, if({covered_topic(covered)}, 2, 1), 0)"
    sides = _sides(digests.selectExpr("*", f"{standing} as standing"), "row_hash", standing="min(standing)")
    return sides.where(f"not {_is_clean(is_known='standing > 0', is_covered='standing = 2')}").select("row_hash")


_VALUES: Final = ("note", "h", "k", "odd")


def _of_key(frame: DataFrame, input_kind: str, values: Mapping[str, str]) -> DataFrame:
    """Returns each row's summands, as those of a digest."""
    named = frame.selectExpr(
        f"{input_kind} as input_kind", f"{KEY_HASH} as row_hash", "topic", f"{period('created_ms')} as period",
        *(f"{value} as {name}" for name, value in values.items()),
    )  # fmt: skip
    halves = ((value, *names) for value, *names in (("h", "low", "high"), ("k", "key_low", "key_high")))
    return named.selectExpr(
        "input_kind", "row_hash", "topic", "period", "cast(note as int) as note", "1L as n",
        "cast(odd as bigint) as odd",
        *(f"{half} as {name}" for value, *names in halves for name, half in halved(value, *names).items()),
    )  # fmt: skip


def _of_each_input(name: str) -> str:
    """SQL: a row's summand, by its input."""
    inputs = (InputKind.BUSINESS, InputKind.ARCHIVE, InputKind.OUTBOX)
    arms = " ".join(
        f"when '{input_kind}' then {value}"
        for input_kind in inputs
        if (value := _values(DIGESTS[input_kind]).get(name))
    )
    return f"case input_kind {arms} else {'-1' if name == 'note' else '0L'} end"


KEY_HASH: Final = f"xxhash64(coalesce(topic, ''), {period('created_ms')}, {KEYED})"
"""Hash of a key in its topic and period."""


def covered_topic(covered: Sequence[str]) -> str:
    """SQL condition, never null: a row's topic is one of those that rules cover."""
    return f"coalesce({among('topic', covered)}, false)"
