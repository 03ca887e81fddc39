"""Reads the stored results of earlier runs as a summary, and renders its page again. Reads no source."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError
from spark_reconcile.core.errors import OutputFailed
from spark_reconcile.core.synced_files import write_whole
from spark_reconcile.core.time_buckets import HOUR_MS, TimeAxis
from spark_reconcile.report.page import page_of
from spark_reconcile.report.writer import NUMBERS, REPORT
from spark_reconcile.results.evidence_retention import judged_late
from spark_reconcile.results.latencies import kept_hour, latencies_of
from spark_reconcile.results.output_folder import MANIFEST, RUN_ID
from spark_reconcile.results.summary import Flow, Summary
from spark_reconcile.results.window_store import Window, WindowStore
from spark_reconcile.results.window_totals import counts_of, summary_of, trouble_of

NUMBERS_BYTES_MAX: Final = 64 * 1024 * 1024


def stored_run(output: Path, run_id: str | None = None) -> Summary:
    """Reads a run of an output folder, by default the newest. Raises ConfigurationError if there is none."""
    chosen = _newest(output) if run_id is None else run_id
    path = output / chosen / NUMBERS
    if not RUN_ID.fullmatch(chosen) or not path.is_file():
        raise ConfigurationError(_no_run(output, chosen))
    try:
        summary = msgspec.json.decode(_bytes(path), type=Summary)
    except (OSError, *DECODE_ERRORS) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}); run it again, or name another --run") from error
    return replace(summary, folder=str(output / chosen))


def stored_hours(output: Path, *, since_ms: int, until_ms: int) -> Summary:
    """Reads the hours of an output folder that overlap [since, until), as last evaluated.

    Hours do not store their inputs, and one whose file of latencies is lost has none. Raises ConfigurationError if no
    hour was evaluated.
    """
    store = WindowStore(output)
    windows = store.windows
    shown = {start: window for start, window in windows.items() if start + HOUR_MS > since_ms and start < until_ms}
    if not shown:
        raise ConfigurationError(
            f"no hour of this span was judged in {output}: name another span, or judge it first (outbox reconcile run "
            "--since)"
        )
    summary = summary_of(
        (window.result for _, window in sorted(shown.items())),
        run_id="",
        judged_at_ms=max(map(_evaluated_at, shown.values())),
    )
    before = [window.result for start, window in windows.items() if start < min(shown)]
    hours = range(since_ms // HOUR_MS, -(-until_ms // HOUR_MS))
    timed = [kept for start in sorted(shown) if (kept := kept_hour(store.folder(start))) is not None]
    counts = replace(
        counts_of(shown, before=before), not_closed=len(hours) - len(shown), untimed=len(shown) - len(timed)
    )
    return replace(
        summary, windows=counts, latencies=latencies_of(timed), unjudged=judged_late(shown), flow=_trouble(shown)
    )


def write_anew(summary: Summary, folder: Path) -> Path:
    """Write the page and the numbers to a folder, each atomically; returns the page's path. Raises OutputFailed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / NUMBERS, json.dumps(summary.as_dict(), indent=2).encode(), is_last=True)
        write_whole(folder / REPORT, page_of(summary).encode(), is_last=True)
    except OSError as error:
        raise OutputFailed(f"cannot write to {folder}: {error.strerror}; name another folder with --to") from error
    return folder / REPORT


def _trouble(shown: Mapping[int, Window]) -> Flow:
    """Returns the time series; hours store only verdicts that need attention."""
    axis = TimeAxis.over(min(shown), max(shown) + HOUR_MS - 1)
    return Flow(
        axis=axis, events={}, trouble=trouble_of({start: window.result for start, window in shown.items()}, axis)
    )


def _evaluated_at(window: Window) -> int:
    return window.judged_at_ms


def _newest(output: Path) -> str:
    try:
        manifest = json.loads(_bytes(output / MANIFEST))
        return str(manifest["newest"])
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{output} is no folder of results: it has no {MANIFEST}; name the [output] folder of a run that came to "
            "its end"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{output / MANIFEST} cannot be read ({error}); name a run with --run") from error


def _bytes(path: Path) -> bytes:
    size = path.stat().st_size
    if size > NUMBERS_BYTES_MAX:
        raise ConfigurationError(f"{path} has {size:,} bytes, more than {NUMBERS_BYTES_MAX:,}: no run wrote it")
    return path.read_bytes()


def _no_run(output: Path, run_id: str) -> str:
    runs = sorted(path.parent.name for path in output.glob(f"*/{NUMBERS}") if RUN_ID.fullmatch(path.parent.name))
    near = difflib.get_close_matches(run_id, runs, n=1, cutoff=0.3) or runs[-1:]
    hint = f"did you mean {near[0]}?" if near else "it holds none yet"
    return f"there is no run {run_id!r} in {output}; {hint}"
