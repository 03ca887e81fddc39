"""The cluster's znodes: their paths, and what they contain as JSON. No ZooKeeper client.

<root>/config           ClusterConfig, written by `outbox delay init`, or by the first node of a broker
<root>/nodes/<id>       NodeRecord, ephemeral; the id is that of the node's session
<root>/contacts/<id>    ephemeral, written at each beat of the node
<root>/leader           LeaderRecord, ephemeral: the node that assigns
<root>/assignment       AssignmentRecord, changed by compare-and-set
<root>/drains/<name>    a node of this name is to hand its shards over and take no others
<root>/owners/<shard>   OwnerRecord, ephemeral: its creation is the ownership, and its creation's zxid the epoch
<root>/shards/<shard>   the manifest of the shard's segments, which outbox_broker.segments writes
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError
from outbox_core.protocol.decoder_cache import json_decoder

Record = TypeVar("Record", bound=msgspec.Struct)
FORMAT: Final = 1
"""The version of these records. A node refuses a cluster of a later one."""
REASON_CHARS_MAX: Final = 500


class ClusterKind(StrEnum):
    """What the shards of a cluster are."""

    DELAY = "delay"
    """Schedules, whose messages are published to another broker."""
    BROKER = "broker"
    """One engine: a broker."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes of a cluster agree on."""

    cluster: str
    """A random id, made at init, by which a node notices that it was pointed at another cluster."""
    generations: list[int]
    """The number of shards of each generation; the last one gets what is published."""
    format: int = FORMAT
    kind: ClusterKind = ClusterKind.DELAY


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One live node. `url` is for clients, `peer_url` for the other nodes. `unable`: why it takes no shards now.
    `refuses`: why it refuses publishes, though it sends and cancels.
    """

    name: str
    url: str
    peer_url: str
    version: str
    zone: str | None = None
    capacity: int | None = None
    unable: str | None = None
    refuses: str | None = None


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The node that assigns."""

    node: str


class AssignmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The node of each shard as the leader decided; a shard that no node has room for is missing."""

    leader: str
    shards: dict[str, str]


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of one shard, and what it does with it; `reason`: why it cannot open the shard."""

    node: str
    state: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ZnodeLayout:
    """The paths below the root of one cluster."""

    root: str

    @property
    def config(self) -> str:
        """The path of the configuration."""
        return f"{self.root}/config"

    @property
    def nodes(self) -> str:
        """The folder of the nodes."""
        return f"{self.root}/nodes"

    @property
    def contacts(self) -> str:
        """The folder of the nodes' contacts."""
        return f"{self.root}/contacts"

    @property
    def leader(self) -> str:
        """The path of the leader."""
        return f"{self.root}/leader"

    @property
    def assignment(self) -> str:
        """The path of the assignment."""
        return f"{self.root}/assignment"

    @property
    def drains(self) -> str:
        """The folder of the requests to drain."""
        return f"{self.root}/drains"

    @property
    def owners(self) -> str:
        """The folder of the owners."""
        return f"{self.root}/owners"

    @property
    def shards(self) -> str:
        """The folder of the manifests."""
        return f"{self.root}/shards"

    @property
    def folders(self) -> tuple[str, ...]:
        """The persistent znodes that init makes, apart from the configuration and the assignment."""
        return self.nodes, self.contacts, self.drains, self.owners, self.shards

    def node(self, node_id: str) -> str:
        """Returns the path of a node."""
        return f"{self.nodes}/{node_id}"

    def contact(self, node_id: str) -> str:
        """Returns the path of a node's contact."""
        return f"{self.contacts}/{node_id}"

    def drain(self, name: str) -> str:
        """Returns the path of the request that the node of a name drains."""
        return f"{self.drains}/{name}"

    def owner(self, shard: str) -> str:
        """Returns the path of a shard's owner."""
        return f"{self.owners}/{shard}"


def encode(record: msgspec.Struct) -> bytes:
    """Returns a record as JSON."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[Record], *, path: str) -> Record:
    """Returns the record in a znode. Raises ConfigurationError naming the znode, which another program wrote then."""
    try:
        return json_decoder(kind).decode(data)
    except DECODE_ERRORS as error:
        raise ConfigurationError(f"the znode {path} does not contain a {kind.__name__} of this cluster") from error


def require_kind(config: ClusterConfig, kind: ClusterKind, *, root: str) -> None:
    """Raise ConfigurationError unless a cluster is of this kind."""
    if config.kind is not kind:
        here = "a broker" if config.kind is ClusterKind.BROKER else "a delay cluster"
        raise ConfigurationError(f"{root} is the path of {here}: name another path in --store")


def decode_config(data: bytes, *, path: str) -> ClusterConfig:
    """Returns the configuration. Raises ConfigurationError for one that a later version wrote, or another program."""
    try:
        written: Any = msgspec.json.decode(data)
    except DECODE_ERRORS:
        written = None
    version = written.get("format") if isinstance(written, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise ConfigurationError(
            f"the cluster at {path} has format {version}, and this program knows up to {FORMAT}: upgrade this node"
        )
    return decode(data, ClusterConfig, path=path)
