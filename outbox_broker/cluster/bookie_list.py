"""Reads which bookies of a BookKeeper cluster accept entries, from their registrations in ZooKeeper. Without Java.

With TLS, each bookie is also asked for it: one whose certificate expired is registered, and of no use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from outbox_broker.cluster.bookie_tls import BookieTls, tls_problems
from outbox_core.common.errors import ConfigurationError
from outbox_core.zookeeper.zookeeper_session import SessionOptions, ZooKeeperSession
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress

_URI: Final = re.compile(r"zk(?:\+[a-z]+)?://(?P<hosts>[^/]+)(?P<root>(/[A-Za-z0-9._-]+)+)")
_READ_ONLY: Final = "readonly"


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieList:
    """The bookies that are registered; `ensemble`: how many a new ledger needs; `tls_problems`: why no TLS connection
    can be made to some of them.
    """

    writable: tuple[str, ...]
    read_only: tuple[str, ...]
    ensemble: int
    tls_problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> tuple[str, ...]:
        """Those that this cluster's nodes can write to."""
        return tuple(name for name in self.writable if name not in self.tls_problems)

    @property
    def warning(self) -> str | None:
        """Why ledgers cannot be made, or no bookie be lost; None if one can."""
        if len(self.usable) < self.ensemble:
            return f"no ledger can be made, and no shard opened: that needs {self.ensemble} writable bookies"
        if len(self.usable) == self.ensemble:
            return "no bookie can be spared: without one of them no shard can be opened; start another one"
        return None

    def as_data(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return {
            "writable": list(self.writable), "read_only": list(self.read_only), "ensemble": self.ensemble,
            "tls_problems": dict(self.tls_problems), "warning": self.warning,
        }  # fmt: skip

    def as_text(self) -> str:
        """Returns a line for people, one for each bookie with a problem, and one with the warning."""
        full = f", {len(self.read_only)} read-only ({', '.join(self.read_only)})" if self.read_only else ""
        lines = [f"bookies: {len(self.writable)} writable{full}; a ledger has {self.ensemble}"]
        lines += [f"bookie {name}: {problem}" for name, problem in self.tls_problems.items()]
        lines += [] if self.warning is None else [f"WARNING: {self.warning}"]
        return "\n".join(lines)


def read_bookies(
    metadata_uri: str, *, options: SessionOptions, ensemble: int, tls: BookieTls | None = None
) -> BookieList:
    """Returns the bookies of the cluster at a metadataServiceUri, as `zk+longhierarchical://zk1:2181;zk2:2181/ledgers`.

    Each is asked for TLS where that is given. Raises ConfigurationError if there is no BookKeeper cluster,
    CoordinatorUnavailable if no server answers.
    """
    parts = _URI.fullmatch(metadata_uri)
    if parts is None:
        raise ConfigurationError(f"ledgers_uri looks like zk+longhierarchical://zk1:2181/ledgers, not {metadata_uri!r}")
    address = ZooKeeperAddress(hosts=parts["hosts"].replace(";", ","), root=parts["root"])
    session = ZooKeeperSession(address, options=options)
    try:
        folder = f"{address.root}/available"
        if session.read(folder) is None:
            raise ConfigurationError(
                f"there is no BookKeeper cluster at {address.root}: correct ledgers_uri in [cluster]"
            )
        names = session.children(folder)
        is_any_read_only = _READ_ONLY in names
        read_only = session.children(f"{folder}/{_READ_ONLY}") if is_any_read_only else []
    finally:
        session.close()
    writable = tuple(name for name in names if name != _READ_ONLY)
    problems = {} if tls is None else tls_problems((*writable, *read_only), tls, timeout_ms=options.request_ms_max)
    return BookieList(writable=writable, read_only=tuple(read_only), ensemble=ensemble, tls_problems=problems)
