"""What happened when, as counts a bucket of time: the numbers that the report draws. Counted elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_reconcile.core.time_axis import Axis
from spark_reconcile.rules.verdict import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Counts a bucket: what the broker stored, what groups were handed first, what they acknowledged; and trouble."""

    axis: Axis
    events: Mapping[str, Mapping[int, int]]
    trouble: Mapping[State, Mapping[int, int]]
