"""The totals of each window: of rows classified one by one, and of rows settled in bulk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from spark_reconcile.core.dataframes import grouped, in_parallel
from spark_reconcile.core.settings import BusinessRule
from spark_reconcile.core.time_buckets import HOUR_MS, TimeAxis, hour
from spark_reconcile.evidence.delivery_evidence import GroupFacts
from spark_reconcile.results.run_figures import TROUBLE, Totals, loudest_first, verdict_count, verdict_of
from spark_reconcile.results.summary import Example, Summary, VerdictCount, WindowCounts
from spark_reconcile.results.window_store import Window
from spark_reconcile.rules.verdict_rule import Scope, Severity, State
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

EXAMPLES_A_RULE: Final = 5
EXAMPLES_OF_ALL: Final = 10
BULK_RULES: Final[Mapping[Scope, str]] = {
    Scope.MESSAGE: "stored",
    Scope.DELIVERY: "done",
    Scope.BUSINESS: "announced",
}
"""The verdicts of rows in a clean bucket."""
_PUBLISHED: Final = frozenset(
    {"stored", "archived_twice", "not_in_broker", "not_sent", "parked", "discarded", "body_differs"}
)
"""Rules that apply only to messages that an outbox or an archive had."""
_STANDING: Final = "not_sent"
_TOTALS: Final = (
    "broker", "resent", "repeated", "if(deliveries > 0, 1L, 0L)", "greatest(deliveries - 1, 0L)",
    "if(acks > 0, 1L, 0L)", "turned_away",
)  # fmt: skip
VerdictKey = tuple[Scope, str, str, str]
"""(scope, topic, group or business rule, rule)"""


@dataclass(slots=True)
class Tally:
    """Accumulates the numbers of one window."""

    counts: dict[VerdictKey, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    looked_at: int = 0
    resolved: int = 0

    def add(self, verdict_key: VerdictKey, count: int) -> None:
        """Add to the count of a verdict."""
        self.counts[verdict_key] = self.counts.get(verdict_key, 0) + count

    def add_totals(self, **counts: int) -> None:
        """Add to each of these totals."""
        for name, count in counts.items():
            self.totals[name] = self.totals.get(name, 0) + count

    @property
    def open(self) -> bool:
        """Whether any verdict has the severity WAIT: the window is evaluated again."""
        return any(verdict_of(scope, rule)[1] is Severity.WAIT for scope, _, _, rule in self.counts)

    def as_result(self) -> dict[str, Any]:
        """Returns the numbers as JSON values for the index."""
        return {
            "verdict_counts": [[*verdict_key, count] for verdict_key, count in sorted(self.counts.items()) if count],
            "totals": dict(sorted(self.totals.items())),
            "examples": [asdict(example) for example in self.examples],
            "looked_at": self.looked_at,
            "resolved": self.resolved,
        }


def summary_of(results: Iterable[Mapping[str, Any]], *, run_id: str, judged_at_ms: int) -> Summary:
    """Sums many windows to the summary of one run."""
    all_results = list(results)
    verdict_counts = verdict_counts_of(all_results)
    return Summary(
        run_id=run_id,
        judged_at_ms=judged_at_ms,
        business_rows=sum(counted.count for counted in verdict_counts if counted.scope is Scope.BUSINESS),
        resolved=sum(result["resolved"] for result in all_results),
        **asdict(totals_of(all_results)),
        verdict_counts=verdict_counts,
        examples=_first_of_each(examples_of(all_results)),
    )


def counts_of(shown: Mapping[int, Window], *, before: Iterable[Mapping[str, Any]]) -> WindowCounts:
    """Returns the state of these windows (at least one); `before`: the results of earlier ones."""
    return WindowCounts(
        since_ms=min(shown),
        until_ms=max(shown) + HOUR_MS,
        windows=len(shown),
        judged=0,
        open=sum(window.open for window in shown.values()),
        not_closed=0,
        looked_at=sum(window.result["looked_at"] for window in shown.values()),
        resolved=sum(window.result["resolved"] for window in shown.values()),
        earlier_findings=findings_of(before),
    )


def verdict_counts_of(results: Iterable[Mapping[str, Any]]) -> list[VerdictCount]:
    """Sums the verdict counts of many windows."""
    counts: dict[VerdictKey, int] = {}
    for result in results:
        for scope, topic, of, rule, count in result["verdict_counts"]:
            verdict_key = (Scope(scope), topic, of, rule)
            counts[verdict_key] = counts.get(verdict_key, 0) + count
    return [verdict_count(*verdict_key, count=count) for verdict_key, count in sorted(counts.items())]


def trouble_of(results: Mapping[int, Mapping[str, Any]], axis: TimeAxis) -> dict[State, dict[int, int]]:
    """Returns by time bucket the message and delivery verdicts that need attention; `results`: by window start."""
    trouble: dict[State, dict[int, int]] = {}
    for start, result in results.items():
        for counted in verdict_counts_of([result]):
            if counted.severity in {Severity.ATTENTION, Severity.FINDING} and counted.scope is not Scope.BUSINESS:
                cells = trouble.setdefault(counted.state, {})
                bucket = (start - axis.start_ms) // axis.width_ms
                cells[bucket] = cells.get(bucket, 0) + counted.count
    return trouble


def findings_of(results: Iterable[Mapping[str, Any]]) -> int:
    """Counts the findings of these windows, without rows in the outbox, which every run evaluates."""
    findings = [
        counted for counted in verdict_counts_of(results) if counted.severity is Severity.FINDING and not counted.echo
    ]
    return sum(counted.count for counted in findings if counted.rule != _STANDING)


def published_topics(results: Iterable[Mapping[str, Any]]) -> set[str]:
    """Returns the topics of messages that an outbox or its archive had in these windows."""
    return {
        str(topic)
        for result in results
        for scope, topic, _, rule, _ in result["verdict_counts"]
        if scope == Scope.MESSAGE and rule in _PUBLISHED
    }


def totals_of(results: Iterable[Mapping[str, Any]]) -> Totals:
    """Sums the totals of many windows."""
    names = {totals_field.name for totals_field in fields(Totals)}
    totals = dict.fromkeys(names, 0)
    for result in results:
        for name, count in result["totals"].items():
            totals[name] += count
    return Totals(**totals)


def examples_of(results: Iterable[Mapping[str, Any]]) -> list[Example]:
    """Returns the examples of many windows, in their order."""
    examples = []
    for result in results:
        for values in result["examples"]:
            state, severity, _ = verdict_of(Scope(values["scope"]), values["rule"])
            examples.append(
                Example(**{**values, "scope": Scope(values["scope"]), "state": state, "severity": severity})
            )
    return examples


def _first_of_each(examples: Sequence[Example]) -> list[Example]:
    """Returns the first few examples of each rule over all windows, findings first."""
    seen: dict[tuple[Scope, str], int] = {}
    kept = []
    for example in sorted(examples, key=lambda example: (example.at_ms, example.id, example.of, example.key)):
        rule_key = (example.scope, example.rule)
        seen[rule_key] = seen.get(rule_key, 0) + 1
        if seen[rule_key] <= EXAMPLES_OF_ALL:
            kept.append(example)
    return sorted(kept, key=loudest_first)


def bulk_of(sums: Iterable[Row]) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of clean parts: (window_ms, topic, note, n, resent, repeated). `sums`: the result of sums_of().

    `note` is a business rule's number, -1 for messages.
    """
    for row in sums:
        if row["clean"]:
            part = row.asDict()
            yield {**part, "note": -1}
            if part["note"] >= 0:
                yield {**part, "n": part["asked"]}


def changes_of(changes: DataFrame) -> Iterable[Mapping[str, Any]]:
    """Yields the same columns for single rows of business and archive, weighted by their `sign`."""
    counted = changes.where(f"input_kind in ('{InputKind.BUSINESS}', '{InputKind.ARCHIVE}')").selectExpr(
        f"{hour('created_ms')} as window_ms", "topic",
        f"if(input_kind = '{InputKind.BUSINESS}', cast(note as int), -1) as note",
        "cast(sign as bigint) as n", "if(attempts > 1, sign, 0) as resent",
        "if(note = 'duplicate', sign, 0) as repeated",
    )  # fmt: skip
    summed = {name: f"sum({name})" for name in ("n", "resent", "repeated")}
    return [row.asDict() for row in grouped(counted, "window_ms", "topic", "note", **summed).collect()]


def tally_bulk(
    tallies: Mapping[int, Tally], bulk: Iterable[Mapping[str, Any]], groups: Sequence[GroupFacts],
    rules: Sequence[BusinessRule],
) -> None:  # fmt: skip
    """Add what was settled in bulk: every message, delivery and business row of it."""
    groups_of: dict[str, list[str]] = {}
    for group in groups:
        groups_of.setdefault(group.topic, []).append(group.consumer_group)
    for row in bulk:
        tally, count, topic = tallies.get(row["window_ms"]), int(row["n"]), row["topic"]
        if tally is None:
            continue
        if row["note"] >= 0:
            tally.add((Scope.BUSINESS, topic, rules[row["note"]].name, BULK_RULES[Scope.BUSINESS]), count)
            continue
        of = groups_of.get(topic, [])
        tally.add((Scope.MESSAGE, topic, "", BULK_RULES[Scope.MESSAGE]), count)
        for name in of:
            tally.add((Scope.DELIVERY, topic, name, BULK_RULES[Scope.DELIVERY]), count)
        tally.add_totals(
            messages=count, stored=count, resent=int(row["resent"]), message_groups=count * len(of),
            deduplicated_by_broker=int(row["repeated"]), delivered=count * len(of), acknowledged=count * len(of),
        )  # fmt: skip


def tally_verdicts(tallies: Mapping[int, Tally], table: DataFrame, business: DataFrame) -> None:
    """Add verdicts on messages, deliveries and business rows, with examples."""
    in_parallel(
        lambda: _tally_rows(tallies, table),
        lambda: _tally_business(tallies, business),
        lambda: _tally_examples(tallies, table, business),
    )


def _tally_rows(tallies: Mapping[int, Tally], table: DataFrame) -> None:
    """Add verdicts on messages and deliveries."""
    by_rule = grouped(
        table, "window_ms", "scope", "topic", "consumer_group", "rule",
        n="count(*)", **{f"v{index}": f"sum({value})" for index, value in enumerate(_TOTALS)},
    )  # fmt: skip
    for row in by_rule.collect():
        tally, scope, count = tallies.get(row["window_ms"]), Scope(row["scope"]), row["n"]
        if tally is None:
            continue
        tally.add((scope, row["topic"] or "", row["consumer_group"] or "", row["rule"]), count)
        values = [int(row[f"v{index}"]) for index in range(len(_TOTALS))]
        if scope is Scope.MESSAGE:
            tally.add_totals(messages=count, stored=values[0], resent=values[1], deduplicated_by_broker=values[2])
        else:
            tally.add_totals(
                message_groups=count, delivered=values[3], redelivered=values[4], acknowledged=values[5],
                deduplicated_by_inbox=values[6],
            )  # fmt: skip
        tally.looked_at += count


def _tally_business(tallies: Mapping[int, Tally], business: DataFrame) -> None:
    """Add verdicts on business rows."""
    for row in grouped(business, "window_ms", "topic", "business_rule", "rule", n="sum(rows)").collect():
        tally = tallies.get(row["window_ms"])
        if tally is not None:
            tally.add((Scope.BUSINESS, row["topic"], row["business_rule"], row["rule"]), int(row["n"]))


def _tally_examples(tallies: Mapping[int, Tally], table: DataFrame, business: DataFrame) -> None:
    """Add the first few rows of every rule in every window that need attention or action."""
    rows = table.where(TROUBLE).selectExpr(
        "window_ms", "scope", "rule", "message_id as id", "topic", "coalesce(consumer_group, '') as of",
        "coalesce(message_key, '') as key", "at_ms",
    ).unionByName(
        business.where(TROUBLE).selectExpr(
            "window_ms", f"'{Scope.BUSINESS}' as scope", "rule", "'' as id", "topic", "business_rule as of",
            "coalesce(message_key, '') as key", "at_ms",
        )
    )  # fmt: skip
    ranked = rows.selectExpr(
        "*", "row_number() over (partition by window_ms, scope, rule order by at_ms, id, of, key) as example_rank"
    )
    chosen = ranked.where(f"example_rank <= {EXAMPLES_A_RULE}").orderBy("window_ms", "scope", "rule", "example_rank")
    for row in chosen.collect():
        values = row.asDict()
        del values["example_rank"]
        tally, scope = tallies.get(values.pop("window_ms")), Scope(values["scope"])
        state, severity, echo = verdict_of(scope, values["rule"])
        if tally is not None and not echo:
            example_fields = {**values, "scope": scope, "topic": values["topic"] or ""}
            tally.examples.append(Example(**example_fields, state=state, severity=severity))
