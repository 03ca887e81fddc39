"""The summary of a run: the numbers that are printed, written as JSON and shown in the report. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_reconcile.core.settings import Grace
from spark_reconcile.core.time_buckets import TimeAxis
from spark_reconcile.rules.verdict_rule import Scope, Severity, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Counts by time bucket: messages stored, first deliveries, acknowledgements, and verdicts that need attention."""

    axis: TimeAxis
    events: Mapping[str, Mapping[int, int]]
    trouble: Mapping[State, Mapping[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputExtent:
    """One source: rows, their time range, since when it is complete (0: the beginning, None: never), and until when.

    `complete_until_ms` None: until the time it was read.
    """

    source: str
    what: str
    rows: int
    first_ms: int
    last_ms: int
    complete_since_ms: int | None
    complete_until_ms: int | None = None
    note: str = ""
    """Remarks for users on how it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictCount:
    """How many rows have one verdict, by one rule, on one topic (and group, or business rule)."""

    scope: Scope
    topic: str
    of: str
    state: State
    severity: Severity
    rule: str
    count: int
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Latency of one hop on one topic (and group), in milliseconds."""

    hop: str
    topic: str
    of: str
    count: int
    p50_ms: int
    p95_ms: int
    p99_ms: int
    longest_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row whose verdict needs attention or action."""

    scope: Scope
    rule: str
    state: State
    severity: Severity
    id: str
    topic: str
    of: str
    key: str
    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnjudgedHours:
    """Hours that a source no longer has, between `since_ms` and `until_ms`: `hours` were purged before their first
    evaluation, `open_hours` were still open at their last one.
    """

    source: str
    what: str
    hours: int
    open_hours: int
    since_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCounts:
    """The hours of a run by windows, and their state.

    judged: new, changed or open hours, which this run evaluated; the others did not change. open: hours with pending
    verdicts, which the next run evaluates again. not_closed: too new, excluded. looked_at: verdicts given row by row,
    not in bulk. resolved: suspects that the recheck cleared. outside: messages of other hours that are still in the
    outbox; included in the counts. earlier_findings: of hours before the time range, as last evaluated; not included in
    the counts, but a run with any is not balanced. untimed: hours without stored latencies.
    """

    since_ms: int
    until_ms: int
    windows: int
    judged: int
    open: int
    not_closed: int
    looked_at: int
    resolved: int
    outside: int = 0
    earlier_findings: int = 0
    untimed: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All results of a run.

    delivered: (message, group) delivered at least once. redelivered: deliveries beyond the first. deduplicated:
    duplicates that the broker or an inbox rejected. resent: messages that took more than one try to send. unexplained:
    rows without a verdict, always 0. resolved: suspects that the recheck cleared. clocks: by how many milliseconds
    databases' clocks are ahead, if they differ.
    """

    run_id: str
    judged_at_ms: int
    business_rows: int
    messages: int
    message_groups: int
    stored: int
    delivered: int
    redelivered: int
    acknowledged: int
    resent: int
    deduplicated_by_broker: int
    deduplicated_by_inbox: int
    resolved: int = 0
    causes: Sequence[Cause] = ()
    """Causes that explain many verdicts at once."""
    verdict_counts: Sequence[VerdictCount] = ()
    latencies: Sequence[Latency] = ()
    examples: Sequence[Example] = ()
    inputs: Sequence[InputExtent] = ()
    folder: str = ""
    windows: WindowCounts | None = None
    clocks: Mapping[str, int] = field(default_factory=dict)
    unjudged: Sequence[UnjudgedHours] = ()
    shortened: Sequence[str] = field(default_factory=list)
    """A sentence for each source that an earlier run saw to reach further."""
    took_seconds: Mapping[str, float] = field(default_factory=dict)
    spark_tasks: Mapping[str, int] = field(default_factory=dict)
    """How many tasks Spark completed in each phase, where somebody watched the run."""
    grace: Grace | None = None
    """The time limits of the verdicts; None for hours, which do not store them."""
    flow: Flow | None = None
    """The time series of the charts, if there are any."""

    def count(self, state: State, *, scope: Scope | None = None) -> int:
        """Count rows with this verdict, without business rows that only echo their message's verdict."""
        return sum(
            counted.count
            for counted in self.verdict_counts
            if counted.state is state and not counted.echo and scope in {None, counted.scope}
        )

    def counts(self, severity: Severity) -> dict[State, int]:
        """Count rows with a verdict of this severity, by state, without echoes: for the sentence and the tiles."""
        counts: dict[State, int] = {}
        for counted in self.verdict_counts:
            if counted.severity is severity and not counted.echo:
                counts[counted.state] = counts.get(counted.state, 0) + counted.count
        return {state: counts[state] for state in State if state in counts}

    @property
    def deduplicated(self) -> int:
        """Duplicates that the broker or an inbox rejected."""
        return self.deduplicated_by_broker + self.deduplicated_by_inbox

    @property
    def unexplained(self) -> int:
        """Rows that match no rule."""
        return self.count(State.UNEXPLAINED)

    @property
    def findings(self) -> int:
        """Rows whose verdict needs action."""
        return sum(self.counts(Severity.FINDING).values())

    @property
    def earlier_findings(self) -> int:
        """Findings of hours before the time range of a run by the hour, as last evaluated."""
        return self.windows.earlier_findings if self.windows else 0

    @property
    def balanced(self) -> bool:
        """Whether there is no finding, neither of this run nor of hours before its time range."""
        return self.findings == 0 and self.earlier_findings == 0

    @property
    def sentence(self) -> str:
        """The run in one sentence; more sentences for findings of earlier hours, and for hours not evaluated."""
        unknown, attention = self.counts(Severity.INFO).get(State.UNKNOWN, 0), _listed(self, Severity.ATTENTION)
        explained = (
            f"all of {self.messages:,} messages, {self.message_groups:,} deliveries and "
            f"{self.business_rows:,} business rows are explained"
            f"{f', {unknown:,} of them as unknown, without the records to judge them by' if unknown else ''}"
            f"{f'; {attention} to look at.' if attention else '.'}"
        )
        if self.balanced:
            return f"Balanced: {explained}{self._gone}"
        earlier = f"{self.earlier_findings:,} {_plural('finding', self.earlier_findings)} of earlier hours"
        finding_texts = [_listed(self, Severity.FINDING)] if self.findings else []
        text = f"Not balanced: {' and '.join([*finding_texts, *([earlier] if self.earlier_findings else [])])}."
        if self.earlier_findings:
            text += " Earlier hours count as they were last judged; an earlier --since judges them again."
        if not self.findings:
            text += f" In this span {explained}"
        return f"{text}{self._gone}"

    @property
    def headline(self) -> str:
        """The first lines on a terminal: each cause, then the run in one sentence."""
        return "\n".join([*(f"Cause: {cause.sentence}" for cause in self.causes), self.sentence])

    @property
    def _gone(self) -> str:
        gone = [f"{gap.hours:,} hours of the {gap.source} ({gap.what})" for gap in self.unjudged if gap.hours]
        purged = f" Purged before they were judged: {', '.join(gone)}." if gone else ""
        return purged + "".join(f" {sentence}." for sentence in self.shortened)

    @property
    def clock_sentences(self) -> list[str]:
        """Returns a sentence for each clock that is wrong."""
        return [
            f"The clock of {name} is {abs(ahead_ms) / 1000:,.0f} s {'ahead of' if ahead_ms > 0 else 'behind'} this "
            "machine's: so much more of what is new was left pending. Set the clocks."
            for name, ahead_ms in sorted(self.clocks.items())
        ]

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields for JSON, and named counts."""
        values = asdict(self)
        return {
            "causes": values["causes"],
            **values,
            "balanced": self.balanced,
            "findings": self.findings,
            "earlier_findings": self.earlier_findings,
            "sentence": self.sentence,
            "deduplicated": self.deduplicated,
            **{state.value: self.count(state) for state in State},
            "verdicts": self._by_state({Scope.MESSAGE, Scope.DELIVERY}),
            "business_verdicts": self._by_state({Scope.BUSINESS}),
        }

    def _by_state(self, scopes: set[Scope]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for counted in self.verdict_counts:
            if counted.scope in scopes:
                counts[counted.state.value] = counts.get(counted.state.value, 0) + counted.count
        return dict(sorted(counts.items()))


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _listed(summary: Summary, severity: Severity) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in summary.counts(severity).items())
