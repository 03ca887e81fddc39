"""Assigns each verdict to a window: the hour of its message or row, or a bucket of the report's time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spark_reconcile.core.plausible_times import EARLIEST_MS, LATEST_MS
from spark_reconcile.core.time_buckets import HOUR_MS, TimeAxis, hour, slot, window_of_message

NO_WINDOW: Final = -1
MESSAGE_AT_MS: Final = "if(created_ms > 0, created_ms, stored_ms)"
DELIVERY_AT_MS: Final = "if(ready_ms > 0, ready_ms, greatest(last_ms, effect_ms))"
BUSINESS_AT_MS: Final = "time_ms"
"""The displayed time of a verdict on a message, a delivery or a business row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlacement:
    """The window of each verdict, by scope: an SQL expression for its start in milliseconds.

    `chosen`: a condition on `window_ms`; verdicts of other windows are omitted, though their rows are evidence.
    """

    message: str
    delivery: str
    business: str
    chosen: str = "true"


def by_hour(windows: Sequence[int], *, slack_ms: int) -> WindowPlacement:
    """Assign verdicts to these hours (start times), each to the hour of its message or row."""

    def window(created: str, *, otherwise: str) -> str:
        return window_of_message(created, otherwise=otherwise, slack_ms=slack_ms, slot=slot())

    times = f"if(published_ms > 0, published_ms, if(stored_ms > 0, stored_ms, {DELIVERY_AT_MS}))"
    return WindowPlacement(
        message=window("if(outbox + archive + broker > 0, created_ms, 0L)", otherwise=MESSAGE_AT_MS),
        delivery=window("if(stored > 0, published_ms, 0L)", otherwise=times),
        business=hour(BUSINESS_AT_MS),
        chosen=among_windows("window_ms", windows),
    )


def by_bucket(axis: TimeAxis) -> WindowPlacement:
    """Assign all verdicts to the bucket of the axis nearest to their time; NO_WINDOW if the time is impossible."""

    def bucket(time: str) -> str:
        bucket_number = f"greatest(least(({time} - {axis.start_ms}L) div {axis.width_ms}L, {axis.buckets - 1}L), 0L)"
        true = f"{time} between {EARLIEST_MS}L and {LATEST_MS}L"
        return f"if({true}, {axis.start_ms}L + {bucket_number} * {axis.width_ms}L, {NO_WINDOW}L)"

    return WindowPlacement(
        message=bucket(MESSAGE_AT_MS), delivery=bucket(DELIVERY_AT_MS), business=bucket(BUSINESS_AT_MS)
    )


def among_windows(column: str, windows: Sequence[int]) -> str:
    """SQL condition: a time is the start of one of these windows; adjacent windows are compared as one range."""
    rows: list[list[int]] = []
    for start in windows:
        if rows and start == rows[-1][1] + HOUR_MS:
            rows[-1][1] = start
        else:
            rows.append([start, start])
    return f"({' or '.join(f'{column} between {low}L and {high}L' for low, high in rows)})"
