"""Commands `outbox broker store`: of a broker that bookies keep, its nodes, its ledgers and its logs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from outbox_broker.cluster import cluster_cli

RETENTION_DEFAULT: Final = "24h"

app: Final = typer.Typer(no_args_is_help=True, help="A broker on BookKeeper: its nodes, ledgers and logs.")


@app.command()
def status(store: cluster_cli.Store, config: cluster_cli.Config = None, as_json: cluster_cli.Json = False) -> None:
    """Show the nodes, which of them serves the broker, and its bookies.

    Exit status 1 if none serves it.

    Example: outbox broker store status --store bookkeeper://zk1,zk2,zk3/outbox/broker --json
    """
    cluster_cli.show_cluster(store, config, as_json=as_json)


@app.command()
def drain(
    store: cluster_cli.Store,
    node: Annotated[str, typer.Option(help="The node's name, as `status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let the node serve again.")] = False,
    config: cluster_cli.Config = None,
    as_json: cluster_cli.Json = False,
) -> None:
    """Have a node hand the broker over to another one.

    Until --undo. A node that is stopped does so by itself.

    Example: outbox broker store drain --store bookkeeper://zk1,zk2,zk3/outbox/broker --node broker-1
    """
    cluster_cli.drain(store, node, undo=undo, config=config, as_json=as_json)


@app.command()
def sweep(
    store: cluster_cli.Store,
    retention: Annotated[
        str, typer.Option(help="How long a ledger outlives its epoch: longer than any node can be paused.")
    ] = RETENTION_DEFAULT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete no ledger.")] = False,
    config: cluster_cli.Config = None,
    as_json: cluster_cli.Json = False,
) -> None:
    """Delete ledgers that the broker does not name any more.

    Processes that die between two steps leave some. Safe beside running nodes; once a day is enough.

    Example: outbox broker store sweep --store bookkeeper://zk1,zk2,zk3/outbox/broker --dry-run
    """
    cluster_cli.sweep_ledgers(store, config, retention=retention, dry_run=dry_run, as_json=as_json)


@app.command()
def export(
    store: cluster_cli.Store,
    folder: Annotated[Path, typer.Option(help="Where the logs go: a new folder, or that of an earlier export.")],
    config: cluster_cli.Config = None,
    as_json: cluster_cli.Json = False,
) -> None:
    """Write the broker's logs to a folder, for `outbox reconcile`.

    It takes the folder for the broker's data folder.
    Beside running nodes, which are not disturbed: it reads what the bookies know to be confirmed. Only what has changed
    since an earlier export is read. It is no data folder that a broker can be started on: the schedule is not in it.

    Example: outbox broker store export --store bookkeeper://zk1,zk2,zk3/outbox/broker --folder /var/lib/broker-logs
    """
    from outbox_broker.cluster.shard_names import BROKER_SHARD
    from outbox_broker.cluster.shard_openers import ledger_shards, read_cluster
    from outbox_broker.cluster.znode_records import ClusterKind, require_kind
    from outbox_broker.server.store_files import export_logs

    settings = cluster_cli.settings_of(store, config)
    cluster = read_cluster(settings)
    require_kind(cluster, ClusterKind.BROKER, root=settings.address.root)
    with ledger_shards(settings) as shards:
        exported = export_logs(folder, cluster=cluster.cluster, view=lambda: shards.view(BROKER_SHARD))
    if as_json:
        print(json.dumps(asdict(exported)))
    else:
        print(
            f"{exported.segments} segments in {folder}, {exported.kept} of them as before; "
            f"{exported.written_bytes:,} bytes were written"
        )
