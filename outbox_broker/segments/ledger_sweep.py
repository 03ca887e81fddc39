"""Deletes ledgers of a cluster that no manifest names, a day after their epoch ended.

Such ledgers remain where a process died between two steps, and where a later epoch deleted a segment of an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outbox_broker.segments.ledger_manifest import ShardNode, decode_node, has_expired
from outbox_broker.segments.ledger_takeover import Shard, read_segments
from outbox_broker.segments.ledger_view import snapshot_entries
from outbox_broker.segments.ledgers import LedgerMissing, Ledgers, Manifests
from outbox_core.common.clock import Clock
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_DELETED_AT_ONCE: Final = 64


@dataclass(slots=True)
class SweepReport:
    """What a sweep found, in numbers of ledgers. `young`: no manifest names them, and they are not old enough yet."""

    seen: int = 0
    named: int = 0
    young: int = 0
    deleted: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSweeper:
    """Sweeps one cluster. Any number may run, beside the owners of the shards."""

    cluster: str
    ledgers: Ledgers
    manifests: Manifests
    clock: Clock
    retention_ms: int

    def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Delete what has expired; ledgers of other clusters and of other programs are not touched.

        Raises StorageFailed, ConfigurationError.
        """
        report = SweepReport()
        candidates: dict[str, list[tuple[int, int, int]]] = {}
        for ledger_id, metadata in self.ledgers.find():
            if metadata.get("outbox-cluster") == self.cluster.encode():
                report.seen += 1
                epoch, created_ms = int(metadata["outbox-epoch"]), int(metadata["outbox-created-ms"])
                candidates.setdefault(metadata["outbox-shard"].decode(), []).append((ledger_id, epoch, created_ms))
        for shard, found in candidates.items():
            self._sort(shard, found, report)
        if not dry_run:
            for start in range(0, len(report.deleted), _DELETED_AT_ONCE):
                self.ledgers.delete(report.deleted[start : start + _DELETED_AT_ONCE])
        logger.info("ledgers_swept", extra={"seen": report.seen, "deleted": len(report.deleted), "young": report.young})
        return report

    def _sort(self, shard: str, found: list[tuple[int, int, int]], report: SweepReport) -> None:
        now_ms = self.clock.now_ms()
        node, named = self._named(shard)
        for ledger_id, epoch, created_ms in found:
            if node is None:  # its first opening did not come to an end
                is_expired = now_ms - created_ms >= self.retention_ms
            else:
                is_expired = epoch < node.epoch and has_expired(
                    epoch, node.openings, now_ms=now_ms, retention_ms=self.retention_ms
                )
            if ledger_id in named:
                report.named += 1
            elif is_expired:
                report.deleted.append(ledger_id)
            else:
                report.young += 1

    def _named(self, shard: str) -> tuple[ShardNode | None, set[int]]:
        """Returns the shard's node, and the ledgers that its snapshot names.

        The records after it are not read: of earlier epochs they name no further ledger, and what they drop may not be
        confirmed yet. The snapshot was durable before the node named its ledger.
        """
        while True:
            found = self.manifests.read(shard)
            if found is None:
                return None, set()
            node = decode_node(found.value, cluster=self.cluster, shard=shard)
            at = Shard(
                cluster=self.cluster, name=shard, ledgers=self.ledgers, manifests=self.manifests, clock=self.clock
            )
            try:
                segments = read_segments(at, node.ledger, entries=snapshot_entries(self.ledgers, node.ledger))
            except LedgerMissing:
                later = self.manifests.read(shard)
                if later is None or later.version == found.version:
                    raise
                continue  # its owner began another manifest ledger meanwhile
            return node, {node.ledger, *segments.ledgers()}
