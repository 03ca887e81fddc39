"""What the steps of one run share: its settings, its evidence, its clock, and how it reports and waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_reconcile.classify.classification import Judged, bounds_of, judge
from spark_reconcile.classify.window_placement import WindowPlacement
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.time_range import Span
from spark_reconcile.load.evidence import Evidence
from spark_reconcile.load.source_check import SourcePlan
from spark_reconcile.recheck.suspect_records import Suspects, look_again

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Pause = Callable[[float], None]
LookAgain = Callable[["SparkSession", Settings, SourcePlan, Evidence, Suspects], Evidence]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What does not change during a run."""

    session: SparkSession
    settings: Settings
    plan: SourcePlan
    evidence: Evidence
    now_ms: int
    full: bool
    say: Callable[[str], None]
    pause: Pause
    again: LookAgain = look_again
    span: Span | None = None
    """The times of which all sources are read; None: not known yet."""
    late: Mapping[int, list[str]] = field(default_factory=dict)
    """Of windows the sources that were purged of them before they were judged for the first time."""

    @property
    def covered(self) -> list[str]:
        """The topics that a rule asks about."""
        return sorted({rule.topic for rule in self.settings.rules})

    @property
    def slack_ms(self) -> int:
        """How far ids and rows may be apart."""
        return int(self.settings.grace.slack_seconds * 1000)

    def judge(self, evidence: Evidence, placement: WindowPlacement) -> Judged:
        """Verdicts on this evidence, by the bounds of the run."""
        bounds = bounds_of(self.settings.grace, evidence, now_ms=self.now_ms)
        return judge(evidence, bounds, placement=placement, span=self.span)
