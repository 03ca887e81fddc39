"""Rotates the order of contestants from round to round, and computes medians, spreads and ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def rotated(things: Sequence[T], number: int) -> list[T]:
    """Returns the order of round `number`: each is first once, so that none always runs after the same one."""
    start = number % len(things) if things else 0
    return [*things[start:], *things[:start]]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, minimum and maximum of the rounds."""
    return {"median": _rounded(statistics.median(values)), "min": _rounded(min(values)), "max": _rounded(max(values))}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median of the rounds' ratios of ours to theirs, since the noise of a round affects both."""
    return round(statistics.median(one / other for one, other in zip(ours, theirs, strict=True)), 3)


def percentiles(values: Sequence[float], *, unit: str = "ms") -> dict[str, float]:
    """Returns p50, p90, p99 and the maximum of a sample."""
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(len(ordered) * part))] for name, part in _PARTS.items()}
    return {f"{name}_{unit}": round(value, 3) for name, value in {**at, "max": ordered[-1]}.items()}


def ratios(found: Mapping[str, Sequence[float]], *, to: str) -> dict[str, float]:
    """Returns every contestant's ratio to one of them."""
    return {name: ratio(values, found[to]) for name, values in found.items() if name != to}


_PARTS = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


def _rounded(value: float) -> float:
    return round(value, 3) if abs(value) < 100 else round(value)
