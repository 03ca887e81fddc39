"""What `outbox delay init`, `status`, `drain` and `sweep` do with a cluster: its znodes, its state, the hand-over of a
node, and ledgers that nothing names any more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from outbox_core.runtime.terminal_text import escaped

if TYPE_CHECKING:
    from outbox_broker.cluster.bookie_zones import BookieZones
    from outbox_broker.cluster.cluster_admin import ClusterState
    from outbox_broker.cluster.cluster_settings import ClusterSettings
    from outbox_broker.cluster.znode_records import ZnodeLayout
    from outbox_core.zookeeper.zookeeper_session import ZooKeeperSession

Store = Annotated[str, typer.Option(help="The cluster's address: bookkeeper://zk1,zk2,zk3/path.")]
Config = Annotated[Path | None, typer.Option(help="TOML file with a table [cluster].")]
SHARDS: Final = 8
"""Of a new generation. Each shard has buckets, and so ledgers, of its own: 64 made six times as many of them."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def init(
    store: Store,
    shards: Annotated[
        int, typer.Option(help="Shards of the generation; cannot be changed later. At least one a node.")
    ] = SHARDS,
    add_generation: Annotated[
        bool, typer.Option("--add-generation", help="Add shards to a cluster: publishes go to them from then on.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a cluster's znodes. Idempotent.

    Example: outbox delay init --store bookkeeper://zk1,zk2,zk3/outbox/delay --shards 8
    """
    from outbox_broker.cluster import cluster_admin

    with session_of(settings_of(store, config)) as (session, layout):
        change = cluster_admin.add_generation if add_generation else cluster_admin.init_cluster
        made = change(session, layout, shards=shards)
    if as_json:
        print(json.dumps({"cluster": made.cluster, "generations": made.generations}))
    else:
        print(f"cluster {made.cluster} at {layout.root}: shards by generation: {made.generations}")


def show_cluster(store: str, config: Path | None, *, as_json: bool) -> None:
    """Print nodes and shards, why shards wait, and whether a bookie can be spared. Exit status 1 if any shard waits."""
    from outbox_broker.cluster.cluster_admin import read_state

    settings = settings_of(store, config)
    with session_of(settings) as (session, layout):
        state = read_state(session, layout)
    bookies, text = _bookies(settings)
    if as_json:
        print(json.dumps(_as_data(state) | {"bookies": bookies}))
    else:
        print(_as_text(state))
        print(escaped(text, but="\n"))
    if state.waiting:
        raise typer.Exit(1)


def drain(
    store: Store,
    node: Annotated[str, typer.Option(help="The node's name, as `status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let the node take shards again.")] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Have a node hand its shards over and take no more.

    Until --undo. A node that is stopped does so by itself.

    Example: outbox delay drain --store bookkeeper://zk1,zk2,zk3/outbox/delay --node delay-3
    """
    from outbox_broker.cluster.cluster_admin import request_drain

    with session_of(settings_of(store, config)) as (session, layout):
        request_drain(session, layout, name=node, undo=undo)
    if as_json:
        print(json.dumps({"node": node, "drain": not undo}))
    else:
        print(f"node {node} {'takes shards again' if undo else 'hands its shards over; `status` shows when'}")


def sweep_ledgers(store: str, config: Path | None, *, retention: str, dry_run: bool, as_json: bool) -> None:
    """Delete ledgers that no manifest of the cluster names, and print how many."""
    from outbox_broker.cluster.shard_openers import ledger_shards
    from outbox_core.common.errors import ConfigurationError
    from outbox_core.runtime.durations_and_sizes import parse_duration_ms

    settings = settings_of(store, config)
    try:
        retention_ms = parse_duration_ms(retention)
    except ValueError as error:
        raise ConfigurationError(f"--retention: {error}") from error
    with ledger_shards(settings) as shards:
        report = shards.sweeper(retention_ms=retention_ms).sweep(dry_run=dry_run)
        in_one_zone = None if settings.zone_file is None else shards.ledgers_in_one_zone()
    if as_json:
        print(json.dumps({"ledgers": report.seen, "named": report.named, "young": report.young,
                          "deleted": report.deleted, "dry_run": dry_run, "in_one_zone": in_one_zone}))  # fmt: skip
    else:
        word = "would be deleted" if dry_run else "deleted"
        print(
            f"{report.seen} ledgers of this cluster: {report.named} named by a manifest, {report.young} not named and "
            f"younger than {retention}, {len(report.deleted)} {word}"
        )
        if in_one_zone is not None:
            print(f"{in_one_zone} ledgers have entries all of whose copies are in one zone")


def settings_of(store: str, config: Path | None) -> ClusterSettings:
    """Returns the settings of the cluster at an address. Raises ConfigurationError."""
    from outbox_broker.cluster.cluster_settings import load_cluster_settings

    return load_cluster_settings({"store": store}, file=config)


@contextmanager
def session_of(settings: ClusterSettings) -> Iterator[tuple[ZooKeeperSession, ZnodeLayout]]:
    """Yields a session with a cluster's ZooKeeper, and its paths."""
    from outbox_broker.cluster.znode_records import ZnodeLayout
    from outbox_core.zookeeper.zookeeper_session import ZooKeeperSession

    session = ZooKeeperSession(settings.address, options=settings.session)
    try:
        yield session, ZnodeLayout(settings.address.root)
    finally:
        session.close()


def _bookies(settings: ClusterSettings) -> tuple[dict[str, Any] | None, str]:
    """Returns what is known of the bookies, for JSON and for people. The nodes show even where that is nothing."""
    from outbox_broker.cluster.bookie_list import read_bookies
    from outbox_core.common.errors import OutboxError

    if settings.shared_folder is not None:
        return None, f"segments are in {settings.shared_folder}"
    try:
        bookies = read_bookies(
            settings.metadata_uri, options=settings.session, ensemble=settings.ensemble, tls=settings.bookie_tls
        )
    except OutboxError as error:
        return {"error": str(error)}, f"bookies: not known: {error}"
    data, text = bookies.as_data(), bookies.as_text()
    try:
        zones = _zones(settings, bookies.usable)
    except OutboxError as error:
        return data | {"zones": {"error": str(error)}}, f"{text}\nzones: not known: {error}"
    return (data, text) if zones is None else (data | {"zones": zones.as_data()}, f"{text}\n{zones.as_text()}")


def _zones(settings: ClusterSettings, bookies: Sequence[str]) -> BookieZones | None:
    from outbox_broker.cluster.bookie_zones import compare_zones
    from outbox_broker.cluster.zone_file import ZoneFile

    if settings.zone_file is None:
        return None
    zones = ZoneFile(settings.zone_file).map
    return compare_zones(
        bookies, zones, ensemble=settings.ensemble, last_zone=settings.last_zone, script=settings.zone_script
    )  # fmt: skip


def _as_data(state: ClusterState) -> dict[str, Any]:
    view = state.view
    leader = None if view.leader is None else view.nodes.get(view.leader)
    owned = Counter(owner.node for owner in view.owners.values())
    return {
        "cluster": state.config.cluster,
        "generations": state.config.generations,
        "leader": None if leader is None else leader.name,
        "nodes": [
            {"name": record.name, "url": record.url, "zone": record.zone, "version": record.version,
             "shards": owned[node], "unable": record.unable, "refuses": record.refuses}
            for node, record in sorted(view.nodes.items(), key=lambda one: one[1].name)
        ],
        "shards": {
            shard: {"node": view.nodes[owner.node].name if owner.node in view.nodes else None, "state": owner.state,
                    "epoch": state.epochs.get(shard)}
            for shard, owner in sorted(view.owners.items())
        },
        "waiting": dict(state.waiting),
    }  # fmt: skip


def _as_text(state: ClusterState) -> str:
    data = _as_data(state)
    lines = [f"cluster {data['cluster']}, leader {data['leader']}, shards by generation {data['generations']}"]
    for node in data["nodes"]:
        zone = f" in {node['zone']}" if node["zone"] else ""
        unable = f", takes no shards: {node['unable']}" if node["unable"] else ""
        refuses = f", refuses publishes: {node['refuses']}" if node["refuses"] else ""
        lines.append(f"node {node['name']}{zone} at {node['url']}: {node['shards']} shards{unable}{refuses}")
    lines += [f"shard {shard} waits: {reason}" for shard, reason in data["waiting"].items()]
    return "\n".join(map(escaped, lines))
