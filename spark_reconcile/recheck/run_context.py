"""Shared context of the steps of one run: settings, evidence, clock, progress reports and pauses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_reconcile.classify.classification import ClassifiedEvidence, bounds_of, classify
from spark_reconcile.classify.key_spelling_differences import Pair, equal_keys
from spark_reconcile.classify.window_placement import WindowPlacement
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.time_buckets import Span
from spark_reconcile.load.read_plan import SourcePlan
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.load.spark_session import few_rows
from spark_reconcile.recheck.suspect_rereading import Suspects, reread_suspects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Pause = Callable[[float], None]
RereadSuspects = Callable[["SparkSession", Settings, SourcePlan, Evidence, Suspects], Evidence]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Values that do not change during a run."""

    session: SparkSession
    settings: Settings
    plan: SourcePlan
    evidence: Evidence
    now_ms: int
    full: bool
    say: Callable[[str], None]
    pause: Pause
    again: RereadSuspects = reread_suspects
    span: Span | None = None
    """The time range of which all sources are read; None: not known yet."""
    late: Mapping[int, list[str]] = field(default_factory=dict)
    """By window, the sources whose evidence was purged before the window's first evaluation."""

    @property
    def covered(self) -> list[str]:
        """The topics that rules cover."""
        return sorted({rule.topic for rule in self.settings.rules})

    @property
    def slack_ms(self) -> int:
        """Permitted distance of the times of ids and rows."""
        return int(self.settings.grace.slack_seconds * 1000)

    def equal_keys(self, topic: str, of_rows: Sequence[str], of_messages: Sequence[str]) -> Mapping[Pair, str]:
        """Ask the databases of a topic's rules which of these keys they call equal, and by which collation."""
        return equal_keys(self.settings, topic, of_rows=of_rows, of_messages=of_messages)

    def few_rows(self) -> AbstractContextManager[None]:
        """Configure Spark for queries on few rows, within this context; where all rows of the run are few, it is
        configured for these.
        """
        return nullcontext() if self.evidence.is_few else few_rows(self.session)

    def classify(self, evidence: Evidence, placement: WindowPlacement) -> ClassifiedEvidence:
        """Classify this evidence, by the bounds of the run."""
        bounds = bounds_of(self.settings.grace, evidence, now_ms=self.now_ms)
        return classify(evidence, bounds, placement=placement, span=self.span)
