"""Makes a cluster's znodes, adds a generation of shards, and reads the cluster's state. For the command line."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from outbox_broker.cluster.shard_decision import ClusterView, why_waiting
from outbox_broker.cluster.shard_names import ShardMap, check_generations
from outbox_broker.cluster.znode_records import (
    ClusterConfig,
    ClusterKind,
    ZnodeLayout,
    decode_config,
    encode,
    require_kind,
)
from outbox_broker.cluster.zookeeper_registry import read_view
from outbox_core.common.errors import ConfigurationError
from outbox_core.zookeeper.zookeeper_errors import CoordinatorUnavailable
from outbox_core.zookeeper.zookeeper_session import ZooKeeperSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """A cluster as it was read; `waiting`: shard -> why nobody serves it."""

    config: ClusterConfig
    view: ClusterView
    epochs: Mapping[str, int]
    waiting: Mapping[str, str]


def init_cluster(
    session: ZooKeeperSession, layout: ZnodeLayout, *, shards: int, kind: ClusterKind = ClusterKind.DELAY
) -> ClusterConfig:
    """Make a cluster with one generation of shards; idempotent. Raises ConfigurationError if it has others already, or
    is of another kind.
    """
    check_generations([shards])
    for folder in layout.folders:
        session.create(folder, b"")
    config = ClusterConfig(cluster=secrets.token_hex(8), generations=[shards], kind=kind)
    if session.create(layout.config, encode(config)) is None:
        config = read_config(session, layout)
        require_kind(config, kind, root=layout.root)
        if config.generations != [shards]:
            raise ConfigurationError(
                f"the cluster at {layout.root} exists, with {_words(config.generations)}; "
                "`outbox delay init --add-generation` adds shards"
            )
    return config


def add_generation(session: ZooKeeperSession, layout: ZnodeLayout, *, shards: int) -> ClusterConfig:
    """Add a generation of shards, which publishes go to from then on. Nodes take it up at their next beat."""
    znode = session.read(layout.config)
    if znode is None:
        raise _missing(layout)
    config = decode_config(znode.data, path=layout.config)
    require_kind(config, ClusterKind.DELAY, root=layout.root)
    grown = msgspec.structs.replace(config, generations=[*config.generations, shards])
    check_generations(grown.generations)
    if session.write(layout.config, encode(grown), version=znode.version) is None:
        raise CoordinatorUnavailable("another program changed the configuration at the same time: look, and repeat")
    return grown


def request_drain(session: ZooKeeperSession, layout: ZnodeLayout, *, name: str, undo: bool) -> None:
    """Ask the node of this name to hand its shards over, or no longer to. Idempotent."""
    if not name or "/" in name or not name.isprintable():
        raise ConfigurationError(f"not the name of a node: {name!r}")
    read_config(session, layout)
    if undo:
        session.delete(layout.drain(name))
    else:
        session.create(layout.drain(name), b"")


def read_config(session: ZooKeeperSession, layout: ZnodeLayout) -> ClusterConfig:
    """Returns a cluster's configuration. Raises ConfigurationError if there is none."""
    znode = session.read(layout.config)
    if znode is None:
        raise _missing(layout)
    return decode_config(znode.data, path=layout.config)


def read_state(session: ZooKeeperSession, layout: ZnodeLayout) -> ClusterState:
    """Returns nodes, owners, epochs, and the shards that wait."""
    config = read_config(session, layout)
    view = read_view(session, layout)
    shards = ShardMap(config.generations).names()
    owners = session.read_all([layout.owner(shard) for shard in view.owners])
    epochs = {shard: znode.epoch for shard, znode in zip(view.owners, owners, strict=True) if znode is not None}
    waiting = {shard: reason for shard in shards if (reason := why_waiting(shard, view)) is not None}
    return ClusterState(config=config, view=view, epochs=epochs, waiting=waiting)


def _missing(layout: ZnodeLayout) -> ConfigurationError:
    return ConfigurationError(
        f"there is no cluster at {layout.root}: a delay cluster is made by `outbox delay init`, a broker by the first "
        "`outbox broker serve --store`; or correct the path"
    )


def _words(generations: Sequence[int]) -> str:
    return ", ".join(f"{shards} shards in generation {number}" for number, shards in enumerate(generations))
