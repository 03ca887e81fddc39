"""`outbox reconcile run|watch|explain`: settings in, verdicts out. PySpark is imported only when a run begins."""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from messaging.clock import SystemClock
from messaging.errors import ConfigurationError, DatabaseUnavailable
from spark_reconcile.config_file import read_config, settings_of
from spark_reconcile.errors import NotComparable
from spark_reconcile.exposition import FILE as METRICS_FILE
from spark_reconcile.exposition import write_metrics
from spark_reconcile.interrupting import Stop, interruptible
from spark_reconcile.moments import length_ms, moment_ms
from spark_reconcile.repair_cli import repair as repair_windows
from spark_reconcile.settings import Settings
from spark_reconcile.summary import Summary
from spark_reconcile.verdict import State
from spark_reconcile.watching import Schedule, Watch

app = typer.Typer(help="Prove from the records that nothing was lost, invented or early.", no_args_is_help=True)

EXIT_FINDINGS: Final = 1
EXIT_NOT_COMPARABLE: Final = 3


Config = Annotated[Path | None, typer.Option("--config", help="TOML file that names sources and rules.")]
Url = Annotated[str | None, typer.Option("--url", envvar="OUTBOX_DATABASE__URL", help="Database of the outbox.")]
Schema = Annotated[str | None, typer.Option("--schema", help="Schema of the outbox tables (MySQL).")]
BrokerData = Annotated[Path | None, typer.Option("--broker-data", help="The broker's data folder, read in place.")]
Output = Annotated[Path | None, typer.Option("--output", help="Folder for tables and reports.")]
GraceSeconds = Annotated[float | None, typer.Option("--grace-seconds", help="What is newer is pending.")]
Master = Annotated[
    str | None, typer.Option("--master", help="Spark master, or sc://host for Spark Connect; default local[*].")
]
NowMs = Annotated[
    int | None, typer.Option("--now-ms", help="Judge as of this moment (epoch milliseconds); default: now.")
]
Since = Annotated[
    str | None,
    typer.Option("--since", help="Judge by the hour, from here on: 2026-11-01T12:00:00Z, or so long ago: 2h, 7d."),
]
Until = Annotated[str | None, typer.Option("--until", help="With --since: up to here; default: now.")]
Full = Annotated[bool, typer.Option("--full", help="With --since: look at every row, whatever the digests say.")]
RepairIt = Annotated[
    bool, typer.Option("--repair", help="With --since: hand what is lost and unsent back to the compensator.")
]
Yes = Annotated[bool, typer.Option("--yes", help="With --repair: do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="With --repair: show it, and change nothing.")]
RepairsMax = Annotated[int, typer.Option("--repairs-max", min=1, help="With --repair: refuse to do more than these.")]
MetricsFile = Annotated[
    Path | None, typer.Option("--metrics-file", help="Write recon_* metrics here as well, e.g. for node_exporter.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


@app.callback()
def reconcile() -> None:
    """Prove from the records that nothing was lost, invented or early."""


@app.command()
def run(
    config: Config = None, url: Url = None, schema: Schema = None, broker_data: BrokerData = None,
    output: Output = None, grace_seconds: GraceSeconds = None, master: Master = None, now_ms: NowMs = None,
    since: Since = None, until: Until = None, full: Full = False, repair: RepairIt = False, yes: Yes = False,
    dry_run: DryRun = False, repairs_max: RepairsMax = 1_000, metrics_file: MetricsFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Reconcile once: every message, every delivery and every business row gets one verdict.

    With --since by the hour: only hours that are new, changed or still moving are judged, the others stand. Exit
    status: 0 balanced, 1 findings, 2 usage, 3 a source is missing, damaged or down, so nothing was judged.

    Examples:

      outbox reconcile run --config reconcile.toml

      outbox reconcile run --config reconcile.toml --since 48h --repair --dry-run
    """
    settings = _settings(
        config, url=url, schema=schema, broker_data=broker_data, output=output, grace_seconds=grace_seconds
    )
    if since is None and (until or full or repair):
        raise ConfigurationError("--until, --full and --repair go with --since: name since when, e.g. --since 48h")
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    span = None if since is None else (moment_ms(since, now_ms=now), moment_ms(until, now_ms=now) if until else now)
    with _exit_statuses():
        summary = _run(settings, master=master, now_ms=now, span=span, full=full)
    write_metrics(metrics_file or settings.output / METRICS_FILE, summary)
    if as_json:
        typer.echo(json.dumps(summary.as_dict()))
    else:
        _print(summary)
    if repair and span is not None:
        repair_windows(
            settings, since_ms=span[0], until_ms=span[1], repairs_max=repairs_max, yes=yes, dry_run=dry_run,
            folder=Path(summary.folder),
        )  # fmt: skip
    raise typer.Exit(0 if summary.balanced else EXIT_FINDINGS)


@app.command()
def watch(
    config: Config = None, url: Url = None, schema: Schema = None, broker_data: BrokerData = None,
    output: Output = None, grace_seconds: GraceSeconds = None, master: Master = None,
    every: Annotated[str, typer.Option("--every", help="How often: 15m, 1h.")] = "1h",
    lookback: Annotated[str, typer.Option("--lookback", help="Which hours are looked at again: 48h, 7d.")] = "48h",
    metrics_file: MetricsFile = None,
) -> None:  # fmt: skip
    """Reconcile every hour, when it is over, until told to stop (SIGTERM, ^C).

    Each run judges the new hour, and those of the last 48 whose records changed or in which something still moved.

    Example: outbox reconcile watch --config reconcile.toml --lookback 7d
    """
    settings = _settings(
        config, url=url, schema=schema, broker_data=broker_data, output=output, grace_seconds=grace_seconds
    )
    every_ms, lookback_ms = length_ms(every), length_ms(lookback)

    def once(now_ms: int) -> None:
        summary = _run(settings, master=master, now_ms=now_ms, span=(now_ms - lookback_ms, now_ms), full=False)
        write_metrics(metrics_file or settings.output / METRICS_FILE, summary)
        typer.echo(summary.sentence)

    schedule = Schedule(every_ms=every_ms, after_ms=int(settings.grace.seconds * 1000) % every_ms)
    watching = Watch(once, schedule=schedule, clock=SystemClock())
    with _stopped_by_signals(watching):
        watching.run()


@app.command()
def explain(
    name: Annotated[str | None, typer.Argument(help="A verdict or a rule, e.g. lost; all of them by default.")] = None,
) -> None:
    """Say what a verdict means, where it comes from, and what to do.

    Examples:

      outbox reconcile explain lost

      outbox reconcile explain handed_out_late
    """
    from spark_reconcile.judging import RULES

    found = [(scope, rule) for scope, rules in RULES.items() for rule in rules if name in {None, rule.state, rule.name}]
    if not found:
        names = [*State, *(rule.name for rules in RULES.values() for rule in rules)]
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"verdicts: {', '.join(State)}"
        raise ConfigurationError(f"there is no verdict or rule {name!r}; {hint}")
    for scope, rule in found:
        typer.echo(f"{rule.state} ({scope}: {rule.name}, {rule.severity}): {rule.meaning}")
        for label, text in (("cause", rule.cause), ("do", rule.cure)):
            if text:
                typer.echo(f"    {label}: {text}")


def _settings(
    config: Path | None, *, url: str | None, schema: str | None, broker_data: Path | None, output: Path | None,
    grace_seconds: float | None,
) -> Settings:  # fmt: skip
    """The file, with what is given as a flag put over it."""
    flags: dict[str, dict[str, Any]] = {
        "database": {"url": url, "schema": schema},
        "broker": {"data": str(broker_data.resolve()) if broker_data else None},
        "output": {"folder": str(output.resolve()) if output else None},
        "grace": {"seconds": grace_seconds},
    }
    tables: dict[str, Any] = {} if config is None else read_config(config)
    for name, values in flags.items():
        given = {key: value for key, value in values.items() if value is not None}
        if given:
            tables[name] = {**tables.get(name, {}), **given}
    if "database" not in tables or "broker" not in tables:
        raise ConfigurationError("name a file with --config, or at least --url and --broker-data")
    return settings_of(tables, folder=None if config is None else config.resolve().parent)


def _run(settings: Settings, *, master: str | None, now_ms: int, span: tuple[int, int] | None, full: bool) -> Summary:
    from spark_reconcile.incremental import run_windows
    from spark_reconcile.reconciliation import run as reconcile_once

    started = time.monotonic()
    with _talk().status("checking the sources") as status:

        def once(stop: Stop) -> Summary:
            def say(step: str) -> None:
                stop.check()
                status.update(f"{step} ({time.monotonic() - started:.0f} s)")

            if span is None:
                return reconcile_once(settings, master=master, now_ms=now_ms, say=say)
            since_ms, until_ms = span
            return run_windows(
                settings, since_ms=since_ms, until_ms=until_ms, full=full, master=master, now_ms=now_ms, say=say
            )

        return interruptible(once)


@contextmanager
def _exit_statuses() -> Iterator[None]:
    try:
        yield
    except (NotComparable, DatabaseUnavailable) as error:
        _talk().print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_NOT_COMPARABLE) from error


@contextmanager
def _stopped_by_signals(watching: Watch) -> Iterator[None]:
    """The handler itself must take no lock: the thread that it interrupts may hold it."""

    def stop(_number: int, _frame: object) -> None:
        threading.Thread(target=watching.stop, name="reconcile-stop", daemon=True).start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _talk() -> Console:
    """Standard error on a descriptor of its own: the first is lent to Spark while it starts."""
    return Console(file=os.fdopen(os.dup(sys.stderr.fileno()), "w"), highlight=False)


def _print(summary: Summary) -> None:
    typer.echo(summary.sentence)
    for one in summary.clock_sentences:
        typer.echo(one)
    for source in summary.inputs:
        if source.note:
            typer.echo(f"{source.source}, {source.what}: {source.note}")
    table = Table(box=None, pad_edge=False, show_header=False)
    figures = {
        "business rows": summary.business_rows,
        "messages": summary.messages,
        "stored": summary.stored,
        "deliveries": summary.message_groups,
        "handed out": summary.delivered,
        "handed out again": summary.redelivered,
        "deduplicated": summary.deduplicated,
        **_windows(summary),
        **{state.value: summary.count(state) for state in State if state is not State.SETTLED},
    }
    for name, value in figures.items():
        table.add_row(name, f"{value:>12,}")
    Console().print(table)
    typer.echo(f"report: {Path(summary.folder) / 'report.html'}")


def _windows(summary: Summary) -> dict[str, int]:
    found = summary.windows
    if found is None:
        return {}
    return {
        "hours": found.windows,
        "hours judged": found.judged,
        "hours still open": found.open,
        "unsent in other hours": found.outside,
    }
