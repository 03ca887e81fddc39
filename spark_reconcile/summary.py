"""The run in numbers, as they are printed, written as JSON and shown in the report.

All of them come from the verdicts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from spark_reconcile.verdict import Severity, Verdict, severity_of

FATAL: Final = (Verdict.LOST, Verdict.PHANTOM, Verdict.EARLY)
PERCENTILES: Final = (50, 95, 99, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts of one run. `verdicts` are per (message, group); `books` the same by topic and group.

    delivered: (message, group) handed out at least once. redelivered: hand-outs beyond the first. deduplicated: repeats
    that the broker or an inbox turned away. unexplained: (message, group) without a verdict, always 0.
    """

    run_id: str
    judged_at_ms: int
    business_rows: int
    messages: int
    message_groups: int
    delivered: int
    redelivered: int
    deduplicated: int
    unexplained: int
    verdicts: dict[str, int]
    business_verdicts: dict[str, int]
    books: list[dict[str, Any]] = field(default_factory=list)
    latencies: list[dict[str, Any]] = field(default_factory=list)
    folder: str = ""

    def count(self, verdict: Verdict) -> int:
        """How many (messages, groups) and business rows got this verdict."""
        return self.verdicts.get(verdict, 0) + self.business_verdicts.get(verdict, 0)

    @property
    def findings(self) -> int:
        """How many got a verdict that is an error."""
        counts = [*self.verdicts.items(), *self.business_verdicts.items()]
        return sum(count for verdict, count in counts if severity_of(verdict) is Severity.ERROR)

    @property
    def balanced(self) -> bool:
        """Whether everything is accounted for: no error, nothing unexplained."""
        return self.findings == 0 and self.unexplained == 0

    @property
    def sentence(self) -> str:
        """The run in one sentence."""
        if self.balanced:
            return (
                f"Balanced: all of {self.messages:,} messages and {self.business_rows:,} business rows are explained."
            )
        parts = [
            f"{self.count(verdict):,} {verdict}"
            for verdict in Verdict
            if self.count(verdict) and severity_of(verdict) is Severity.ERROR
        ]
        return f"Not balanced: {', '.join(parts) or f'{self.unexplained:,} unexplained'}."

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field, and the named counts that people look for."""
        named = {verdict.value: self.count(verdict) for verdict in Verdict}
        return {**asdict(self), "balanced": self.balanced, "sentence": self.sentence, **named}
