"""The settings of a cluster's nodes and of its commands, declared; runtime/settings.py loads them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationInfo, field_validator

from outbox_broker.cluster.bookie_tls import BookieTls
from outbox_broker.cluster.memory_budget import MemoryBudget
from outbox_broker.cluster.zone_file import LastZone
from outbox_core.assignment.even_assignment import check_zone
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.config_files import read_optional_secret
from outbox_core.runtime.durations_and_sizes import parse_setting
from outbox_core.runtime.settings import ServiceSettings, load_settings
from outbox_core.zookeeper.zookeeper_session import SessionOptions
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress, ZooKeeperTable

ADDRESS_EXAMPLE: Final = "bookkeeper://zk1:2181,zk2:2181,zk3:2181/outbox/delay"
"""What the address of a delay cluster looks like."""


class ClusterSettings(ZooKeeperTable):
    """A name here is an environment variable OUTBOX_CLUSTER__NAME and a key of `[cluster]` in the TOML file.

    There, a `..._ms` may be written as "5s", a `..._bytes` as "128MiB".
    """

    store: str
    """The cluster's address: bookkeeper://zk1:2181,zk2:2181,zk3:2181/outbox/delay."""
    shared_folder: Path | None = None
    """Segments in a folder that all nodes share, in place of BookKeeper."""
    ledgers_uri: str | None = None
    """BookKeeper's metadataServiceUri; by default `/ledgers` of the same ZooKeeper servers."""
    ledgers_password_file: Path | None = None
    """The digest password of the ledgers: the same for all nodes and for ever."""
    ledgers_tls: bool = False
    """TLS to the bookies."""
    ledgers_ca_file: Path | None = None
    """Who signed the bookies' certificates."""
    ledgers_certificate: Path | None = None
    """With its key (PKCS #8), for bookies that ask for a client's certificate."""
    ledgers_key: Path | None = None
    ensemble: int = Field(default=3, ge=1)
    write_quorum: int = Field(default=3, ge=1)
    ack_quorum: int = Field(default=2, ge=1)
    zone_file: Path | None = None
    """The zones of the bookies, see cluster/zone_file.py; it may change while nodes run."""
    zone_script: Path | None = None
    """The script by which AutoRecovery knows zones, for `status` to compare."""
    last_zone: LastZone = LastZone.STOP
    """What becomes of writes when the bookies of one zone are left."""
    bookie_usage_max: float = Field(default=0.9, gt=0, le=1)
    """Up to which part of its disks is used a bookie has room for new messages."""
    bookie_check_ms: int = Field(default=10_000, ge=100)
    """How often a node asks the bookies for that."""
    name: str | None = Field(default=None, min_length=1, max_length=255)
    zone: str | None = None
    capacity: int | None = Field(default=None, ge=0)
    """The most shards that the node takes."""
    advertised_url: str | None = None
    """Where clients reach the node, if that is not where it listens."""
    peer_host: str = "127.0.0.1"
    """The address on which the node listens for other nodes, and under which they reach it."""
    peer_port: int = Field(default=0, ge=0, le=65535)
    peer_token_file: Path | None = None
    """The token that nodes show each other: the same for all nodes."""
    peer_ca_file: Path | None = None
    memory_bytes: int = Field(default=MemoryBudget().bytes_max, ge=1)
    """Messages in memory that are not in a bucket yet, of all shards of the node."""
    session_ms: int = Field(default=SessionOptions().session_ms, ge=1_000, le=60_000)
    drain_ms: int = Field(default=30_000, ge=0)
    """How long a node that stops waits for others to take its shards over."""

    @field_validator("*", mode="before")
    @classmethod
    def _written(cls, value: object, info: ValidationInfo) -> object:
        return parse_setting(info.field_name or "", value)

    @field_validator("zone")
    @classmethod
    def _of_a_registry(cls, value: str | None) -> str | None:
        """Other nodes read it, and ignore one that their registry could not hold."""
        try:
            check_zone(value)
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        return value

    @property
    def address(self) -> ZooKeeperAddress:
        """The cluster's place in ZooKeeper. Raises ConfigurationError."""
        return ZooKeeperAddress.parse(self.store, example=ADDRESS_EXAMPLE)

    @property
    def session(self) -> SessionOptions:
        """How to connect to ZooKeeper. Raises ConfigurationError."""
        return SessionOptions(
            session_ms=self.session_ms, request_ms_max=self.session_ms, security=self.zookeeper_security
        )

    @property
    def metadata_uri(self) -> str:
        """Where BookKeeper's client finds the metadata of the ledgers."""
        return self.ledgers_uri or f"zk+longhierarchical://{self.address.hosts.replace(',', ';')}/ledgers"

    @property
    def ledgers_password(self) -> bytes:
        """The ledgers' digest password. Raises ConfigurationError."""
        return (read_optional_secret(self.ledgers_password_file, what="ledgers password") or "").encode()

    @property
    def bookie_tls(self) -> BookieTls | None:
        """How to encrypt what goes to bookies; None: not at all. Raises ConfigurationError."""
        files = (self.ledgers_ca_file, self.ledgers_certificate, self.ledgers_key)
        if not self.ledgers_tls:
            if any(files):
                raise ConfigurationError("a CA file or a certificate for the ledgers is for TLS: set ledgers_tls too")
            return None
        if self.ledgers_ca_file is None:
            raise ConfigurationError("ledgers_tls needs ledgers_ca_file, the CA that signed the bookies' certificates")
        return BookieTls(
            ca_file=self.ledgers_ca_file, certificate=self.ledgers_certificate, key=self.ledgers_key
        )  # fmt: skip

    @property
    def peer_token(self) -> str | None:
        """The nodes' token. Raises ConfigurationError."""
        return read_optional_secret(self.peer_token_file, what="peer token")

    def node_name(self, host: str, port: int) -> str:
        """Returns the node's name: by default where it listens, and the machine's name where that is everywhere."""
        return self.name or f"{_reachable(host)}:{port}"

    def url(self, host: str, port: int, *, is_tls: bool) -> str:
        """Returns where clients reach the node: by default where it listens."""
        return self.advertised_url or f"{'https' if is_tls else 'http'}://{_reachable(host)}:{port}"

    @property
    def beat_ms(self) -> int:
        """The interval of contacts: several fit into the lease."""
        return self.session_ms * 4 // 25


def _reachable(host: str) -> str:
    """Returns what others call a host: nodes that listen on all addresses would all have the same name."""
    with suppress(ValueError):  # it is a name
        if ip_address(host).is_unspecified:
            return socket.gethostname()
    return host


class ClusterTables(ServiceSettings):
    """The tables of the file that a node of a delay cluster reads beside the broker's."""

    cluster: ClusterSettings

    def check(self) -> None:
        """Raise ConfigurationError for an address, a login or a password file that cannot be used."""
        cluster = self.cluster
        _ = (cluster.address, cluster.session, cluster.ledgers_password, cluster.bookie_tls, cluster.peer_token)


def load_cluster_settings(flags: Mapping[str, Any], *, file: Path | None) -> ClusterSettings:
    """Returns the settings; flags that are None were not given. Raises ConfigurationError, see load_settings."""
    return load_settings(ClusterTables, {"cluster": flags}, file=file).cluster
