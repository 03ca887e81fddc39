"""The command `outbox reconcile report`: creates the report of an earlier run again, without evaluation."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.cli.options import AsJson, Config, Output, given_output
from spark_reconcile.core.time_arguments import moment_ms
from spark_reconcile.results.summary import Summary

Run = Annotated[str | None, typer.Option("--run", help="A run's id, the name of its folder; default: the newest.")]
SinceHour = Annotated[
    str | None,
    typer.Option("--since", help="Instead of a run: all hours since then, as they were judged last."),
]
UntilHour = Annotated[str | None, typer.Option("--until", help="With --since: up to here; default: now.")]
To = Annotated[
    Path | None, typer.Option("--to", help="Write into this folder; default: the run's own, or OUTPUT/hours.")
]
Open = Annotated[bool, typer.Option("--open", help="Show the page in a browser.")]


def report(
    output: Output = None, config: Config = None, run: Run = None, since: SinceHour = None,
    until: UntilHour = None, to: To = None, show: Open = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Make the report of a run, or of a time range, again. From what was stored; nothing is judged.

    No source is read and Spark is not started. Exit status: 0 the report is made, whatever it says; 2 there is nothing
    to make it of.

    Examples:

      outbox reconcile report --output reconciliation

      outbox reconcile report --config reconcile.toml --since 30d --to november
    """
    from spark_reconcile.runs.stored_results import stored_run, write_anew

    folder = given_output(config, output)
    if since is None and until is not None:
        raise ConfigurationError("--until goes with --since: name since when, e.g. --since 30d")
    if since is not None and run is not None:
        raise ConfigurationError("--run and --since are two reports: name one of them")
    summary = stored_run(folder, run) if since is None else _hours(folder, since, until)
    page = write_anew(summary, to or (Path(summary.folder) if since is None else folder / "hours"))
    typer.echo(json.dumps(summary.as_dict()) if as_json else f"{summary.headline}\nreport: {page}")
    if show:
        typer.launch(page.resolve().as_uri())


def _hours(folder: Path, since: str, until: str | None) -> Summary:
    from spark_reconcile.runs.stored_results import stored_hours

    now_ms = time.time_ns() // 1_000_000
    until_ms = now_ms if until is None else moment_ms(until, now_ms=now_ms)
    summary = stored_hours(folder, since_ms=moment_ms(since, now_ms=now_ms), until_ms=until_ms)
    if summary.windows is not None and summary.windows.not_closed:
        note = f"{summary.windows.not_closed:,} hour(s) of this span were never judged: they are left out"
        typer.echo(note, err=True)
    return summary
