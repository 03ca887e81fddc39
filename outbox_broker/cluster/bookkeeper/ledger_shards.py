"""Opens the shards of a cluster on BookKeeper's ledgers, by one client of BookKeeper and one of ZooKeeper a process."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from pathlib import Path

from kazoo import exceptions as kazoo_errors
from kazoo.handlers.threading import KazooTimeoutError

from outbox_broker.cluster.bookie_room import BookieSpace
from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions, JavaLedgers
from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_broker.cluster.bookkeeper.shard_znodes import ShardZnodes
from outbox_broker.cluster.bookkeeper.zookeeper_login import set_zookeeper_login
from outbox_broker.cluster.shard_host import OpenedShard
from outbox_broker.segments.ledger import LedgerSegments
from outbox_broker.segments.ledger_sweep import LedgerSweeper
from outbox_broker.segments.ledger_takeover import Shard
from outbox_broker.segments.ledger_view import LedgerView
from outbox_core.common.clock import SystemClock
from outbox_core.zookeeper.zookeeper_errors import CoordinatorUnavailable
from outbox_core.zookeeper.zookeeper_session import SessionOptions, zookeeper_client
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress


class LedgerShards:
    """close() after the last shard is closed, and before the process ends."""

    def __init__(
        self,
        cluster: str,
        address: ZooKeeperAddress,
        *,
        session: SessionOptions,
        metadata_uri: str,
        jars: Path,
        options: BookKeeperOptions,
    ) -> None:
        """Connect. `cluster`: its identity, which manifests and ledgers carry. Raises ConfigurationError,
        CoordinatorUnavailable.
        """
        self._cluster = cluster
        self._clock = SystemClock()
        self._first_opening = threading.Lock()
        self._is_opened = False
        # A session of its own: the node's ends for good with its ownerships, and a manifest is changed by its version.
        self._zookeeper = zookeeper_client(address, session, logging.getLogger(__name__))
        try:
            self._zookeeper.start(timeout=session.request_ms_max / 1000)
        except (KazooTimeoutError, kazoo_errors.KazooException) as error:
            self._zookeeper.close()
            raise CoordinatorUnavailable(f"no ZooKeeper server of {address.hosts} answers: {error}") from error
        self._manifests = ShardZnodes(self._zookeeper, address.root, request_ms_max=session.request_ms_max)
        try:
            runtime = JavaRuntime.start(jars=jars)
            set_zookeeper_login(runtime, session.security)
            self._ledgers = JavaLedgers(runtime, metadata_uri, options=options)
        except BaseException:
            self._end_session()
            raise

    def open(self, shard: str) -> OpenedShard:
        """Take a shard over, fencing all earlier writers. Raises StorageFailed, which is tried again."""
        # JPype looks for a Java method's overloads at its first call, with no lock of its own: of four shards that were
        # opened at once a thread read what another had begun to write, and the process died by a signal. So one shard
        # is opened alone, which makes every call of an opening once.
        with self._first_opening if not self._is_opened else nullcontext():
            store = LedgerSegments.open(self.shard(shard))
            self._is_opened = True
        return OpenedShard(store=store, epoch=store.epoch, annotations=store.annotations, close=store.close)

    def view(self, shard: str) -> LedgerView | None:
        """Returns a shard's segments as they are now, without taking it over; None if it was never opened.

        Raises ConfigurationError, StorageFailed, SegmentDamaged.
        """
        return LedgerView.open(self.shard(shard))

    def ledgers_in_one_zone(self) -> int:
        """Returns how many ledgers of this cluster have entries all of whose copies are in one zone. Raises
        LedgerFailed.
        """
        cluster = self._cluster.encode()
        found = self._ledgers.find_in_one_zone()
        return sum(metadata.get("outbox-cluster") == cluster for _, metadata in found)

    def bookie_spaces(self) -> list[BookieSpace]:
        """Returns the disks of the bookies that answer. Raises LedgerFailed."""
        return self._ledgers.bookie_spaces()

    def sweeper(self, *, retention_ms: int) -> LedgerSweeper:
        """Returns what deletes the ledgers of this cluster that no manifest names, so long after their epoch ended."""
        return LedgerSweeper(
            cluster=self._cluster, ledgers=self._ledgers, manifests=self._manifests, clock=self._clock,
            retention_ms=retention_ms,
        )  # fmt: skip

    def shard(self, name: str) -> Shard:
        """Returns a shard, and what holds it."""
        return Shard(
            cluster=self._cluster, name=name, ledgers=self._ledgers, manifests=self._manifests, clock=self._clock
        )

    def close(self) -> None:
        """End both clients."""
        self._ledgers.close()
        self._end_session()

    def _end_session(self) -> None:
        self._zookeeper.stop()
        self._zookeeper.close()
