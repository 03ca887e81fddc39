"""The commands of `outbox broker` that need no client: serve, folder, log, token, verify and restore. Others are in
broker_adapter/http.

Only `serve` loads the server's libraries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.runtime.logs import LogFormat
from outbox_core.runtime.progress import Progress, ProgressForm, ProgressOption
from outbox_core.runtime.terminal_text import utc_text

if TYPE_CHECKING:
    from outbox_broker.backup.manifest import Manifest
    from outbox_broker.log.restored_folder import Restored

app: Final = typer.Typer(no_args_is_help=True, help="Run the broker.")


@app.command()
def serve(
    data: Annotated[Path | None, typer.Option(help="The data folder; made where it is missing.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (7788); 0 picks a free one.")] = None,
    durability: Annotated[str | None, typer.Option(help="fsync: answered once on disk. os: before that.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="TOML file of bearer tokens (see `outbox broker token`).")] = None,
    insecure_no_auth: Annotated[bool | None, typer.Option("--insecure-no-auth", help="Serve all who reach it.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    credentials_interval_ms: Annotated[int | None, typer.Option(help="Look at these files so often (never).")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write the URL here once the broker can serve.")] = None,
    shutdown_timeout_ms: Annotated[int | None, typer.Option(help="Time to finish requests on SIGTERM (25000).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="json or text (json, on a terminal text).")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with tables [broker] and [cluster].")] = None,
    store: Annotated[str | None, typer.Option(help="In place of --data: bookkeeper://zk1,zk2,zk3/path.")] = None,
    name: Annotated[str | None, typer.Option(help="With --store: the node's name (host and port).")] = None,
    zone: Annotated[str | None, typer.Option(help="With --store: the zone in which the node runs.")] = None,
) -> None:
    """Serve one data folder, or what bookies keep, over HTTP.

    Each option is also OUTBOX_BROKER__NAME in the environment and a key of [broker] in the file; flags win.

    Until SIGTERM or SIGINT; SIGHUP has it read the files of certificate, key and tokens again. With --store start
    several: one serves, the others answer 503, and one of them takes over if it dies.

    Examples:

      outbox broker serve --data ./broker-data

      outbox broker serve --data /var/lib/broker --host 0.0.0.0 --tokens tokens.toml --tls-cert c.pem --tls-key k.pem

      outbox broker serve --store bookkeeper://zk1,zk2,zk3/outbox/broker --name broker-1
    """
    from outbox_broker.config.broker_config import load
    from outbox_broker.server.process import run

    flags = {
        "data": data, "host": host, "port": port, "durability": durability, "tokens": tokens, "tls_cert": tls_cert,
        "tls_key": tls_key, "insecure_no_auth": insecure_no_auth, "credentials_interval_ms": credentials_interval_ms,
        "ready_file": ready_file, "shutdown_timeout_ms": shutdown_timeout_ms, "log_level": log_level,
        "log_format": log_format,
    }  # fmt: skip
    if store is not None:
        _serve_by_bookies(flags, {"store": store, "name": name, "zone": zone}, config)
    elif name is not None or zone is not None:
        raise ConfigurationError("--name and --zone are of a node on BookKeeper: give --store, too")
    else:
        run(load(flags, file=config))


def _serve_by_bookies(flags: Mapping[str, Any], of_node: Mapping[str, Any], config: Path | None) -> None:
    from outbox_broker.server.broker_node import run_node

    run_node(flags, cluster_flags=of_node, file=config)


@app.command()
def folder(
    data: Annotated[Path, typer.Argument(help="The data folder of a broker or a delay service.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether this release opens a data folder.

    It asks the folder alone, starts nothing and changes nothing: before an upgrade, or a way back. Exits with 2 if this
    release does not open it, and says how it is opened.

    Examples:

      outbox broker folder /var/lib/broker

      outbox broker folder ./broker-data --json
    """
    from outbox_broker.log.folder_format import FORMAT, refuse_other_format

    if not data.is_dir():
        raise ConfigurationError(f"there is no folder {data}")
    found = refuse_other_format(data)
    if as_json:
        shown = None if found is None else {"format": found.format, "release": found.release}
        print(json.dumps({"folder": str(data), "found": shown, "opens": True, "own_format": FORMAT}))
    elif found is None:
        print(f"{data} does not say its format: it is new, or was never opened by a release that notes it")
    else:
        print(f"{data} has format {found.format}, of release {found.release or 'unknown'}; this release opens it")


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Who it is for; shown in the log.")],
    role: Annotated[list[str], typer.Option(help="publish, consume, read or admin; may be repeated.")],
    topic: Annotated[list[str] | None, typer.Option(help="A pattern like payment.*; may be repeated (*).")] = None,
) -> None:
    """Make a token. Its entry for the token file goes to stdout, the token itself, once, to stderr.

    Example: outbox broker token payments --role publish --topic 'payment.*' >> tokens.toml
    """
    from outbox_broker.http.access_control import Role

    unknown = sorted(set(role) - set(Role))
    if unknown:
        raise ConfigurationError(f"there is no role {unknown[0]!r}; roles are {', '.join(Role)}")
    secret = secrets.token_urlsafe(32)
    print("[[tokens]]")
    print(f"name = {_toml(name)}")
    print(f'sha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"')
    print(f"roles = {json.dumps(role)}")
    print(f"topics = {_toml(topic or ['*'])}")
    print(f"the token, shown this once: {secret}", file=sys.stderr)


@app.command()
def log(
    folder: Annotated[Path, typer.Argument(help="The data folder of a broker or of a delay service, or one log's.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a store.")] = False,
) -> None:
    """Say what the logs in a data folder hold, and what is damaged. Reads only, also while a broker runs.

    Lists segments, kinds of blocks, checkpoints, damage and torn tails.

    Exit status, as that of fsck, the sum of: 1 a torn tail, which the next opening cuts; 4 damage; 8 cannot be read.

    Example: outbox broker log /var/lib/broker
    """
    from outbox_broker.server.log_report import LogStatus, lines_of, report_folder

    logging.getLogger("outbox_broker").addHandler(logging.NullHandler())  # the report says it all
    try:
        reports = report_folder(folder)
    except StorageFailed as error:
        print(error, file=sys.stderr)
        raise typer.Exit(LogStatus.UNREADABLE) from error
    status = LogStatus.CLEAN
    for report in reports:
        status |= report.status
        if as_json:
            print(json.dumps({**asdict(report), "status": report.status}))
        else:
            print(*lines_of(report), sep="\n")
    raise typer.Exit(status)


@app.command()
def verify(
    backup: Annotated[Path, typer.Argument(help="The folder that backup wrote.")],
    progress: ProgressOption = ProgressForm.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a backup is whole.

    Reads every byte of it, and names files and ranges of bytes that are changed, missing, cut or too much.

    Exit status as that of `outbox broker log`: 4 damage; 8 cannot be read, or is no backup.

    Examples:

      outbox broker verify /mnt/backup/broker

      outbox broker verify /mnt/backup/broker --json
    """
    from outbox_broker.backup.verify import check_backup
    from outbox_broker.server.log_report import LogStatus

    try:
        with Progress("verify", form=progress, steady=True) as shown:
            manifest, damage = check_backup(backup, shows=shown.update)
    except (ConfigurationError, StorageFailed) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(LogStatus.UNREADABLE) from error
    status = LogStatus.DAMAGED if damage else LogStatus.CLEAN
    if as_json:
        facts = (None, None, None) if manifest is None else (manifest.at_ms, len(manifest.files), manifest.size_bytes)
        found = dict(zip(("at_ms", "files", "size_bytes"), facts, strict=True))
        print(json.dumps({"backup": str(backup), **found, "damage": list(map(asdict, damage)), "status": status}))
    elif damage:
        print(*damage, sep="\n")
        print("damaged: do not restore it; remove these files, and the next backup into this folder copies them anew")
    elif manifest is not None:
        size = f"{len(manifest.files)} files, {manifest.size_bytes:,} bytes"
        print(f"whole: the backup of {utc_text(manifest.at_ms)}, {size}, taken by release {manifest.release}")
    raise typer.Exit(status)


@app.command()
def restore(
    backup: Annotated[Path, typer.Argument(help="The folder that backup wrote.")],
    to: Annotated[Path | None, typer.Option("--to", help="The data folder; made, or empty.")] = None,
    store: Annotated[str | None, typer.Option(help="Instead: bookkeeper://zk1,zk2,zk3/path, without a broker.")] = None,
    config: Annotated[Path | None, typer.Option(help="With --store: TOML file with a table [cluster].")] = None,
    progress: ProgressOption = ProgressForm.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Restore a backup into an empty data folder, or onto bookies.

    Verifies the backup before. What comes of it is another generation of the broker: receipts of before are stale. Says
    what may be missing, and what may be delivered again. Never run both brokers for the same clients.

    With --store start the nodes behind it. A restore that was killed has left no broker; repeat it.

    Examples:

      outbox broker restore /mnt/backup/broker --to /var/lib/broker

      outbox broker restore /mnt/backup/broker --store bookkeeper://zk1,zk2,zk3/outbox/broker

      outbox broker restore /mnt/backup/broker --to ./restored --json
    """
    with Progress("restore", form=progress, steady=True) as shown:
        if store is not None and to is None:
            manifest, done = _restored_to_bookies(backup, store, config, shows=shown.update)
        elif to is not None and store is None and config is None:
            from outbox_broker.backup.restore import restore_backup
            from outbox_broker.log.storage import DiskStorage

            manifest, done = restore_backup(backup, to, storage=DiskStorage(), clock=SystemClock(), shows=shown.update)
        else:
            raise ConfigurationError("give --to for a data folder, or --store (and --config) for bookies")
    place = str(to) if store is None else store
    if as_json:
        outcome = {"folder" if store is None else "store": place, "backup_at_ms": manifest.at_ms}
        outcome |= {"restored_at_ms": done.at_ms, "files": len(manifest.files), "size_bytes": manifest.size_bytes}
        print(json.dumps(outcome))
        return
    since = utc_text(manifest.at_ms)
    print(f"{place} is the broker of {since}: {len(manifest.files)} files, {manifest.size_bytes:,} bytes")
    print(f"what came after {since} is not in it:")
    print("- messages that were published or scheduled since are missing: reconcile, and an archive says which")
    print("- messages that were settled since are delivered again; scheduled ones that were canceled since fall due")
    print("- receipts that were given before now are stale")


def _restored_to_bookies(
    backup: Path, store: str, config: Path | None, *, shows: Callable[[int, int], None]
) -> tuple[Manifest, Restored]:  # fmt: skip
    from outbox_broker.cluster.cluster_admin import init_cluster
    from outbox_broker.cluster.cluster_cli import session_of, settings_of
    from outbox_broker.cluster.shard_names import BROKER_SHARD
    from outbox_broker.cluster.shard_openers import ledger_shards
    from outbox_broker.cluster.znode_records import ClusterKind
    from outbox_broker.server.store_restore import restore_to_bookies

    settings = settings_of(store, config)
    with session_of(settings) as (session, layout):
        init_cluster(session, layout, shards=1, kind=ClusterKind.BROKER)
    with ledger_shards(settings) as shards:
        return restore_to_bookies(backup, shards.shard(BROKER_SHARD), clock=SystemClock(), shows=shows)


def _toml(value: str | list[str]) -> str:
    """Returns a value as TOML writes it: as JSON does, but for characters beyond U+FFFF, and for DEL. In ASCII."""
    return re.sub(r"[^ -~]", lambda matched: f"\\U{ord(matched[0]):08x}", json.dumps(value, ensure_ascii=False))
