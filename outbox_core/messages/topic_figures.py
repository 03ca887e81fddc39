"""Aggregates a topic's statistics from those of its groups. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_SUMMED: Final = ("backlog", "in_flight", "dead")


def topic_figures(*, stored: int, scheduled: int, groups: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns stored and scheduled as given; backlog, in_flight and dead as sums over all groups, so that a message
    counts once for each group that it waits for; the maximum of oldest_unacked_age_ms (0 without groups).
    """
    group_figures = list(groups)
    return {
        "stored": stored,
        "scheduled": scheduled,
        **{name: sum(figures[name] for figures in group_figures) for name in _SUMMED},
        "oldest_unacked_age_ms": max((figures["oldest_unacked_age_ms"] for figures in group_figures), default=0),
    }
