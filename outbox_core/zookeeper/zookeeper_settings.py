"""The settings of a login to ZooKeeper, which the tables of several services have."""

from __future__ import annotations

from pathlib import Path

from outbox_core.runtime.config_files import read_optional_secret
from outbox_core.runtime.settings import Table
from outbox_core.zookeeper.zookeeper_address import ZooKeeperSecurity


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
