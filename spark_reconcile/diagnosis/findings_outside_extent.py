"""Counts the findings of each rule outside of the times that a source covers. One Spark aggregation over findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.dataframes import grouped, listed, union
from spark_reconcile.core.settings import BusinessRule
from spark_reconcile.load.input_extent import InputExtent
from spark_reconcile.results.common_causes import DEPENDS_ON, FINDINGS_MIN, OutOfRangeFindings, RuleExtent, SourceKind
from spark_reconcile.results.summary import VerdictCount
from spark_reconcile.rules.verdict_rule import FINDING, Scope, Severity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    """Count the findings before and after these extents. Findings without a time count as neither."""
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
