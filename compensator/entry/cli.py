"""The commands `outbox compensator run` and `once`: turn options into a configured compensator. No logic.

What the extra `compensator` brings is imported only when a command runs, so that help pages are shown without it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from outbox_core.common.clock import SystemClock
from outbox_core.runtime.progress import Progress, ProgressForm, ProgressOption
from outbox_core.runtime.terminal_text import escaped

if TYPE_CHECKING:
    from compensator.core.batch_totals import BatchTotals
    from compensator.core.config import CompensatorConfig
    from compensator.entry.composition import Parts

app = typer.Typer(help="Find what was committed and not sent, and send it.", no_args_is_help=True)
talk = Console(stderr=True)
SHOWN_ROWS_MIN: Final = 1_000
"""Fewer are sent before anybody looks, and a line of them would be all that cron sends by mail."""

Urls = Annotated[list[str] | None, typer.Option("--url", help="Database, e.g. mysql+pymysql://u@h/d. May be repeated.")]
Schemas = Annotated[
    list[str] | None,
    typer.Option("--schema", help="Schema of outbox tables, if they have one of their own (MySQL). May be repeated."),
]
PasswordFile = Annotated[Path | None, typer.Option("--password-file", help="File with the databases' password.")]
BrokerUrl = Annotated[str | None, typer.Option("--broker", help="Broker, e.g. http://host:7788.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the broker's token.")]
Config = Annotated[Path | None, typer.Option("--config", envvar="OUTBOX_CONFIG", help="TOML file, e.g. outbox.toml.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, max=1000, help="Rows claimed and sent at once (200).")]
LeaseMs = Annotated[
    int | None, typer.Option("--lease-ms", min=1000, help="How long a claim holds before others take over (60000).")
]
RateLimiter = Annotated[float | None, typer.Option("--rate-limit", help="Rows a second, of all sources together.")]
Archive = Annotated[
    bool | None, typer.Option("--archive/--no-archive", help="Keep sent rows as evidence for reconciliation.")
]
IntervalMs = Annotated[
    int | None, typer.Option("--interval-ms", min=10, help="Until the next poll after rows were found (1000).")
]
Workers = Annotated[int | None, typer.Option("--workers", help="Sources served at once (4, 12 at most).")]
Leases = Annotated[
    bool | None,
    typer.Option("--leases/--no-leases", help="Share sources among instances by leases (where there are several)."),
]
LeaseUrl = Annotated[
    str | None,
    typer.Option(
        "--lease-url", help="Where leases are: a database, or e.g. zookeeper://zk1,zk2,zk3/outbox/compensators."
    ),
]
TimingUrl = Annotated[
    str | None, typer.Option("--timing", help="Timing store of scheduled messages, e.g. redis://host/?name=shop.")
]
Zone = Annotated[str | None, typer.Option("--zone", help="This instance's zone: it is given that one's sources first.")]
Host = Annotated[str | None, typer.Option("--host", help="Address of the status page (127.0.0.1).")]
ArchiveDays = Annotated[
    float | None, typer.Option("--archive-days", min=0, help="Delete archive rows older than this; never by default.")
]
InboxDays = Annotated[
    float | None, typer.Option("--inbox-days", min=0, help="Delete inbox rows older than this; never by default.")
]
JudgedFile = Annotated[
    Path | None,
    typer.Option("--judged-file", help="What this judged.json says is not judged yet goes after twice the days."),
]
Port = Annotated[int | None, typer.Option("--port", help="Port of /metrics and /readyz; none by default.")]
StopTimeout = Annotated[
    str | None, typer.Option("--stop-timeout", help="How long work in progress may take to end (25s).")
]
LogFormat = Annotated[str | None, typer.Option("--log-format", help="text or json (json, on a terminal text).")]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error (info).")]


@app.command()
def once(
    url: Urls = None,
    broker: BrokerUrl = None,
    schema: Schemas = None,
    password_file: PasswordFile = None,
    token_file: TokenFile = None,
    config: Config = None,
    batch: Batch = None,
    lease_ms: LeaseMs = None,
    rate_limit: RateLimiter = None,
    archive: Archive = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    progress: ProgressOption = ProgressForm.AUTO,
) -> None:
    """Make one pass and say what it did.

    Exit status 1 when the broker was out or took nothing, or a source could not be served.

    Example: outbox compensator once --url sqlite:///shop.db --broker http://127.0.0.1:7788
    """
    from compensator.core.config import load
    from compensator.entry.composition import wire
    from compensator.entry.single_pass import pending_rows, run_single_pass

    flags = _flags(url, schema, password_file, broker, token_file)
    flags["compensator"] |= {
        "batch_rows": batch, "lease": _ms(lease_ms), "rate_limit": rate_limit, "archive": archive,
    }  # fmt: skip
    settings, clock = load(flags, file=config), SystemClock()
    _configure_logs(settings, level="warning")
    parts = wire(settings, clock=clock)
    try:
        _check(parts)
        rows = pending_rows(parts.sources)
        with Progress("sending", form=progress, clock=clock, steady=True) as shown:

            def show(report: BatchTotals) -> None:
                if rows >= SHOWN_ROWS_MIN or progress is ProgressForm.JSON:
                    shown.update(report.claimed, max(rows, report.claimed))

            report, errors = run_single_pass(
                parts.sources, options=parts.options.turn, clock=clock, on_progress=show
            )  # fmt: skip
    finally:
        parts.close()
    for error in errors:
        talk.print(escaped(f"a source was left out: {error}"), markup=False, highlight=False, soft_wrap=True)
    _print(report, as_json=as_json)
    raise typer.Exit(1 if report.outage or errors or _nothing_went(report) else 0)


@app.command()
def run(
    url: Urls = None,
    broker: BrokerUrl = None,
    schema: Schemas = None,
    password_file: PasswordFile = None,
    token_file: TokenFile = None,
    config: Config = None,
    batch: Batch = None,
    lease_ms: LeaseMs = None,
    rate_limit: RateLimiter = None,
    archive: Archive = None,
    interval_ms: IntervalMs = None,
    workers: Workers = None,
    leases: Leases = None,
    lease_url: LeaseUrl = None,
    timing: TimingUrl = None,
    zone: Zone = None,
    host: Host = None,
    archive_days: ArchiveDays = None,
    inbox_days: InboxDays = None,
    judged_file: JudgedFile = None,
    port: Port = None,
    stop_timeout: StopTimeout = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Serve until SIGTERM or SIGINT; work in progress is finished first. A second signal ends it at once.

    Each option is also a setting; flags win over the environment, and that over the file. Most are
    OUTBOX_COMPENSATOR__NAME, in the file NAME of [compensator]; there --batch is batch_rows, --lease-ms and
    --interval-ms are lease and interval, like "60s".

    --url, --schema (schemas), --password-file: OUTBOX_DATABASE__NAME, [database]. --broker (url), --token-file:
    OUTBOX_BROKER__NAME, [broker]. --timing: OUTBOX_TIMING__STORE. --log-level: OUTBOX_LOG_LEVEL.

    Example: outbox compensator run --url mysql+pymysql://app@db/shop --broker http://broker:7788 --port 9100
    """
    from compensator.core.config import load

    flags = _flags(url, schema, password_file, broker, token_file)
    flags |= {"log_format": log_format, "log_level": log_level, "timing": {"store": timing}}
    flags["compensator"] |= {
        "batch_rows": batch, "lease": _ms(lease_ms), "rate_limit": rate_limit, "archive": archive,
        "interval": _ms(interval_ms), "workers": workers, "leases": leases,
        "lease_url": lease_url, "zone": zone, "host": host, "port": port,
        "archive_days": archive_days, "inbox_days": inbox_days, "judged_file": judged_file,
        "stop_timeout": stop_timeout,
    }  # fmt: skip
    run_service(load(flags, file=config))


def run_service(settings: CompensatorConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigurationError for settings or a store that cannot serve."""
    from compensator.entry.composition import wire
    from compensator.entry.process import serve

    clock = SystemClock()
    _configure_logs(settings, level=settings.log_level)
    parts = wire(settings, clock=clock)
    try:
        _check(parts)
        for worker in parts.timers:
            worker.check()
        serve(parts, settings, clock=clock, say=lambda text: talk.print(text, soft_wrap=True, highlight=False))
    finally:
        parts.close()


def _flags(
    urls: list[str] | None,
    schemas: list[str] | None,
    password_file: Path | None,
    broker: str | None,
    token_file: Path | None,
) -> dict[str, Any]:
    """The flags common to both commands, nested like the file. Databases named by flags replace those of the file."""
    database = {"schemas": schemas, "password_file": password_file}
    sources = [{"url": url, **{name: flag for name, flag in database.items() if flag}} for url in urls or []]
    return {
        "database": {} if urls else database,
        "broker": {"url": broker, "token_file": token_file},
        "compensator": {"sources": sources},
    }


def _ms(value: int | None) -> str | None:
    return None if value is None else f"{value}ms"


def _check(parts: Parts) -> None:
    """If there is one source, report a wrong URL or missing tables at once, instead of in a log."""
    if len(parts.sources) == 1:
        parts.sources[0].poll()


def _configure_logs(config: CompensatorConfig, *, level: str) -> None:
    from outbox.telemetry import trace_context
    from outbox_core.runtime import logs

    log_format = config.log_format or logs.fitting_format(sys.stderr)
    quiet = {"apscheduler": "error", **logs.QUIET_CLIENTS}
    logs.configure(format=log_format, level=level, context=trace_context, quiet=quiet)


def _print(report: BatchTotals, *, as_json: bool) -> None:
    names = ("batches", "claimed", "accepted", "retried", "held", "parked", "stale")
    figures = {name: getattr(report, name) for name in names}
    if as_json:
        typer.echo(json.dumps({**figures, "outage": str(report.outage) if report.outage else None}))
        return
    typer.echo(", ".join(f"{name} {figure:,}" for name, figure in figures.items()))
    if report.outage is not None:
        talk.print(escaped(f"the broker was out: {report.outage}"), markup=False, highlight=False, soft_wrap=True)
    elif report.retried or report.parked:
        talk.print("why some were not taken: outbox messages list --url URL", markup=False, highlight=False)


def _nothing_went(report: BatchTotals) -> bool:
    """Whether the broker accepted none of the rows sent: because of a wrong token, for instance."""
    return bool(report.retried or report.parked) and not report.accepted
