"""The command of `outbox broker store` that asks the running broker: copy. The others are in outbox_broker/server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from broker_adapter.http.shared_cli import AsJson, Connection, connected, print_done
from outbox_broker.server.store_cli import app
from outbox_core.common.clock import SystemClock
from outbox_core.runtime.progress import Progress, ProgressForm, ProgressOption
from outbox_core.runtime.terminal_text import utc_text

__all__ = ["app"]


@app.command()
@connected
def copy(
    connection: Connection,
    store: Annotated[str, typer.Option(help="The broker's address: bookkeeper://zk1,zk2,zk3/path.")],
    to: Annotated[Path, typer.Option("--to", help="A new folder, or an earlier copy that nobody served.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [cluster].")] = None,
    progress: ProgressOption = ProgressForm.AUTO,
    as_json: AsJson = False,
) -> None:
    """Copy a running broker to a data folder.

    The node that serves is asked at --url, with the role admin, where everything ends at this moment, and goes on.
    The folder can be served, or backed up. It is another generation of the broker, as a restored one: receipts of
    before are stale in it. Bodies of messages are in it. Only what is new since an earlier copy is read.

    Examples:

      outbox broker store copy --store bookkeeper://zk1,zk2,zk3/outbox/broker --url http://broker:7788 --to ./copy

      outbox broker backup ./copy --to /mnt/backup/broker
    """
    from outbox_broker.cluster.cluster_cli import settings_of
    from outbox_broker.cluster.shard_names import BROKER_SHARD
    from outbox_broker.cluster.shard_openers import ledger_shards, read_cluster
    from outbox_broker.log.storage import DiskStorage
    from outbox_broker.server.store_files import copy_broker

    client = connection.client()
    settings = settings_of(store, config)
    cluster = read_cluster(settings).cluster
    with ledger_shards(settings) as shards, Progress("copy", form=progress, steady=True) as shown:
        copied = copy_broker(
            to, cluster=cluster, ask=lambda: client.snapshot("copy"), view=lambda: shards.view(BROKER_SHARD),
            storage=DiskStorage(), clock=SystemClock(), shows=shown.update,
        )  # fmt: skip
    print_done(
        {"folder": str(to), **asdict(copied)},
        f"the broker as of {utc_text(copied.at_ms)} is in {to}: {copied.segments} segments, {copied.kept} of "
        f"them as before; {copied.size_bytes:,} bytes; bodies of messages are in it",
        as_json=as_json,
    )
