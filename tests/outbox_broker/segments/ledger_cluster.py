"""Opens segments on ledgers in memory, for tests."""

from __future__ import annotations

import threading
from typing import Any

from outbox_broker.segments.ledger import LedgerOptions, LedgerSegments
from outbox_broker.segments.ledger_sweep import LedgerSweeper
from outbox_broker.segments.ledger_takeover import Shard
from outbox_core.common.clock import ManualClock
from tests.outbox_broker.segments.memory_ledgers import Faults, MemoryLedgers, MemoryManifests

SHARD = "1-0007"


class LedgerCluster:
    """Ledgers, nodes and a clock that outlive the owners of the segments on them."""

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.ledgers = MemoryLedgers(seed, faults)
        self.manifests = MemoryManifests(self.ledgers)
        self.clock = ManualClock()

    def shard(self, name: str = SHARD, *, cluster: str = "trips") -> Shard:
        """One shard of the cluster."""
        return Shard(
            cluster=cluster, name=name, ledgers=self.ledgers, manifests=self.manifests, clock=self.clock
        )  # fmt: skip

    def open(self, **options: Any) -> LedgerSegments:
        """Take the shard over."""
        return LedgerSegments.open(self.shard(), options=LedgerOptions(**options))

    def sweeper(self, *, retention_ms: int = LedgerOptions().retention_ms) -> LedgerSweeper:
        """A sweeper of the cluster."""
        return LedgerSweeper(
            cluster="trips", ledgers=self.ledgers, manifests=self.manifests, clock=self.clock,
            retention_ms=retention_ms,
        )  # fmt: skip


class Told(threading.Event):
    """A pause in which the bookies are told what is confirmed."""

    def __init__(self, cluster: LedgerCluster) -> None:
        super().__init__()
        self._cluster = cluster

    def wait(self, timeout: float | None = None) -> bool:
        """Let the time pass."""
        self._cluster.ledgers.say_confirmed()
        return False
