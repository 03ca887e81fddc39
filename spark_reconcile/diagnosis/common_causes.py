"""Measures what may explain many findings at once, and derives causes from it, with a sentence each.

Three kinds: a rule none of whose keys match, findings outside of the times that a source covers, and a source whose
times are off. The derivations, `key_causes`, `extent_causes` and `offset_causes`, are pure.

A cause explains, and excuses nothing: behind a log's end messages may be lost as well. So no verdict, exit status or
repair changes. Not seen: two faults of one rule of which neither has SHARE_MIN of its findings, and a clock that
drifted or stepped within the time range. The broker's clock is what all others are compared with, so its fault is named
as one of all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.dataframes import grouped, listed, union
from spark_reconcile.core.settings import BusinessRule
from spark_reconcile.results.summary import Cause, InputExtent, VerdictCount
from spark_reconcile.rules.verdict_rule import FINDING, Scope, Severity
from spark_reconcile.sources.sql_statements import CANCELS, DISCARDED, InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_reconcile.load.source_reader import Evidence


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


_BROKER: Final = {SourceKind.MESSAGE_LOG: "message log", SourceKind.ACTION_LOG: "action log"}
_SCHEMA: Final = "number bigint, scope string, rule string, of string, first_ms bigint, last_ms bigint"


def extents_of(
    verdict_counts: Sequence[VerdictCount], inputs: Sequence[InputExtent], rules: Sequence[BusinessRule]
) -> list[RuleExtent]:
    """Returns the extents of sources on which a rule with FINDINGS_MIN findings or more depends."""
    counts: dict[tuple[Scope, str], int] = {}
    for counted in verdict_counts:
        if counted.severity is Severity.FINDING and not counted.echo:
            counts[counted.scope, counted.rule] = counts.get((counted.scope, counted.rule), 0) + counted.count
    return [
        RuleExtent(
            scope=scope, rule=name, of=of, source=extent.source, what=extent.what, rows=extent.rows,
            first_ms=extent.first_ms, last_ms=extent.last_ms,
        )
        for (scope, name), kinds in DEPENDS_ON.items() if counts.get((scope, name), 0) >= FINDINGS_MIN
        for kind in kinds for of, extent in _sources(kind, inputs, rules)
    ]  # fmt: skip


def findings_outside(table: DataFrame, business: DataFrame, extents: Sequence[RuleExtent]) -> list[OutOfRangeFindings]:
    """Count the findings before and after these extents, by one aggregation. Those without a time count as neither."""
    numbered = [
        (index, extent.scope, extent.rule, extent.of, extent.first_ms, extent.last_ms)
        for index, extent in enumerate(extents)
    ]
    extent_frame = listed(table.sparkSession, numbered, _SCHEMA).hint("broadcast")
    joined = extent_frame.join(_findings(table, business), ["scope", "rule"]).where("of = '' or of = finding_of")
    counted = grouped(
        joined, "number",
        findings="sum(n)", before="sum(if(time_ms > 0 and time_ms < first_ms, n, 0L))",
        after="sum(if(time_ms > last_ms, n, 0L))",
    )  # fmt: skip
    return [
        OutOfRangeFindings(
            extent=extents[row["number"]], findings=row["findings"], before=row["before"], after=row["after"]
        )
        for row in sorted(counted.collect())
    ]


def _findings(table: DataFrame, business: DataFrame) -> DataFrame:
    """Returns scope, rule, finding_of, time_ms, n; time: a message was sent, a delivery was acknowledged."""
    of_messages = table.where(FINDING).selectExpr(
        "scope", "rule", f"coalesce(if(scope = '{Scope.MESSAGE}', topic, consumer_group), '') as finding_of",
        f"if(scope = '{Scope.MESSAGE}', greatest(at_ms, sent_ms), if(acked_ms > 0, acked_ms, at_ms)) as time_ms",
        "1L as n",
    )  # fmt: skip
    rows = business.where(FINDING).selectExpr(
        f"'{Scope.BUSINESS}' as scope", "rule", "business_rule as finding_of", "at_ms as time_ms", "rows as n"
    )
    return union(of_messages, rows)


def _sources(
    kind: SourceKind, inputs: Sequence[InputExtent], rules: Sequence[BusinessRule]
) -> Iterator[tuple[str, InputExtent]]:
    """Returns the sources of a kind, each with its topic or group; empty: all."""
    topics = {rule.name: rule.topic for rule in rules}
    for extent in inputs:
        match kind:
            case SourceKind.BUSINESS:
                if extent.source == "business":
                    yield topics[extent.what], extent
            case SourceKind.INBOX:
                if extent.source == "inbox":
                    yield extent.what, extent
            case SourceKind.ARCHIVE:
                if extent.source == "archive":
                    yield "", extent
            case _:
                if (extent.source, extent.what) == ("broker", _BROKER[kind]):
                    yield "", extent


SAMPLED_ROWS: Final = 20_000
"""Approximate number of rows of a source that are compared, sampled by a hash of their ids or keys."""
STEPS: Final = 200
"""Percentiles are computed at each half percent."""
_UNDER_KEY: Final = ("topic", "message_key")
_MESSAGE: Final = ("topic", "id")


class ComparedTimes(StrEnum):
    """The compared times of each source."""

    ARCHIVE = "archive"
    INBOX = "inbox"
    BUSINESS_TIME = "business time"
    BUSINESS_DUE = "business due time"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDifferences:
    """By how many milliseconds the times of `rows` rows are ahead: STEPS + 1 percentiles, in order. `of`: a group, or
    the number of a business rule.
    """

    compared: ComparedTimes
    of: str
    rows: int
    percentiles_ms: Sequence[int]


def measured_differences(evidence: Evidence, times: Collection[ComparedTimes]) -> list[TimeDifferences]:
    """Returns the differences of the wanted sources (at least one); none for a source without rows to compare.

    Times written by database clocks are compared with the broker's single clock: an archive row is written right after
    the broker stored its message, and an inbox row between delivery and acknowledgement. A business row's times are
    compared with its message's. One aggregation in Spark over sampled rows.
    """
    frames = [_FRAMES[compared](evidence) for compared in ComparedTimes if compared in times]
    shares = ", ".join(f"{step / STEPS}D" for step in range(STEPS + 1))
    percentiles = grouped(
        union(*frames), "compared", "of",
        n="count(*)", steps=f"percentile_approx(difference_ms, array({shares}), 10000)",
    )  # fmt: skip
    return [
        TimeDifferences(
            compared=ComparedTimes(row["compared"]), of=row["of"], rows=row["n"], percentiles_ms=list(row["steps"])
        )
        for row in sorted(percentiles.collect())
    ]


def _archive(evidence: Evidence) -> DataFrame:
    """When the archive row was written minus when the broker stored its message; of messages sent at the first try."""
    once = (
        f"input_kind = '{InputKind.ARCHIVE}' and topic != '{CANCELS}' and attempts <= 1 "
        f"and coalesce(note, '') not in ('duplicate', '{DISCARDED}')"
    )
    sampled = _sampled("id", _rows(evidence, InputKind.ARCHIVE))
    sent = evidence.rows.where(f"{once} and {sampled}").select(*_MESSAGE, "at_ms")
    stored = evidence.messages.where(f"stored_ms is not null and {sampled}").select(*_MESSAGE, "stored_ms")
    return _difference(sent.join(stored, list(_MESSAGE)), ComparedTimes.ARCHIVE, "''", "at_ms - stored_ms")


def _inbox(evidence: Evidence) -> DataFrame:
    """How far the time of the inbox row is outside of the time from delivery to acknowledgement; 0 if within."""
    sampled = _sampled("id", _rows(evidence, InputKind.INBOX))
    effects = evidence.inboxes.where(f"input_kind = '{InputKind.INBOX}' and {sampled}").select(
        *_MESSAGE, "consumer_group", "at_ms"
    )
    taken = evidence.actions.where(f"kind in ('delivered', 'acked') and {sampled}")
    delivered = grouped(
        taken, *_MESSAGE, "consumer_group",
        delivered_ms="min(if(kind = 'delivered', at_ms, null))", acked_ms="min(if(kind = 'acked', at_ms, null))",
    ).where("delivered_ms is not null and acked_ms is not null")  # fmt: skip
    apart = "if(at_ms < delivered_ms, at_ms - delivered_ms, greatest(at_ms - acked_ms, 0L))"
    return _difference(
        effects.join(delivered, [*_MESSAGE, "consumer_group"]), ComparedTimes.INBOX, "consumer_group", apart
    )


def _business_time(evidence: Evidence) -> DataFrame:
    return _difference(_asked_and_sent(evidence), ComparedTimes.BUSINESS_TIME, "rule", "asked_ms - sent_ms")


def _business_due(evidence: Evidence) -> DataFrame:
    return _difference(_asked_and_sent(evidence), ComparedTimes.BUSINESS_DUE, "rule", "asked_due_ms - sent_due_ms")


def _asked_and_sent(evidence: Evidence) -> DataFrame:
    """Pairs of business and archive rows that are the only ones with their key, with the times of both."""
    sampled = f"message_key != '' and {_sampled('message_key', _rows(evidence, InputKind.BUSINESS))}"
    rows = evidence.rows.where(sampled)
    asked = grouped(
        rows.where(f"input_kind = '{InputKind.BUSINESS}'"), *_UNDER_KEY,
        rule="min(note)", n="count(*)", asked_ms="min(created_ms)", asked_due_ms="min(deliver_at_ms)",
    )  # fmt: skip
    sent = grouped(
        rows.where(f"input_kind = '{InputKind.ARCHIVE}'"), *_UNDER_KEY,
        sent_n="count(*)", sent_ms="min(created_ms)", sent_due_ms="min(deliver_at_ms)",
    )  # fmt: skip
    return asked.where("n = 1").join(sent.where("sent_n = 1"), list(_UNDER_KEY))


def _difference(frame: DataFrame, compared: ComparedTimes, of: str, value: str) -> DataFrame:
    named = frame.selectExpr(f"'{compared}' as compared", f"cast({of} as string) as of", f"{value} as difference_ms")
    return named.where("difference_ms is not null")


_FRAMES: Final = {
    ComparedTimes.ARCHIVE: _archive,
    ComparedTimes.INBOX: _inbox,
    ComparedTimes.BUSINESS_TIME: _business_time,
    ComparedTimes.BUSINESS_DUE: _business_due,
}


def _rows(evidence: Evidence, input_kind: InputKind) -> int:
    return sum(count.rows for count in evidence.counts if count.input_kind == input_kind)


def _sampled(column: str, rows: int) -> str:
    """SQL condition: a row is sampled; the same ids, or keys, in every source."""
    return f"pmod(xxhash64({column}), {max(1, rows // SAMPLED_ROWS)}) = 0"
