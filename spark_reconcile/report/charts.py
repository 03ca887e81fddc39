"""The charts of the report as inline SVG, from numbers and constant texts only; the page's classes give colours."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup, escape

from spark_reconcile.core.time_buckets import TimeAxis
from spark_reconcile.results.summary import Flow, InputExtent, Latency, Summary, VerdictCount
from spark_reconcile.rules.verdict_rule import Severity, State

_WIDTH: Final = 720
_LEFT: Final = 52
_PLOT: Final = _WIDTH - _LEFT - 8
_HEIGHT: Final = 190
_REACH: Final = 40
"""Height of a source's row: its name, and the bar under it."""
_HAIR: Final = 3.0
"""Minimum width of a part: one in a million is still visible."""
_SEVERITIES: Final = (Severity.OK, Severity.INFO, Severity.WAIT, Severity.ATTENTION, Severity.FINDING)


def verdict_bar(verdict_counts: Sequence[VerdictCount]) -> Markup:
    """Draws the verdict counts of a line as one stacked bar."""
    counts: dict[Severity, int] = {}
    for counted in verdict_counts:
        counts[counted.severity] = counts.get(counted.severity, 0) + counted.count
    total = sum(counts.values()) or 1
    shown = [(severity, counts[severity]) for severity in _SEVERITIES if counts.get(severity)]
    widths = [max(_HAIR, 200 * count / total) for _, count in shown]
    scale, left, parts = 200 / (sum(widths) or 1), 0.0, []
    for (severity, count), width in zip(shown, widths, strict=True):
        parts.append(
            f'<rect class="s-{severity}" x="{left:.2f}" y="0" width="{width * scale:.2f}" height="10">'
            f"<title>{severity}: {count:,}</title></rect>"
        )
        left += width * scale
    return _svg("bar", 200, 10, parts, label=", ".join(f"{severity} {count:,}" for severity, count in shown))


def flow_chart(flow: Flow) -> Markup:
    """Draws counts by time bucket. Bars: stored by the broker. Lines: delivered first, and acknowledged."""
    axis, events = flow.axis, flow.events
    most = max((count for counts in events.values() for count in counts.values()), default=0)
    if not most:
        return Markup("")
    top = _round_up(most)
    cell = _PLOT / axis.buckets
    parts = _grid(top)
    for bucket, count in sorted(events["stored"].items()):
        height = _HEIGHT * count / top
        parts.append(
            f'<rect class="stored" x="{_LEFT + bucket * cell + cell * 0.1:.1f}" y="{_HEIGHT - height + 6:.1f}" '
            f'width="{cell * 0.8:.1f}" height="{height:.1f}">'
            f"<title>{_clock(axis, bucket)}: {count:,} stored</title></rect>"
        )
    for name, style in (("delivered", "delivered"), ("acknowledged", "acked")):
        parts.append(f'<path class="{style}" d="{_steps(events[name], axis.buckets, cell, top)}"/>')
    parts += _times(axis, _HEIGHT + 22)
    return _svg("flow", _WIDTH, _HEIGHT + 28, parts, label="messages stored, delivered and acknowledged over time")


def heat_map(flow: Flow) -> Markup:
    """Draws a row for each verdict and a cell for each time bucket, darker for higher counts."""
    states = [state for state in State if flow.trouble.get(state)]
    if not states:
        return Markup("")
    cell, parts = (_WIDTH - 90) / flow.axis.buckets, []
    for row, state in enumerate(states):
        cells = flow.trouble[state]
        most = max(cells.values())
        parts.append(f'<text x="0" y="{row * 24 + 15}">{state}</text>')
        parts.append(f'<rect class="bed" x="86" y="{row * 24}" width="{_WIDTH - 88}" height="20" rx="3"/>')
        for bucket, count in sorted(cells.items()):
            strength = 0.35 + 0.65 * math.log1p(count) / math.log1p(most)
            parts.append(
                f'<rect class="t-{state}" opacity="{strength:.2f}" x="{87 + bucket * cell:.1f}" y="{row * 24 + 1}" '
                f'width="{max(cell - 1, _HAIR):.1f}" height="18" rx="2">'
                f"<title>{_clock(flow.axis, bucket)}: {count:,} {state}</title></rect>"
            )
    height = len(states) * 24
    parts += _times(flow.axis, height + 14, left=86)
    return _svg("heat", _WIDTH, height + 20, parts, label="verdicts that ask for a look, over time")


def latency_bar(latency: Latency, *, longest_ms: int) -> Markup:
    """Draws median to 99 % as a bar, the longest as a dot, on a logarithmic scale from 1 ms."""
    full = math.log10(max(longest_ms, 10))

    def x_of(value_ms: int) -> float:
        return 4 + 190 * max(0.0, math.log10(max(value_ms, 1))) / full

    left, middle, right, dot = (
        x_of(value) for value in (latency.p50_ms, latency.p95_ms, latency.p99_ms, latency.longest_ms)
    )
    parts = [
        '<line class="axis" x1="4" y1="8" x2="196" y2="8"/>',
        f'<rect class="reach" x="{left:.1f}" y="4" width="{max(right - left, 2):.1f}" height="8" rx="2"/>',
        f'<rect class="median" x="{left - 1:.1f}" y="2" width="3" height="12" rx="1"/>',
        f'<rect class="most" x="{middle - 0.75:.1f}" y="4" width="1.5" height="8"/>',
        f'<circle class="dot" cx="{dot:.1f}" cy="8" r="3"/>',
    ]
    return _svg("latency", 200, 16, parts, label=f"median {latency.p50_ms} ms, longest {latency.longest_ms} ms")


def reach_chart(summary: Summary) -> Markup:
    """Draws a bar for each source: from when to when it is complete; the evaluated hours are in the background."""
    first_ms, last_ms = _stretch(summary)
    shown = [extent for extent in summary.inputs if extent.complete_since_ms is not None]
    if not shown or last_ms <= first_ms:
        return Markup("")

    def x_of(time_ms: int) -> float:
        return 1 + (_WIDTH - 2) * (min(max(time_ms, first_ms), last_ms) - first_ms) / (last_ms - first_ms)

    height, parts = len(shown) * _REACH, []
    if summary.windows:
        left, right = x_of(summary.windows.since_ms), x_of(summary.windows.until_ms)
        parts.append(f'<rect class="judged" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{height}"/>')
    for row, extent in enumerate(shown):
        left, right = x_of(extent.complete_since_ms or 0), x_of(extent.complete_until_ms or last_ms)
        parts.append(f'<text x="2" y="{row * _REACH + 18}">{escape(extent.source)}: {escape(extent.what)}</text>')
        parts.append(
            f'<rect class="held" x="{left:.1f}" y="{row * _REACH + 24}" width="{max(right - left, _HAIR):.1f}" '
            f'height="10" rx="2"><title>{_reach(extent, summary.judged_at_ms)}</title></rect>'
        )
    parts.append(f'<text x="0" y="{height + 18}">{moment(first_ms)}</text>')
    parts.append(f'<text x="{_WIDTH - 2}" y="{height + 18}" text-anchor="end">{moment(last_ms)}</text>')
    return _svg("reach", _WIDTH, height + 24, parts, label="from when to when each source is complete")


def _stretch(summary: Summary) -> tuple[int, int]:
    """The time range from the evaluated hours, or the oldest record, to the time of the run."""
    windows = summary.windows
    oldest = [extent.first_ms for extent in summary.inputs if extent.first_ms]
    oldest += [windows.since_ms] if windows else []
    oldest += [extent.complete_since_ms for extent in summary.inputs if windows and extent.complete_since_ms]
    first_ms = min(oldest, default=summary.judged_at_ms)
    if windows:
        # A source with records of years would leave no room for the evaluated hours.
        first_ms = max(first_ms, windows.since_ms - 2 * (summary.judged_at_ms - windows.since_ms))
    return first_ms, summary.judged_at_ms


def _reach(extent: InputExtent, judged_at_ms: int) -> str:
    since = moment(extent.complete_since_ms) if extent.complete_since_ms else "its beginning"
    return f"complete since {since}, until {moment(extent.complete_until_ms or judged_at_ms)}"


def moment(time_ms: int | None, *, seconds: bool = True) -> str:
    """Formats a time, UTC."""
    if not time_ms:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M", time.gmtime(time_ms / 1000))


def duration(span_ms: int) -> str:
    """Formats a duration in readable units."""
    for limit, unit_ms, name in ((1_000, 1, "ms"), (60_000, 1_000, "s"), (3_600_000, 60_000, "min")):
        if span_ms < limit:
            return f"{span_ms / unit_ms:,.0f} {name}" if unit_ms == 1 else f"{span_ms / unit_ms:,.1f} {name}"
    return f"{span_ms / 3_600_000:,.1f} h" if span_ms < 172_800_000 else f"{span_ms / 86_400_000:,.1f} days"


def _svg(style: str, width: int, height: int, parts: Sequence[str], *, label: str) -> Markup:
    head = f'<svg class="{style}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(f"{head}{''.join(parts)}</svg>")  # noqa: S704 - numbers and constant texts only


def _grid(top: int) -> list[str]:
    parts = []
    for share in (0, 0.5, 1):
        y = _HEIGHT * (1 - share) + 6
        parts.append(f'<line class="axis" x1="{_LEFT}" y1="{y:.0f}" x2="{_WIDTH - 8}" y2="{y:.0f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{_short(top * share)}</text>')
    return parts


def _times(axis: TimeAxis, y: int, *, left: int = _LEFT) -> list[str]:
    """Labels of the axis: its ends, and the width of a bucket."""
    last_ms = axis.start_ms + axis.buckets * axis.width_ms
    return [
        f'<text x="{left}" y="{y}">{moment(axis.start_ms)}</text>',
        f'<text x="{(left + _WIDTH) // 2}" y="{y}" text-anchor="middle">{duration(axis.width_ms)} each</text>',
        f'<text x="{_WIDTH - 2}" y="{y}" text-anchor="end">{moment(last_ms)}</text>',
    ]


def _steps(counts: Mapping[int, int], buckets: int, cell: float, top: int) -> str:
    """The path of a step line through all buckets."""
    points = []
    for bucket in range(buckets):
        y = _HEIGHT - _HEIGHT * counts.get(bucket, 0) / top + 6
        points.append(f"{_LEFT + bucket * cell:.1f} {y:.1f}L{_LEFT + (bucket + 1) * cell:.1f} {y:.1f}")
    return "M" + "L".join(points)


def _clock(axis: TimeAxis, bucket: int) -> str:
    return moment(axis.start_ms + bucket * axis.width_ms)


def _short(number: float) -> str:
    """Formats a number in few characters, for narrow screens."""
    for limit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if number >= limit:
            return f"{number / (1_000 if name == 'k' else limit):,.10g}{name}"
    return f"{number:,.10g}"


def _round_up(number: int) -> int:
    """Rounds up to 1, 2 or 5 times a power of ten, and to an even number."""
    power = int(10 ** max(0, len(str(number)) - 1))
    steps = [step * power for step in (1, 2, 4, 5, 6, 8, 10)]
    return max(2, min(step for step in steps if step >= number))
