"""The report: one HTML file without JavaScript, for phones, printers and auditors.

Numbers in, markup out; no bodies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from spark_reconcile.config import Settings
from spark_reconcile.summary import Summary
from spark_reconcile.verdict import BUSINESS_REPAIRS, RULES, Verdict, severity_of

_WIDTH: Final = 720
_HEIGHT: Final = 180
_SHADES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is drawn: counts by bucket of time, trouble by verdict and bucket, examples."""

    from_ms: int
    bucket_ms: int
    stored: Mapping[int, int]
    delivered: Mapping[int, int]
    trouble: Sequence[Mapping[str, Any]]
    examples: Sequence[Mapping[str, Any]]
    business_examples: Sequence[Mapping[str, Any]]


def write_report(path: Path, *, summary: Summary, settings: Settings, figures: Figures) -> None:
    """Write the page."""
    source = files("spark_reconcile").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        loader=DictLoader({"report": source}), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["moment"] = _moment
    environment.filters["milliseconds"] = _milliseconds
    page = environment.get_template("report").render(
        summary=summary,
        settings=settings,
        figures=figures,
        books=_books(summary),
        rules=RULES,
        severity={verdict.value: severity_of(verdict).value for verdict in Verdict},
        repairs={rule.evidence: rule.repair for rule in RULES},
        business_repairs=BUSINESS_REPAIRS,
        flow=_flow_chart(figures),
        heat=_heat_map(figures),
    )
    path.write_text(page, encoding="utf-8")


def _books(summary: Summary) -> list[dict[str, Any]]:
    """A line a topic and group: its counts by verdict, their sum, and the widths of its bar."""
    lines: dict[tuple[str, str], dict[str, int]] = {}
    for book in summary.books:
        lines.setdefault((book["topic"], book["group"]), {})[book["verdict"]] = book["count"]
    return [
        {
            "topic": topic,
            "group": group,
            "counts": counts,
            "total": sum(counts.values()),
            "bar": _bar(counts),
        }
        for (topic, group), counts in lines.items()
    ]


def _bar(counts: Mapping[str, int]) -> Markup:
    total, left, parts = sum(counts.values()), 0.0, []
    for verdict in Verdict:
        count = counts.get(verdict, 0)
        if not count:
            continue
        # One in a million is still to be seen: no part is thinner than a hair.
        width = max(1.5, 300 * count / total)
        parts.append(
            f'<rect class="{severity_of(verdict)} v-{verdict}" x="{left:.1f}" y="0" width="{width:.1f}" height="14">'
            f"<title>{verdict}: {count:,}</title></rect>"
        )
        left += width
    return Markup(f'<svg viewBox="0 0 {max(left, 300):.0f} 14" role="img">{"".join(parts)}</svg>')  # noqa: S704 - numbers and our own words only


def _flow_chart(figures: Figures) -> Markup:
    """Messages stored, and first hand-outs, summed up over the time of the run."""
    buckets = sorted({*figures.stored, *figures.delivered})
    if not buckets:
        return Markup("")
    last = max(buckets[-1], 1)
    top = max(sum(figures.stored.values()), sum(figures.delivered.values()), 1)
    lines = [
        f'<polyline class="{name}" points="{_points(counts, last=last, top=top)}"/>'
        for name, counts in (("stored", figures.stored), ("handed", figures.delivered))
    ]
    seconds = last * figures.bucket_ms / 1000
    labels = (
        f'<text x="4" y="12">{top:,}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 14}" text-anchor="end">{_span(seconds)}</text>'
        f'<text x="0" y="{_HEIGHT + 14}">{_moment(figures.from_ms)}</text>'
    )
    return Markup(  # noqa: S704 - numbers only
        f'<svg class="flow" viewBox="0 0 {_WIDTH} {_HEIGHT + 18}" role="img">'
        f'<line class="axis" x1="0" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}"/>{"".join(lines)}{labels}</svg>'
    )


def _points(counts: Mapping[int, int], *, last: int, top: int) -> str:
    """A running sum as steps."""
    total, points = 0, [f"0,{_HEIGHT}"]
    for bucket in range(last + 1):
        x = _WIDTH * bucket / (last + 1)
        points.append(f"{x:.1f},{_HEIGHT - _HEIGHT * total / top:.1f}")
        total += counts.get(bucket, 0)
        points.append(f"{x:.1f},{_HEIGHT - _HEIGHT * total / top:.1f}")
    points.append(f"{_WIDTH},{_HEIGHT - _HEIGHT * total / top:.1f}")
    return " ".join(points)


def _heat_map(figures: Figures) -> Markup:
    """Where trouble lies in time: a row a verdict, a cell a bucket, darker for more."""
    verdicts = sorted({str(one["verdict"]) for one in figures.trouble})
    if not verdicts:
        return Markup("")
    most = max(int(one["count"]) for one in figures.trouble)
    cell, cells = _WIDTH / 62, []
    for one in figures.trouble:
        row = verdicts.index(str(one["verdict"]))
        shade = 1 + (_SHADES - 1) * int(one["count"]) // most
        x = 90 + int(one["bucket"] or 0) * (cell - 1.5)
        cells.append(
            f'<rect class="heat{shade} {severity_of(str(one["verdict"]))}" x="{x:.1f}" y="{row * 18}" '
            f'width="{cell - 2:.1f}" height="15"><title>{one["count"]:,}</title></rect>'
        )
    names = [f'<text x="0" y="{row * 18 + 12}">{name}</text>' for row, name in enumerate(verdicts)]
    return Markup(  # noqa: S704 - numbers and our own words only
        f'<svg class="heat" viewBox="0 0 {_WIDTH} {len(verdicts) * 18}" role="img">{"".join(names + cells)}</svg>'
    )


def _moment(ms: int | None) -> str:
    return "-" if not ms else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ms / 1000))


def _milliseconds(ms: int) -> str:
    return f"{ms:,} ms" if ms < 10_000 else f"{ms / 1000:,.1f} s"


def _span(seconds: float) -> str:
    return f"+{seconds:,.0f} s" if seconds < 7200 else f"+{seconds / 3600:,.1f} h"
