"""`outbox reconcile run`: settings in, verdicts out. PySpark is imported only when a run begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from messaging.errors import DatabaseUnavailable, SchemaMissing, StorageFailed
from spark_reconcile.config import read_settings
from spark_reconcile.summary import Summary
from spark_reconcile.verdict import Verdict

app = typer.Typer(help="Prove from the records that nothing was lost, invented or early.", no_args_is_help=True)
talk = Console(stderr=True)

EXIT_FINDINGS: Final = 1
EXIT_NOT_COMPARABLE: Final = 3


@app.callback()
def reconcile() -> None:
    """Prove from the records that nothing was lost, invented or early."""


@app.command()
def run(
    config: Annotated[Path, typer.Option("--config", help="TOML file that names sources and rules.")] = Path(
        "reconcile.toml"
    ),
    master: Annotated[str | None, typer.Option("--master", help="Spark master; local[*] by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Reconcile once. Exit status 0 balanced, 1 findings, 2 usage, 3 a source that cannot be judged.

    Example: outbox reconcile run --config reconcile.toml
    """
    settings = read_settings(config)
    if master is not None:
        settings = msgspec.structs.replace(settings, master=master)
    from spark_reconcile.job import run as run_job

    try:
        with talk.status("reconciling") as status:
            summary = run_job(settings, say=status.update)
    except (DatabaseUnavailable, SchemaMissing, StorageFailed) as error:
        talk.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_NOT_COMPARABLE) from error
    if as_json:
        typer.echo(json.dumps(summary.as_dict()))
    else:
        _print(summary)
    raise typer.Exit(0 if summary.balanced else EXIT_FINDINGS)


def _print(summary: Summary) -> None:
    typer.echo(summary.sentence)
    shown = {
        "business rows": summary.business_rows,
        "messages": summary.messages,
        "delivered": summary.delivered,
        "deduplicated": summary.deduplicated,
        **{verdict.value: summary.count(verdict) for verdict in Verdict},
    }
    typer.echo(", ".join(f"{name} {value:,}" for name, value in shown.items()))
    typer.echo(f"report: {Path(summary.folder) / 'report.html'}")
