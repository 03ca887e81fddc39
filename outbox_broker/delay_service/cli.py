"""Commands `outbox delay serve`, `status` and `sweep`: of a delay service, its cluster, or a timing store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final, Protocol
from urllib.parse import urlsplit

import typer

from outbox_broker.cluster import cluster_cli
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.config_files import read_secret
from outbox_core.runtime.logs import LogFormat

ENTRY_POINT_GROUP: Final = "outbox.timing_commands"
CLUSTER: Final = "bookkeeper"
RETENTION_DEFAULT: Final = "24h"

Urls = Annotated[list[str] | None, typer.Option("--url", help="With a timing store: the database of its rows.")]
Schemas = Annotated[
    list[str] | None, typer.Option("--schema", help="With --url: its schema of outbox tables (outbox).")
]

ServedStore = Annotated[
    str | None,
    typer.Option(
        "--store", help="Be a node of the cluster at this address, or fire this timing store; without --data."
    ),
]
InsecureNoAuth = Annotated[
    bool | None, typer.Option("--insecure-no-auth", help="Serve everybody on an address that others can reach.")
]

app = typer.Typer(no_args_is_help=True, help="Run a delay service, or the timers of a timing store.")


class TimingCommands(Protocol):
    """The commands of a timing store; `flags` are nested like the compensator's file."""

    def serve(self, store: str, flags: Mapping[str, Any], config: Path | None) -> None:
        """Fire its timers until SIGTERM."""

    def status(self, store: str, *, as_json: bool) -> None:
        """Print what it holds."""

    def sweep(self, store: str, flags: Mapping[str, Any], config: Path | None, *, as_json: bool) -> None:
        """Compare it with its database once."""


for _command in (cluster_cli.init, cluster_cli.drain):
    app.command()(_command)


@app.callback()
def _delay() -> None:
    """Run a delay service in front of any broker."""


@app.command()
def export(
    store: cluster_cli.Store,
    folder: Annotated[Path, typer.Option(help="Where the logs go: an empty folder, or one that is not there yet.")],
    config: cluster_cli.Config = None,
    as_json: cluster_cli.Json = False,
) -> None:
    """Write what waits in a cluster in the format of a broker's logs.

    That is, its messages and the cancels that it remembers.

    Beside running nodes, which are not disturbed: it reads up to what the bookies know to be confirmed. Bodies are
    replaced by their SHA-256. `outbox reconcile` runs it by itself.

    Example: outbox delay export --store bookkeeper://zk1,zk2,zk3/outbox/delay --folder ./scheduled --json
    """
    from outbox_broker.cluster.memory_budget import MemoryBudget
    from outbox_broker.cluster.shard_names import ShardMap
    from outbox_broker.cluster.shard_openers import ledger_shards, read_cluster
    from outbox_broker.delay_service.cluster_export import ClusterExport, ExportOptions
    from outbox_core.common.clock import SystemClock

    settings = cluster_cli.settings_of(store, config)
    shards = ShardMap(read_cluster(settings).generations).names()
    options = ExportOptions(cancels_max=MemoryBudget().cancels_of(len(shards)))
    with ledger_shards(settings) as views:
        report = ClusterExport(shards=shards, views=views, clock=SystemClock(), options=options).write(folder)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        print(f"{report.shards} shards: {report.messages} messages wait, {report.cancels} cancels are remembered")
        if report.undecodable:
            print(f"{report.undecodable} messages cannot be decoded; the log has their ids")


@app.command()
def serve(
    target: Annotated[str, typer.Option(help="The broker that gets what is due: any URL that an adapter knows.")],
    data: Annotated[Path | None, typer.Option(help="The folder of its segments; made where it is missing.")] = None,
    target_token_file: Annotated[Path | None, typer.Option(help="File with the bearer token for the target.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (7788); 0 picks a free one.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="TOML file of bearer tokens (see `outbox broker token`).")] = None,
    insecure_no_auth: InsecureNoAuth = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write the URL here once it can serve.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="json or text (json, on a terminal text).")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with tables [broker] and [cluster].")] = None,
    store: ServedStore = None,
    url: Urls = None,
    schema: Schemas = None,
    name: Annotated[str | None, typer.Option(help="The node's name in the cluster (host and port).")] = None,
    zone: Annotated[str | None, typer.Option(help="The zone in which the node runs.")] = None,
) -> None:
    """Publish messages to a target when they are due.

    They come over the broker's HTTP protocol. It listens as `outbox broker serve` does, with the same settings;
    consumers pull from the target itself. SIGHUP has it read certificate, key and tokens again.

    Example: outbox delay serve --data ./delay --target http://broker:7788 --port 7799

    A node: outbox delay serve --store bookkeeper://zk1,zk2,zk3/outbox/delay --target http://broker:7788 --port 7799

    With a timing store it is the compensator of its database, and --port that of /metrics and /readyz:

    Example: outbox delay serve --store "redis://redis/?name=shop" --url mysql+pymysql://app@db --target kafka://kafka
    """
    flags = {
        "data": data, "host": host, "port": port, "tokens": tokens, "insecure_no_auth": insecure_no_auth,
        "tls_cert": tls_cert, "tls_key": tls_key, "ready_file": ready_file, "log_level": log_level,
        "log_format": log_format,
    }  # fmt: skip
    of_node = {"store": store, "name": name, "zone": zone}
    if store is None or urlsplit(store).scheme == CLUSTER:
        _serve_schedule(flags, of_node, config, target=target, token_file=target_token_file)
    else:
        of_source = _database(url, schema) | {"broker": {"url": target, "token_file": target_token_file}}
        _serve_timing_store(store, flags | {"name": name, "zone": zone}, of_source, config)


def _serve_schedule(
    flags: Mapping[str, Any],
    of_node: Mapping[str, Any],
    config: Path | None,
    *,
    target: str,
    token_file: Path | None,
) -> None:
    """Serve a schedule in a folder, or those shards of a cluster that the node gets."""
    from outbox_broker.config.broker_config import load
    from outbox_broker.delay_service.process import run

    token = None if token_file is None else read_secret(token_file, what="token")
    if of_node["store"] is None:
        run(load(flags, file=config), target_url=target, target_token=token)
        return
    from outbox_broker.delay_service.cluster_process import run_node

    run_node(flags, cluster_flags=of_node, file=config, target=(target, token))


def _serve_timing_store(
    store: str, flags: Mapping[str, Any], of_source: Mapping[str, Any], config: Path | None
) -> None:
    """Fire the timers of a store; `of_source`: the flags of its database and broker, nested like the file."""
    of_service = {name: flags[name] for name in ("host", "port", "zone")}
    of_logs = {name: flags[name] for name in ("log_level", "log_format")}
    _refuse({name: flag for name, flag in flags.items() if name not in of_service | of_logs})
    compensator = {**of_source["compensator"], **of_service}
    _timing_commands(store).serve(store, {**of_source, **of_logs, "compensator": compensator}, config)


@app.command()
def status(
    store: Annotated[
        str, typer.Option(help="A cluster's address, or a timing store: redis+cluster://h1,h2/?name=shop.")
    ],
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [cluster].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a cluster's shards, or a timing store's timers.

    Exit status 1 where a shard waits, or timers were lost and are not rebuilt yet.

    A compensator with the same timing store (`outbox compensator run --timing URL`) fires its timers, and rebuilds it.

    Example: outbox delay status --store bookkeeper://zk1,zk2,zk3/outbox/delay --json

    Example: outbox delay status --store "redis://redis/?name=shop"
    """
    if urlsplit(store).scheme == CLUSTER:
        cluster_cli.show_cluster(store, config, as_json=as_json)
    else:
        _timing_commands(store).status(store, as_json=as_json)


@app.command()
def sweep(
    store: Annotated[str, typer.Option(help="A cluster's address, or a timing store: redis://redis/?name=shop.")],
    url: Urls = None,
    schema: Schemas = None,
    retention: Annotated[
        str | None,
        typer.Option(help="How long a ledger outlives its epoch (24h): longer than any node can be paused."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete no ledger.")] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [cluster], or [timing].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Delete a cluster's orphaned ledgers, or repair a timing store.

    Ledgers that no manifest names are left by processes that die between two steps. Safe beside running nodes; once a
    day is enough.

    A timing store gets a timer for each pending row that has none, and loses those whose row is gone. Safe beside
    running workers. Name the store's own database: with another one it loses timers, and rows go out by the polls.

    Example: outbox delay sweep --store bookkeeper://zk1,zk2,zk3/outbox/delay --dry-run

    Example: outbox delay sweep --store "redis://redis/?name=shop" --url mysql+pymysql://app@db/shop
    """
    if urlsplit(store).scheme == CLUSTER:
        cluster_cli.sweep_ledgers(
            store, config, retention=retention or RETENTION_DEFAULT, dry_run=dry_run, as_json=as_json
        )
        return
    _refuse({"retention": retention, "dry_run": dry_run})
    _timing_commands(store).sweep(store, _database(url, schema), config, as_json=as_json)


def _timing_commands(store: str) -> TimingCommands:
    """Those of the URL's scheme. They belong to the compensator, which fires the timers."""
    scheme = urlsplit(store).scheme
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        commands: TimingCommands = entry_point.load()
        return commands
    known = ", ".join(sorted(entry_points(group=ENTRY_POINT_GROUP).names))
    raise ConfigurationError(f"no --store of the scheme {scheme!r}; known: {CLUSTER}, {known}")


def _refuse(options: Mapping[str, object]) -> None:
    """Refuse options that have no meaning with a timing store."""
    given = [f"--{name.replace('_', '-')}" for name, option in options.items() if option not in (None, False)]
    if given:
        raise ConfigurationError(f"{', '.join(given)}: not with a timing store; see outbox delay COMMAND --help")


def _database(url: list[str] | None, schema: list[str] | None) -> dict[str, Any]:
    """Flags of the compensator, nested like its file."""
    flags: dict[str, Any] = {"database": {} if url else {"schemas": schema}}
    sources = [{"url": database_url, **({"schemas": schema} if schema else {})} for database_url in url or []]
    return {**flags, "compensator": {"sources": sources}}
