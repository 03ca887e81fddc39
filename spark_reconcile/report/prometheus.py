"""Writes the last run as Prometheus text, for the textfile collector or a Pushgateway. Labels are bounded."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.errors import OutputFailed
from spark_reconcile.core.synced_files import write_whole
from spark_reconcile.results.summary import Summary
from spark_reconcile.rules.verdict_rule import Severity, State

FILE: Final = "recon.prom"
_PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of a disk that is full or fails: a schedule goes on after them."""


def write_metrics(path: Path, summary: Summary) -> None:
    """Replace the file atomically: no scrape sees half of it. Raises ConfigurationError if it cannot be written;
    OutputFailed where that may pass.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, metrics_text(summary).encode(), is_last=True)
    except OSError as error:
        if error.errno in _PASSING:
            raise OutputFailed(
                f"cannot write metrics to {path}: {error.strerror}; free space or repair the disk, and run again"
            ) from error
        raise ConfigurationError(f"cannot write metrics to {path}: {error.strerror}; name another file") from error


def metrics_text(summary: Summary) -> str:
    """Returns all series of a run, in the text format 0.0.4; every state has a series, 0 without rows."""
    return "".join(f"{line}\n" for line in _lines(summary))


def _lines(summary: Summary) -> Iterator[str]:
    yield from _gauge(
        "recon_last_success_timestamp_seconds", "When a run last reached its end.", {"": summary.judged_at_ms / 1000}
    )
    end_ms = summary.windows.until_ms if summary.windows else summary.judged_at_ms
    yield from _gauge("recon_window_end_timestamp_seconds", "The end of the evaluated time.", {"": end_ms / 1000})
    inputs: dict[str, float] = {}
    for extent in summary.inputs:
        labels = f'{{source="{_escaped(f"{extent.source} {extent.what}")}"}}'
        inputs[labels] = max(extent.last_ms / 1000, inputs.get(labels, 0))
    yield from _gauge("recon_source_watermark_timestamp_seconds", "The newest record that each source had.", inputs)
    yield from _gauge(
        "recon_messages",
        "Verdicts on messages, deliveries and business rows, by state.",
        {f'{{state="{state}"}}': summary.count(state) for state in State},
    )
    yield from _gauge("recon_findings", "Verdicts that require attention or action.", _findings(summary))
    yield from _gauge("recon_unexplained_messages", "Verdicts that no rule gave.", {"": summary.unexplained})
    yield from _gauge(
        "recon_earlier_findings", "Findings of hours before the span, as last judged.", {"": summary.earlier_findings}
    )
    yield from _gauge(
        "recon_balanced",
        "1 where the run has no finding and hours before its span have none, so that its exit status was 0; else 0.",
        {"": int(summary.balanced)},
    )
    yield from _gauge(
        "recon_expired_hours",
        "Hours that a source was purged of before they were judged (never), or while something in them moved (open).",
        {
            f'{{source="{_escaped(f"{gap.source} {gap.what}")}",judged="{judged}"}}': count
            for gap in summary.unjudged
            for judged, count in (("never", gap.hours), ("open", gap.open_hours))
        },
    )
    yield from _gauge("recon_recheck_resolved_messages", "Suspects that the recheck cleared.", {"": summary.resolved})
    took = sum(summary.took_seconds.values())
    yield from _gauge("recon_run_duration_seconds", "How long the run took.", {"": round(took, 3)})


def _findings(summary: Summary) -> dict[str, int]:
    counts = {
        (state, severity): 0 for state in State for severity in (Severity.ATTENTION, Severity.FINDING)
        if any(counted.state is state and counted.severity is severity for counted in summary.verdict_counts)
    }  # fmt: skip
    counts.setdefault((State.LOST, Severity.FINDING), 0)
    for counted in summary.verdict_counts:
        if (counted.state, counted.severity) in counts and not counted.echo:
            counts[counted.state, counted.severity] += counted.count
    return {f'{{state="{state}",severity="{severity}"}}': count for (state, severity), count in sorted(counts.items())}


def _gauge(name: str, help_text: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} gauge"
    for labels, value in values.items():
        yield f"{name}{labels} {value:.15g}"


def _escaped(text: str) -> str:
    """Escapes a label's value: users choose the names of rules."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
