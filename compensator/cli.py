"""`outbox compensator run|once`: options in, a wired-up compensator out. No logic of its own."""

from __future__ import annotations

import json
import logging
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from sqlalchemy import Engine

from compensator.metrics import CompensatorMetrics
from compensator.retention import Retention, RetentionOptions
from compensator.scan import PassReport, Scan, ScanOptions
from compensator.service import CompensatorService, ServiceOptions
from compensator.status_server import StatusServer
from messaging import Broker, connect
from messaging.errors import ConfigurationError, StorageFailed
from outbox.archive import ArchiveStore
from outbox.database import background_engine, database_errors, open_engine
from outbox.inbox import InboxStore
from outbox.relay import RelayPolicy
from outbox.store import MessageStore

app = typer.Typer(help="Find what was committed and not sent, and send it.", no_args_is_help=True)
talk = Console(stderr=True)

Url = Annotated[str, typer.Option("--url", envvar="OUTBOX_DATABASE__URL", help="Database, e.g. mysql+pymysql://u@h/d.")]
BrokerUrl = Annotated[str, typer.Option("--broker", envvar="OUTBOX_BROKER__URL", help="Broker, e.g. http://host:7788.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", envvar="OUTBOX_BROKER__TOKEN_FILE", help="File with the broker's token.")
]
Schema = Annotated[str | None, typer.Option("--schema", help="Schema of the outbox tables (MySQL; default: outbox).")]
Batch = Annotated[int, typer.Option("--batch", min=1, max=1000, help="Rows claimed and sent at once.")]
LeaseMs = Annotated[
    int, typer.Option("--lease-ms", min=1000, help="How long a claim holds before others may take over.")
]
Archive = Annotated[bool, typer.Option("--archive/--no-archive", help="Keep sent rows as evidence for reconciliation.")]


@app.command()
def once(
    url: Url,
    broker: BrokerUrl,
    schema: Schema = None,
    token_file: TokenFile = None,
    batch: Batch = 200,
    lease_ms: LeaseMs = 60_000,
    archive: Archive = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make one pass and say what it did. Exit status 1 when the broker was out.

    Example: outbox compensator once --url sqlite:///shop.db --broker http://127.0.0.1:7788
    """
    wired = _wire(url, broker, schema=schema, token_file=token_file, batch=batch, lease_ms=lease_ms, archive=archive)
    try:
        report = wired.scan.run()
    finally:
        wired.close()
    _print(report, as_json=as_json)
    raise typer.Exit(1 if report.outage else 0)


@app.command()
def run(
    url: Url,
    broker: BrokerUrl,
    schema: Schema = None,
    token_file: TokenFile = None,
    batch: Batch = 200,
    lease_ms: LeaseMs = 60_000,
    archive: Archive = True,
    interval_ms: Annotated[int, typer.Option("--interval-ms", min=10, help="Pause between passes.")] = 1_000,
    host: Annotated[str, typer.Option("--host", help="Address of the status page.")] = "127.0.0.1",
    archive_days: Annotated[
        float | None,
        typer.Option("--archive-days", min=0, help="Delete archive rows older than this; never by default."),
    ] = None,
    inbox_days: Annotated[
        float | None, typer.Option("--inbox-days", min=0, help="Delete inbox rows older than this; never by default.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port of /metrics and /readyz; none by default.")] = None,
) -> None:
    """Make passes until SIGTERM or SIGINT; what is in hand is finished first.

    Example: outbox compensator run --url mysql+pymysql://app@db/shop --broker http://broker:7788 --port 9100
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    wired = _wire(url, broker, schema=schema, token_file=token_file, batch=batch, lease_ms=lease_ms, archive=archive)
    metrics = CompensatorMetrics()
    options = RetentionOptions(archive_days=archive_days, inbox_days=inbox_days)
    service = CompensatorService(
        wired.scan,
        options=ServiceOptions(interval_ms=interval_ms),
        metrics=metrics,
        retention=wired.retention(schema=schema, options=options),
    )
    status = None if port is None else StatusServer(service, registry=metrics.registry, host=host, port=port)
    try:
        _serve(service, status, interval_ms=interval_ms)
    finally:
        wired.close()


def _serve(service: CompensatorService, status: StatusServer | None, *, interval_ms: int) -> None:
    """Run until told to stop, then stop in order."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    service.start()
    if status is not None:
        status.start()
    page = f", status on port {status.port}" if status else ""
    talk.print(f"compensator runs, a pass every {interval_ms} ms{page}")
    told.wait()
    stopped = service.stop()
    if status is not None:
        status.stop()
    if not stopped:
        raise StorageFailed("the pass in hand did not end in time; its rows are sent again when their lease ends")


@dataclass(frozen=True, slots=True)
class _Wired:
    """A compensator's parts, put together, to be let go of at the end."""

    engine: Engine
    background: Engine
    broker: Broker
    scan: Scan

    def retention(self, *, schema: str | None, options: RetentionOptions) -> Retention:
        dialect = self.engine.dialect
        archive, inbox = ArchiveStore(dialect=dialect, schema=schema), InboxStore(dialect=dialect, schema=schema)
        return Retention(engine=self.background, archive=archive, inbox=inbox, options=options)

    def close(self) -> None:
        self.broker.close()
        self.background.dispose()
        self.engine.dispose()


def _wire(
    url: str, broker_url: str, *, schema: str | None, token_file: Path | None, batch: int, lease_ms: int, archive: bool
) -> _Wired:
    engine = open_engine(url)
    background = background_engine(engine)
    options = {"token": _token(token_file)} if token_file is not None else {}
    broker = connect(broker_url, **options)
    store = MessageStore(dialect=engine.dialect, schema=schema)
    with database_errors(background.url), background.connect() as connection:
        store.backlog(connection, rows_max=1)  # a wrong URL or missing tables are said now, not in a log
    scan = Scan(
        engine=background,
        store=store,
        broker=broker,
        policy=RelayPolicy(keep_archive=archive),
        options=ScanOptions(batch_rows=batch, lease_ms=lease_ms),
    )
    return _Wired(engine, background, broker, scan)


def _token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the token file {path}: {error.strerror}") from error


def _print(report: PassReport, *, as_json: bool) -> None:
    figures = {name: getattr(report, name) for name in ("batches", "claimed", "accepted", "retried", "parked", "stale")}
    if as_json:
        typer.echo(json.dumps({**figures, "outage": str(report.outage) if report.outage else None}))
        return
    typer.echo(", ".join(f"{name} {value:,}" for name, value in figures.items()))
    if report.outage is not None:
        talk.print(f"the broker was out: {report.outage}", markup=False)
