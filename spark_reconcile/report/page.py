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
    longest_ms = max((one.longest_ms for one in summary.latencies), default=0)
    return environment.get_template("report").render(
        summary=summary,
        tiles=_tiles(summary),
        words=[(state, meaning) for state, meaning in WORDS.items() if summary.count(state)],
        ledgers=[_ledger(scope, summary) for scope in _TITLES],
        flow=summary.flow and charts.flow_chart(summary.flow),
        heat=summary.flow and charts.heat_map(summary.flow),
        reach=charts.reach_chart(summary),
        ends=_ends(summary),
        latencies=[(one, charts.latency_bar(one, longest_ms=longest_ms)) for one in summary.latencies[:LINES_MAX]],
        examples=_examples(summary),
        explained=_explained(summary),
        severities=_severities(),
    )


def _ends(summary: Summary) -> tuple[int, int]:
    """Since when and until when all sources with rows are complete: the range of the evidence."""
    since = [one.complete_since_ms for one in summary.inputs if one.complete_since_ms is not None]
    until = [one.complete_until_ms or summary.judged_at_ms for one in summary.inputs]
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
        *((f"{one.source}: hours unjudged", one.hours, "attention") for one in summary.unjudged if one.hours),
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
    verdict_counts = [one for one in summary.verdict_counts if one.scope is scope]
    states = [state for state in State if any(one.state is state for one in verdict_counts)]
    places = sorted({(one.topic, one.of) for one in verdict_counts})
    lines = _folded(
        [_line(place, [one for one in verdict_counts if (one.topic, one.of) == place], states) for place in places]
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


def _line(place: tuple[str, str], verdict_counts: Sequence[VerdictCount], states: Sequence[State]) -> Line:
    counts = [sum(one.count for one in verdict_counts if one.state is state) for state in states]
    return Line(*place, counts=counts, total=sum(counts), bar=charts.verdict_bar(verdict_counts))


def _examples(summary: Summary) -> list[tuple[Example, VerdictRule | None]]:
    """Returns the first few examples of each rule, each with its rule."""
    seen: dict[tuple[Scope, str], int] = {}
    found: list[tuple[Example, VerdictRule | None]] = []
    for one in summary.examples:
        place = (one.scope, one.rule)
        seen[place] = seen.get(place, 0) + 1
        if seen[place] <= EXAMPLES_A_RULE and len(found) < EXAMPLES_MAX:
            found.append((one, _rule(*place)))
    return found


def _explained(summary: Summary) -> list[RuleExplanation]:
    counts: dict[tuple[Scope, str], int] = {}
    for one in summary.verdict_counts:
        counts[one.scope, one.rule] = counts.get((one.scope, one.rule), 0) + one.count
    found = [
        RuleExplanation(scope, rule, count) for (scope, name), count in counts.items() if (rule := _rule(scope, name))
    ]
    return sorted(found, key=_loudness)


def _loudness(one: RuleExplanation) -> tuple[int, int, str]:
    return _LOUDEST.index(one.rule.severity), list(State).index(one.rule.state), one.scope


def _rule(scope: Scope, name: str) -> VerdictRule | None:
    return next((rule for rule in RULES[scope] if rule.name == name), None)


def _severities() -> dict[State, Severity]:
    """The severity of each verdict: its usual one, else its highest."""
    found = {
        state: min(
            (rule.severity for rules in RULES.values() for rule in rules if rule.state is state),
            key=_LOUDEST.index,
            default=Severity.FINDING,
        )
        for state in State
    }
    usual = {State.SETTLED: Severity.OK, State.PENDING: Severity.WAIT}
    return {**found, **usual, State.CANCELED: Severity.INFO, State.UNKNOWN: Severity.INFO}
