"""Time series of the report's charts: counts by time bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_reconcile.core.chart_time_axis import TimeAxis
from spark_reconcile.rules.verdict_rule import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Counts by time bucket: messages stored, first deliveries, acknowledgements, and verdicts that need attention."""

    axis: TimeAxis
    events: Mapping[str, Mapping[int, int]]
    trouble: Mapping[State, Mapping[int, int]]
