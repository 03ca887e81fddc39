"""The nodes of shards in ZooKeeper: one znode a shard, changed by its version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kazoo import exceptions as kazoo_errors
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError

from outbox_broker.segments.ledgers import ManifestNode
from outbox_core.common.errors import ConfigurationError, StorageFailed

_FOLDER: Final = "shards"


class ShardZnodes:
    """Manifests below `<root>/shards`, by a client that its owner starts and stops."""

    def __init__(self, client: KazooClient, root: str, *, request_ms_max: int = 5_000) -> None:
        """`root` is the cluster's path, as `/outbox/delay`."""
        self._client = client
        self._folder = f"{root.rstrip('/')}/{_FOLDER}"
        self._request_s_max = request_ms_max / 1000

    def read(self, shard: str) -> ManifestNode | None:
        """The newest value; see the port. A server of ZooKeeper may be behind: sync makes it catch up first."""
        path = self._path(shard)
        with suppress(kazoo_errors.NoNodeError):
            self._asked(lambda: self._client.sync_async(path))
        try:
            value, status = self._asked(lambda: self._client.get_async(path))
        except kazoo_errors.NoNodeError:
            return None
        return ManifestNode(value, status.version)

    def write(self, shard: str, value: bytes, *, version: int | None) -> int | None:
        """Compare and set; see the port."""
        path = self._path(shard)
        try:
            if version is None:
                self._asked(lambda: self._client.create_async(path, value, makepath=True))
                return 0
            return int(self._asked(lambda: self._client.set_async(path, value, version=version)).version)
        except (kazoo_errors.NodeExistsError, kazoo_errors.BadVersionError, kazoo_errors.NoNodeError):
            return None

    def shards(self) -> Sequence[str]:
        """Shards that have a node; see the port."""
        try:
            return sorted(self._asked(lambda: self._client.get_children_async(self._folder)))
        except kazoo_errors.NoNodeError:
            return []

    def _path(self, shard: str) -> str:
        return f"{self._folder}/{shard}"

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Wait for an answer. Raises StorageFailed if there is none: then a write may have happened."""
        try:
            return ask().get(timeout=self._request_s_max)
        except (kazoo_errors.NoNodeError, kazoo_errors.NodeExistsError, kazoo_errors.BadVersionError):
            raise
        except (kazoo_errors.NoAuthError, kazoo_errors.AuthFailedError) as error:
            raise ConfigurationError(
                f"ZooKeeper refuses access to {self._folder}: give the user and password that the cluster was made with"
            ) from error
        except (kazoo_errors.KazooException, KazooTimeoutError) as error:
            raise StorageFailed(f"ZooKeeper did not answer for {self._folder}: {error!r}") from error
