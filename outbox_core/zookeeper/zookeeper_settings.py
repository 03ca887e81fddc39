"""Where ZooKeeper is (servers, root path) and how to log in; the settings of a login, which several services have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import shown_url, split_url
from outbox_core.runtime.config_files import read_optional_secret
from outbox_core.runtime.settings import Table

PORT: Final = 2181
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_PATH: Final = re.compile(r"(/[A-Za-z0-9._-]+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperSecurity:
    """SASL (DIGEST-MD5) and TLS to ZooKeeper. With a user, znodes are made for that user alone."""

    user: str | None = None
    password: str | None = None
    tls: bool = False
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise ConfigurationError("SASL to ZooKeeper needs both a user and a password file")
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("a client certificate for ZooKeeper needs both its file and that of its key")
        if not self.tls and (self.ca_file is not None or self.certificate is not None):
            raise ConfigurationError("a CA file or a certificate for ZooKeeper is for TLS: set zookeeper_tls too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperAddress:
    """`hosts`: `zk1:2181,zk2:2181`; `root`: the absolute path of the znodes."""

    hosts: str
    root: str

    @classmethod
    def parse(cls, url: str, *, example: str) -> ZooKeeperAddress:
        """Returns the parts of `scheme://zk1,zk2,zk3/path`; `example`: an address of the same scheme, for errors.

        Raises ConfigurationError that names the mistake.
        """
        parts = split_url(url)
        cure = f"an address looks like {example}"
        if parts.scheme != split_url(example).scheme or parts.query or parts.fragment:
            raise ConfigurationError(f"not an address in ZooKeeper: {shown_url(url)!r}; {cure}")
        if "@" in parts.netloc:
            raise ConfigurationError("an address in ZooKeeper has no user and password: they are options of their own")
        hosts = [_with_port(host, cure) for host in parts.netloc.split(",")]
        root = parts.path.rstrip("/")
        if not _PATH.fullmatch(root) or {".", ".."} & set(root.split("/")):
            raise ConfigurationError(f"the path in ZooKeeper is one or more names, not {parts.path!r}; {cure}")
        return cls(hosts=",".join(hosts), root=root)


def _with_port(host: str, cure: str) -> str:
    matched = _HOST.fullmatch(host)
    if matched is None:
        raise ConfigurationError(f"not a ZooKeeper server: {host!r}; {cure}")
    return host if matched[2] else f"{host}:{PORT}"


class ZooKeeperTable(Table):
    """A table of a service that asks ZooKeeper: SASL with a user and a password file, and TLS."""

    zookeeper_user: str | None = None
    zookeeper_password_file: Path | None = None
    zookeeper_tls: bool = False
    zookeeper_ca_file: Path | None = None
    zookeeper_certificate: Path | None = None
    zookeeper_key: Path | None = None

    @property
    def zookeeper_security(self) -> ZooKeeperSecurity:
        """The login. Reads the password. Raises ConfigurationError."""
        return ZooKeeperSecurity(
            user=self.zookeeper_user,
            password=read_optional_secret(self.zookeeper_password_file, what="ZooKeeper password"),
            tls=self.zookeeper_tls,
            ca_file=self.zookeeper_ca_file,
            certificate=self.zookeeper_certificate,
            key=self.zookeeper_key,
        )
