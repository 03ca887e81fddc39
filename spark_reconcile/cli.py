"""`outbox reconcile run|explain`: settings in, verdicts out. PySpark is imported only when a run begins."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from messaging.errors import ConfigurationError, DatabaseUnavailable
from spark_reconcile.config_file import read_config, settings_of
from spark_reconcile.errors import NotComparable
from spark_reconcile.settings import Settings
from spark_reconcile.summary import Summary
from spark_reconcile.verdict import State

app = typer.Typer(help="Prove from the records that nothing was lost, invented or early.", no_args_is_help=True)

EXIT_FINDINGS: Final = 1
EXIT_NOT_COMPARABLE: Final = 3
EXIT_INTERRUPTED: Final = 130


@app.callback()
def reconcile() -> None:
    """Prove from the records that nothing was lost, invented or early."""


@app.command()
def run(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file that names sources and rules.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", envvar="OUTBOX_DATABASE__URL", help="Database of the outbox.")
    ] = None,
    schema: Annotated[str | None, typer.Option("--schema", help="Schema of the outbox tables (MySQL).")] = None,
    broker_data: Annotated[
        Path | None, typer.Option("--broker-data", help="The broker's data folder, read in place.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for tables and reports.")] = None,
    grace_seconds: Annotated[float | None, typer.Option("--grace-seconds", help="What is newer is pending.")] = None,
    master: Annotated[
        str | None, typer.Option("--master", help="Spark master, or sc://host for Spark Connect; default local[*].")
    ] = None,
    now_ms: Annotated[
        int | None, typer.Option("--now-ms", help="Judge as of this moment (epoch milliseconds); default: now.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Reconcile once: every message, every delivery and every business row gets one verdict.

    Exit status: 0 balanced, 1 findings, 2 usage, 3 a source is missing, damaged or down, so nothing was judged.

    Example: outbox reconcile run --config reconcile.toml
    """
    flags: dict[str, dict[str, Any]] = {
        "database": {"url": url, "schema": schema},
        "broker": {"data": str(broker_data.resolve()) if broker_data else None},
        "output": {"folder": str(output.resolve()) if output else None},
        "grace": {"seconds": grace_seconds},
    }
    settings = _settings(config, flags)
    try:
        summary = _run(settings, master=master, now_ms=now_ms)
    except (NotComparable, DatabaseUnavailable) as error:
        _talk().print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_NOT_COMPARABLE) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
    if as_json:
        typer.echo(json.dumps(summary.as_dict()))
    else:
        _print(summary)
    raise typer.Exit(0 if summary.balanced else EXIT_FINDINGS)


@app.command()
def explain(
    name: Annotated[str | None, typer.Argument(help="A verdict or a rule, e.g. lost; all of them by default.")] = None,
) -> None:
    """Say what a verdict means, where it comes from, and what to do."""
    from spark_reconcile.judging import RULES

    found = [(scope, rule) for scope, rules in RULES.items() for rule in rules if name in {None, rule.state, rule.name}]
    if not found:
        raise ConfigurationError(f"there is no verdict or rule {name!r}; verdicts: {', '.join(State)}")
    for scope, rule in found:
        typer.echo(f"{rule.state} ({scope}: {rule.name}, {rule.severity}): {rule.meaning}")
        for label, text in (("cause", rule.cause), ("do", rule.cure)):
            if text:
                typer.echo(f"    {label}: {text}")


def _settings(config: Path | None, flags: dict[str, dict[str, Any]]) -> Settings:
    """The file, with what is given as a flag put over it."""
    tables: dict[str, Any] = {} if config is None else read_config(config)
    for name, values in flags.items():
        given = {key: value for key, value in values.items() if value is not None}
        if given:
            tables[name] = {**tables.get(name, {}), **given}
    if "database" not in tables or "broker" not in tables:
        raise ConfigurationError("name a file with --config, or at least --url and --broker-data")
    return settings_of(tables, folder=None if config is None else config.resolve().parent)


def _run(settings: Settings, *, master: str | None, now_ms: int | None) -> Summary:
    from spark_reconcile.reconciliation import run as reconcile_once

    started = time.monotonic()
    talk = _talk()
    with talk.status("checking the sources") as status:

        def say(step: str) -> None:
            status.update(f"{step} ({time.monotonic() - started:.0f} s)")

        return reconcile_once(settings, master=master, now_ms=now_ms, say=say)


def _talk() -> Console:
    """Standard error on a descriptor of its own: the first is lent to Spark while it starts."""
    return Console(file=os.fdopen(os.dup(sys.stderr.fileno()), "w"), highlight=False)


def _print(summary: Summary) -> None:
    typer.echo(summary.sentence)
    table = Table(box=None, pad_edge=False, show_header=False)
    figures = {
        "business rows": summary.business_rows,
        "messages": summary.messages,
        "stored": summary.stored,
        "deliveries": summary.message_groups,
        "handed out": summary.delivered,
        "handed out again": summary.redelivered,
        "deduplicated": summary.deduplicated,
        **{state.value: summary.count(state) for state in State if state is not State.SETTLED},
    }
    for name, value in figures.items():
        table.add_row(name, f"{value:>12,}")
    Console().print(table)
    typer.echo(f"report: {Path(summary.folder) / 'report.html'}")
