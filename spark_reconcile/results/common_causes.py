"""Derives causes that explain many findings at once from measured numbers, with a sentence each. Pure.

A cause explains, and excuses nothing: behind a log's end messages may be lost as well. So no verdict, exit status or
repair changes. Not seen: two faults of one rule of which neither has SHARE_MIN of its findings, and a clock that
drifted or stepped within the time range. The broker's clock is what all others are compared with, so its fault is named
as one of all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from spark_reconcile.rules.verdict_rule import Scope

FINDINGS_MIN: Final = 100
"""Fewer findings of a rule need no common cause: users read them one by one."""
UNMATCHED_MIN: Final = 5
"""Fewer rows and messages may miss each other one by one."""
SHARE_MIN: Final = 0.95
OFFSET_ROWS_MIN: Final = 20
"""Fewer rows may have the same difference by chance."""
_QUARTER_MS: Final = 900_000
_ZONES: Final = range(-48, 57)
"""Offsets of time zones in quarters of an hour, from UTC-12:00 to UTC+14:00."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause of `count` verdicts, in a sentence. `source` and `what` as in an Input; `size_ms`: the offset of times,
    positive if the source is ahead.
    """

    sentence: str
    source: str
    what: str
    count: int
    size_ms: int = 0


class SourceKind(StrEnum):
    """The kind of records on which a rule depends."""

    MESSAGE_LOG = "message log"
    ACTION_LOG = "action log"
    ARCHIVE = "archive"
    BUSINESS = "business"
    INBOX = "inbox"


DEPENDS_ON: Final[Mapping[tuple[Scope, str], Sequence[SourceKind]]] = {
    (Scope.MESSAGE, "not_in_broker"): (SourceKind.MESSAGE_LOG,),
    (Scope.MESSAGE, "cancel_not_noted"): (SourceKind.ACTION_LOG,),
    (Scope.MESSAGE, "unrecorded"): (SourceKind.ARCHIVE,),
    (Scope.MESSAGE, "no_business_row"): (SourceKind.BUSINESS,),
    (Scope.DELIVERY, "delivered_never_stored"): (SourceKind.MESSAGE_LOG,),
    (Scope.DELIVERY, "handled_never_stored"): (SourceKind.MESSAGE_LOG,),
    (Scope.DELIVERY, "acknowledged_never_delivered"): (SourceKind.ACTION_LOG,),
    (Scope.DELIVERY, "acknowledged_not_handled"): (SourceKind.INBOX,),
    (Scope.BUSINESS, "no_message"): (SourceKind.ARCHIVE, SourceKind.MESSAGE_LOG),
    (Scope.BUSINESS, "too_few_messages"): (SourceKind.ARCHIVE, SourceKind.MESSAGE_LOG),
}
"""Findings that a source without its end, or without its beginning, would cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleExtent:
    """The time range of a source, for the findings of one rule; `of`: the topic, group or business rule of these
    findings, empty for all. A source without rows has no range.
    """

    scope: Scope
    rule: str
    of: str
    source: str
    what: str
    rows: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfRangeFindings:
    """The number of a rule's `findings` that are `before` the first time of a source, and `after` its last."""

    extent: RuleExtent
    findings: int
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMatches:
    """How many rows of a business rule have a message (`matched`), or none, and how many messages of its topic, which
    no other rule covers, have a row (`asked_for`), or none.
    """

    rule: str
    topic: str
    key_column: str
    matched: int
    unmatched: int
    asked_for: int
    unasked_for: int


def key_causes(rule_matches: Iterable[RuleMatches]) -> list[Cause]:
    """Returns a cause for each rule none of whose rows has the key of any message: that is the rule, not its rows."""
    return [
        Cause(
            sentence=f"None of {matches.unmatched:,} rows of the rule {matches.rule!r} has the key of any of "
            f"{matches.unasked_for:,} messages on its topic {matches.topic}: compare what {matches.key_column} holds "
            "with the keys that are published; another column, key_format or topic may be meant",
            source="business", what=matches.rule, count=matches.unmatched + matches.unasked_for,
        )
        for matches in rule_matches
        if min(matches.unmatched, matches.unasked_for) >= UNMATCHED_MIN
        and not matches.matched and not matches.asked_for
    ]  # fmt: skip


def extent_causes(findings: Iterable[OutOfRangeFindings]) -> list[Cause]:
    """Returns a cause for each source and side with nearly all findings of a rule; rules of one source are summed."""
    sides: dict[tuple[str, str, str], list[tuple[OutOfRangeFindings, int]]] = {}
    for (source, what), outside in _by_rule(findings).items():
        for summed in outside:
            for side, count in _sides(summed):
                if summed.findings >= FINDINGS_MIN and count >= SHARE_MIN * summed.findings:
                    sides.setdefault((source, what, side), []).append((summed, count))
    return [
        Cause(sentence=_of_extent(side, some), source=source, what=what, count=sum(count for _, count in some))
        for (source, what, side), some in sides.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """A source whose times are ahead by `size_ms` in at least SHARE_MIN of the `rows` compared.

    `name`: of its times; `reference`: of the times they were compared with. `explains`: verdicts that this may have
    caused, by rule. `is_clock`: the times are of a database's clock, not of a column that the business writes.
    """

    name: str
    reference: str
    source: str
    what: str
    size_ms: int
    rows: int
    explains: Mapping[str, int]
    is_clock: bool


def shared_offset_ms(percentiles_ms: Sequence[int], *, rows: int, skew_ms: int) -> int | None:
    """Returns the median of differences, given as evenly spaced percentiles, if it exceeds the permitted skew and at
    least SHARE_MIN of all are within the skew around it; else None.
    """
    if rows < OFFSET_ROWS_MIN:
        return None
    median = percentiles_ms[len(percentiles_ms) // 2]
    near = sum(abs(difference_ms - median) <= skew_ms for difference_ms in percentiles_ms)
    return median if abs(median) > skew_ms and near >= SHARE_MIN * len(percentiles_ms) else None


def offset_causes(offsets: Iterable[Offset], *, skew_ms: int) -> list[Cause]:
    """Returns a cause for each offset; tables written by one wrong clock have one cause."""
    clocks: list[list[Offset]] = []
    causes = []
    for offset in offsets:
        if not offset.is_clock:
            causes.append(_of_offset([offset], skew_ms=skew_ms))
            continue
        same = next((some for some in clocks if abs(some[0].size_ms - offset.size_ms) <= skew_ms), None)
        if same is None:
            clocks.append([offset])
        else:
            same.append(offset)
    return [*(_of_offset(some, skew_ms=skew_ms) for some in clocks), *causes]


def _of_offset(some: Sequence[Offset], *, skew_ms: int) -> Cause:
    first, rows = some[0], sum(offset.rows for offset in some)
    explains: dict[str, int] = {}
    for offset in some:
        for rule, count in offset.explains.items():
            explains[rule] = explains.get(rule, 0) + count
    names = " and ".join(offset.name for offset in some)
    size = f"{abs(first.size_ms) / 1000:,.0f} s {'ahead of' if first.size_ms > 0 else 'behind'}"
    if first.is_clock:
        why = "the database's clock was wrong when they were written"
    else:
        zone = _zone(first.size_ms, skew_ms=skew_ms)
        why = f"it looks like {zone}, local time where UTC is expected" if zone else "it is constant"
    explained = ", ".join(f"{count:,} {rule}" for rule, count in explains.items())
    return Cause(
        sentence=f"{names[0].upper()}{names[1:]} are {size} {first.reference}, in 95 % or more of {rows:,} rows "
        f"that were compared: {why}. It may explain {explained}.",
        source=first.source, what=first.what, count=sum(explains.values()), size_ms=first.size_ms,
    )  # fmt: skip


def _zone(size_ms: int, *, skew_ms: int) -> str | None:
    """Returns the time zone with this offset from UTC; None: there is none."""
    quarters = round(size_ms / _QUARTER_MS)
    if not quarters or quarters not in _ZONES or abs(size_ms - quarters * _QUARTER_MS) > skew_ms:
        return None
    hours, quarters_left = divmod(abs(quarters), 4)
    return f"UTC{'+' if quarters > 0 else '-'}{hours:02d}:{quarters_left * 15:02d}"


def _by_rule(findings: Iterable[OutOfRangeFindings]) -> dict[tuple[str, str], list[OutOfRangeFindings]]:
    """Groups by source; the findings of a rule on several topics are summed."""
    sums: dict[tuple[str, str, Scope, str], OutOfRangeFindings] = {}
    for outside in findings:
        extent = outside.extent
        rule_key = (extent.source, extent.what, extent.scope, extent.rule)
        total = sums.get(rule_key)
        if total is None:
            sums[rule_key] = outside
        else:
            sums[rule_key] = OutOfRangeFindings(
                extent=extent, findings=total.findings + outside.findings, before=total.before + outside.before,
                after=total.after + outside.after,
            )  # fmt: skip
    sources: dict[tuple[str, str], list[OutOfRangeFindings]] = {}
    for (source, what, *_), outside in sums.items():
        sources.setdefault((source, what), []).append(outside)
    return sources


def _sides(outside: OutOfRangeFindings) -> list[tuple[str, int]]:
    if not outside.extent.rows:
        return [("empty", outside.findings)]
    return [("after", outside.after), ("before", outside.before)]


def _of_extent(side: str, some: Sequence[tuple[OutOfRangeFindings, int]]) -> str:
    extent = some[0][0].extent
    count, total = sum(count for _, count in some), sum(outside.findings for outside, _ in some)
    rules = ", ".join(f"{count:,} {outside.extent.rule}" for outside, count in some)
    name = f"the {extent.source} ({extent.what})"
    if side == "empty":
        return f"{name[0].upper()}{name[1:]} gave no row: {rules}."
    subject = f"All {count:,}" if count == total else f"{count:,} of {total:,}"
    time_ms, verb = (extent.last_ms, "ends") if side == "after" else (extent.first_ms, "begins")
    return f"{subject} findings are {side} {_moment(time_ms)}, where {name} {verb}: {rules}."


def _moment(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
