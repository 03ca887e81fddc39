"""Commands `outbox delay serve`, which runs the schedule in front of a broker without delays, and `status`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from outbox_broker.delay_service import cluster_cli
from outbox_core.messages.connect import connect_timing
from outbox_core.runtime.config_files import read_secret
from outbox_core.runtime.logs import LogFormat

SLOT_TIMERS_MAX: Final = 1_000_000
"""A sorted set of so many timers takes some 100 MB, which a cluster moves to another node in one step."""
LARGE: Final = ": give the store more slots, under another name=, before a cluster moves it"

app = typer.Typer(no_args_is_help=True, help="Run a delay service, or look at a timing store.")


for _command in (cluster_cli.init, cluster_cli.drain, cluster_cli.sweep):
    app.command()(_command)


@app.callback()
def _delay() -> None:
    """Run a delay service in front of any broker."""


@app.command()
def serve(
    target: Annotated[str, typer.Option(help="The broker that gets what is due: any URL that an adapter knows.")],
    data: Annotated[Path | None, typer.Option(help="The folder of its segments; made where it is missing.")] = None,
    target_token_file: Annotated[Path | None, typer.Option(help="File with the bearer token for the target.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (7788); 0 picks a free one.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="TOML file of bearer tokens (see `outbox broker token`).")] = None,
    insecure_no_auth: Annotated[
        bool | None, typer.Option("--insecure-no-auth", help="Serve everybody on an address that others can reach.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write the URL here once it can serve.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="json or text (json, on a terminal text).")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with tables [broker] and [cluster].")] = None,
    store: Annotated[str | None, typer.Option(help="Be a node of the cluster at this address; without --data.")] = None,
    name: Annotated[str | None, typer.Option(help="The node's name in the cluster (host and port).")] = None,
    zone: Annotated[str | None, typer.Option(help="The zone in which the node runs.")] = None,
) -> None:
    """Publish messages to a target when they are due.

    They come over the broker's HTTP protocol.

    It listens as `outbox broker serve` does, with the same settings; consumers pull from the target itself.

    Example: outbox delay serve --data ./delay --target http://broker:7788 --port 7799

    A node: outbox delay serve --store bookkeeper://zk1,zk2,zk3/outbox/delay --target http://broker:7788 --port 7799
    """
    from outbox_broker.config.broker_config import load
    from outbox_broker.delay_service.process import run

    flags = {
        "data": data, "host": host, "port": port, "tokens": tokens, "insecure_no_auth": insecure_no_auth,
        "tls_cert": tls_cert, "tls_key": tls_key, "ready_file": ready_file, "log_level": log_level,
        "log_format": log_format,
    }  # fmt: skip
    token = None if target_token_file is None else read_secret(target_token_file, what="token")
    if store is not None:
        from outbox_broker.delay_service.cluster_process import run_node

        run_node(flags, cluster_flags={"store": store, "name": name, "zone": zone}, file=config, target=(target, token))
        return
    run(load(flags, file=config), target_url=target, target_token=token)


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
    if urlsplit(store).scheme == "bookkeeper":
        cluster_cli.show_cluster(store, config, as_json=as_json)
    else:
        _show_timing_store(store, as_json=as_json)


def _show_timing_store(store: str, *, as_json: bool) -> None:
    timing = connect_timing(store)
    try:
        timing.prepare()
        figures = timing.figures()
    finally:
        timing.close()
    complete = all(one.complete for one in figures)
    largest = max(one.timers for one in figures)
    if as_json:
        slots = [asdict(one) for one in figures]
        typer.echo(json.dumps({"complete": complete, "largest_slot": largest, "slots": slots}))
    else:
        for one in figures:
            following = "-" if one.next_ms is None else f"{one.next_ms / 1_000:,.1f} s"
            state = "complete" if one.complete else "to be rebuilt"
            typer.echo(f"slot {one.slot}: {one.timers:,} timers, {one.due:,} due, next in {following}, {state}")
        typer.echo(f"largest slot: {largest:,} timers" + (LARGE if largest > SLOT_TIMERS_MAX else ""))
    raise typer.Exit(0 if complete else 1)
