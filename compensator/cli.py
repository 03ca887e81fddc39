"""`outbox compensator run|once`: options in, a wired-up compensator out. No logic of its own."""

from __future__ import annotations

import json
import logging
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compensator.metrics import CompensatorMetrics
from compensator.scan import PassReport, Scan, ScanOptions
from compensator.service import CompensatorService, ServiceOptions
from compensator.status_server import StatusServer
from messaging import Broker, connect
from messaging.errors import ConfigurationError, StorageFailed
from outbox.database import background_engine, database_errors, open_engine
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
    scan, closing = _scan(url, broker, schema, token_file, batch, lease_ms, archive)
    try:
        report = scan.run()
    finally:
        closing.close()
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
    port: Annotated[int | None, typer.Option("--port", help="Port of /metrics and /readyz; none by default.")] = None,
) -> None:
    """Make passes until SIGTERM or SIGINT; what is in hand is finished first.

    Example: outbox compensator run --url mysql+pymysql://app@db/shop --broker http://broker:7788 --port 9100
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    scan, closing = _scan(url, broker, schema, token_file, batch, lease_ms, archive)
    metrics = CompensatorMetrics()
    service = CompensatorService(scan, options=ServiceOptions(interval_ms=interval_ms), metrics=metrics)
    status = None if port is None else StatusServer(service, registry=metrics.registry, host=host, port=port)
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    service.start()
    if status is not None:
        status.start()
    talk.print(
        f"compensator runs, a pass every {interval_ms} ms" + (f", status on port {status.port}" if status else "")
    )
    told.wait()
    stopped = service.stop()
    if status is not None:
        status.stop()
    closing.close()
    if not stopped:
        raise StorageFailed("the pass in hand did not end in time; its rows are sent again when their lease ends")


class _Closing:
    """What is to be let go of at the end."""

    def __init__(self, *, broker: Broker, dispose: list[object]) -> None:
        self._broker = broker
        self._engines = dispose

    def close(self) -> None:
        self._broker.close()
        for engine in self._engines:
            engine.dispose()  # type: ignore[attr-defined]


def _scan(
    url: str, broker_url: str, schema: str | None, token_file: Path | None, batch: int, lease_ms: int, archive: bool
) -> tuple[Scan, _Closing]:
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
    return scan, _Closing(broker=broker, dispose=[engine, background])


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
