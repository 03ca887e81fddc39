"""Renders the report page: verdict counts, explanations of the rules that occur, charts. Counts nothing.

Topics, keys and ids are untrusted: the template escapes all values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from jinja2 import DictLoader, Environment, StrictUndefined

from spark_reconcile.classify.classification import RULES
from spark_reconcile.report import charts
from spark_reconcile.results.summary import Example, Summary, VerdictCount
from spark_reconcile.rules.verdict_rule import Scope, Severity, State, VerdictRule

_TITLES: Final = {
    Scope.BUSINESS: (
        "Business rows",
        "rule",
        "Each row that a rule asks about, against the messages under its key.",
    ),
    Scope.MESSAGE: ("Messages", "", "Each message once, from its transaction to the broker's disk."),
    Scope.DELIVERY: ("Deliveries", "group", "Each message once for each consumer group of its topic."),
}
WORDS: Final = {
    State.LOST: "One record says that it happened, and the next one, which must know it, does not.",
    State.UNSENT: "Committed by the business, and still not with the broker.",
    State.PHANTOM: "It went out, or took effect, and nobody asked for it.",
    State.DUPLICATE: "It is there more often than it was asked for.",
    State.MISMATCH: "Two records of one message say different things.",
    State.EARLY: "It took effect before its time.",
    State.LATE: "It came, or still waits, longer than the bound allows. Nothing is lost.",
    State.DEAD: "Its consumer failed at it until the attempts were used up. It is kept, and can be given again.",
    State.DISCARDED: "The broker refused it, or its consumer failed at it, and somebody decided to give it up.",
    State.PARKED: "The broker refused it for good. It is kept, and waits for somebody to decide.",
    State.UNKNOWN: "The records that would tell are not kept that long, or are not among the sources.",
    State.PENDING: "Still on its way, and in time.",
}
"""What a verdict means for the business, for readers who do not know the documentation."""
LINES_MAX: Final = 60
EXAMPLES_A_RULE: Final = 5
EXAMPLES_MAX: Final = 120
_BAD: Final = (State.LOST, State.PHANTOM, State.DUPLICATE, State.EARLY, State.MISMATCH, State.UNSENT)
_TO_LOOK_AT: Final = (State.LATE, State.DEAD, State.PARKED)
_LOUDEST: Final = (Severity.FINDING, Severity.ATTENTION, Severity.INFO, Severity.WAIT, Severity.OK)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of verdict counts: a topic (and group, or rule), a count for each verdict, their sum."""

    topic: str
    of: str
    counts: list[int]
    total: int
    bar: Any


@dataclass(frozen=True, slots=True)
class Ledger:
    """The table of verdict counts of one scope: a column for each verdict that occurs, sums in the last line."""

    title: str
    of: str
    note: str
    states: list[State]
    lines: list[Line]
    sums: list[int]
    total: int


@dataclass(frozen=True, slots=True)
class RuleExplanation:
    """A rule that gave verdicts in this run, and their number."""

    scope: Scope
    rule: VerdictRule
    count: int


def page_of(summary: Summary) -> str:
    """Returns the page as HTML."""
    environment = Environment(
        loader=DictLoader({"report": files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(moment=charts.moment, duration=charts.duration, number=lambda value: f"{value:,}")
    longest_ms = max((latency.longest_ms for latency in summary.latencies), default=0)
    return environment.get_template("report").render(
        summary=summary,
        tiles=_tiles(summary),
        words=[(state, meaning) for state, meaning in WORDS.items() if summary.count(state)],
        ledgers=[_ledger(scope, summary) for scope in _TITLES],
        flow=summary.flow and charts.flow_chart(summary.flow),
        heat=summary.flow and charts.heat_map(summary.flow),
        reach=charts.reach_chart(summary),
        ends=_ends(summary),
        latencies=[
            (latency, charts.latency_bar(latency, longest_ms=longest_ms)) for latency in summary.latencies[:LINES_MAX]
        ],
        examples=_examples(summary),
        explained=_explained(summary),
        severities=_severities(),
    )


def _ends(summary: Summary) -> tuple[int, int]:
    """Since when and until when all sources with rows are complete: the range of the evidence."""
    since = [extent.complete_since_ms for extent in summary.inputs if extent.complete_since_ms is not None]
    until = [extent.complete_until_ms or summary.judged_at_ms for extent in summary.inputs]
    return max(since, default=0), min([*until, summary.judged_at_ms])


def _tiles(summary: Summary) -> list[tuple[str, int, str]]:
    """Returns (name, number, class): the numbers of the headline first, then other totals.

    A state's tile counts the rows that the headline counts: those of its severity, without echoes.
    """
    findings, attention = summary.counts(Severity.FINDING), summary.counts(Severity.ATTENTION)
    earlier = summary.windows.earlier_findings if summary.windows else 0
    pending = summary.count(State.PENDING)
    return [
        ("findings", summary.findings, "finding" if summary.findings else "ok"),
        *([("findings of earlier hours", earlier, "finding")] if earlier else []),
        *((f"{gap.source}: hours unjudged", gap.hours, "attention") for gap in summary.unjudged if gap.hours),
        ("business rows", summary.business_rows, ""),
        ("messages", summary.messages, ""),
        ("deliveries", summary.message_groups, ""),
        ("delivered", summary.delivered, ""),
        ("sent again", summary.resent, ""),
        ("redelivered", summary.redelivered, ""),
        ("deduplicated", summary.deduplicated, ""),
        ("pending", pending, "wait" if pending else ""),
        *_of_states(findings, _BAD, "finding"),
        *_of_states(attention, _TO_LOOK_AT, "attention"),
        ("unexplained", summary.unexplained, "finding" if summary.unexplained else "ok"),
    ]


def _of_states(counts: Mapping[State, int], always: Sequence[State], style: str) -> list[tuple[str, int, str]]:
    """Returns a tile for each state with a count, and for those that are always shown."""
    shown = [state for state in State if state in counts or state in always]
    return [
        (state.value, counts.get(state, 0), style if counts.get(state) else "ok")
        for state in shown
        if state is not State.UNEXPLAINED
    ]


def _ledger(scope: Scope, summary: Summary) -> Ledger:
    verdict_counts = [counted for counted in summary.verdict_counts if counted.scope is scope]
    states = [state for state in State if any(counted.state is state for counted in verdict_counts)]
    line_keys = sorted({(counted.topic, counted.of) for counted in verdict_counts})
    lines = _folded(
        [
            _line(line_key, [counted for counted in verdict_counts if (counted.topic, counted.of) == line_key], states)
            for line_key in line_keys
        ]
    )
    title, of, note = _TITLES[scope]
    sums = [sum(column) for column in zip(*(line.counts for line in lines), strict=True)]
    return Ledger(title, of, note, states, lines, sums=sums, total=sum(line.total for line in lines))


def _folded(lines: list[Line]) -> list[Line]:
    """Limits the lines of a table: the largest stay, the others are summed up in one."""
    if len(lines) <= LINES_MAX:
        return lines
    by_size = sorted(lines, key=lambda line: -line.total)
    rest = by_size[LINES_MAX:]
    counts = [sum(column) for column in zip(*(line.counts for line in rest), strict=True)]
    return [*by_size[:LINES_MAX], Line(f"{len(rest):,} more", "", counts=counts, total=sum(counts), bar="")]


def _line(line_key: tuple[str, str], verdict_counts: Sequence[VerdictCount], states: Sequence[State]) -> Line:
    counts = [sum(counted.count for counted in verdict_counts if counted.state is state) for state in states]
    return Line(*line_key, counts=counts, total=sum(counts), bar=charts.verdict_bar(verdict_counts))


def _examples(summary: Summary) -> list[tuple[Example, VerdictRule | None]]:
    """Returns the first few examples of each rule, each with its rule."""
    seen: dict[tuple[Scope, str], int] = {}
    shown: list[tuple[Example, VerdictRule | None]] = []
    for example in summary.examples:
        rule_key = (example.scope, example.rule)
        seen[rule_key] = seen.get(rule_key, 0) + 1
        if seen[rule_key] <= EXAMPLES_A_RULE and len(shown) < EXAMPLES_MAX:
            shown.append((example, _rule(*rule_key)))
    return shown


def _explained(summary: Summary) -> list[RuleExplanation]:
    counts: dict[tuple[Scope, str], int] = {}
    for counted in summary.verdict_counts:
        counts[counted.scope, counted.rule] = counts.get((counted.scope, counted.rule), 0) + counted.count
    explanations = [
        RuleExplanation(scope, rule, count) for (scope, name), count in counts.items() if (rule := _rule(scope, name))
    ]
    return sorted(explanations, key=_loudness)


def _loudness(explanation: RuleExplanation) -> tuple[int, int, str]:
    return _LOUDEST.index(explanation.rule.severity), list(State).index(explanation.rule.state), explanation.scope


def _rule(scope: Scope, name: str) -> VerdictRule | None:
    return next((rule for rule in RULES[scope] if rule.name == name), None)


def _severities() -> dict[State, Severity]:
    """The severity of each verdict: its usual one, else its highest."""
    severities = {
        state: min(
            (rule.severity for rules in RULES.values() for rule in rules if rule.state is state),
            key=_LOUDEST.index,
            default=Severity.FINDING,
        )
        for state in State
    }
    usual = {State.SETTLED: Severity.OK, State.PENDING: Severity.WAIT}
    return {**severities, **usual, State.CANCELED: Severity.INFO, State.UNKNOWN: Severity.INFO}
