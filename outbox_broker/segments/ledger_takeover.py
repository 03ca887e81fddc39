"""Takes a shard over: fences every ledger of the epoch before, and names a new manifest ledger in the shard's node.

The order is the proof. Once the manifest ledger is fenced, the earlier writer can name no new ledger; once all ledgers
that it names are fenced, nothing that it appends is acknowledged; only then does the node name the new epoch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from outbox_broker.segments import ledger_manifest
from outbox_broker.segments.ledger_manifest import (
    EpochStart,
    SealedSegment,
    SegmentMap,
    SegmentsSealed,
    ShardNode,
    change_count,
)
from outbox_broker.segments.ledger_reads import read_records
from outbox_broker.segments.ledger_records import entries_of
from outbox_broker.segments.ledgers import LedgerFailed, LedgerMissing, Ledgers, LedgerWriter, Manifests
from outbox_broker.segments.port import WriterFenced
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard, and what holds it."""

    cluster: str
    name: str
    ledgers: Ledgers
    manifests: Manifests
    clock: Clock

    def metadata(self, *, epoch: int, segment: str) -> dict[str, bytes]:
        """Returns what a ledger of this shard is created with."""
        return {
            "outbox-cluster": self.cluster.encode(),
            "outbox-shard": self.name.encode(),
            "outbox-epoch": str(epoch).encode(),
            "outbox-segment": segment.encode(),
            "outbox-created-ms": str(self.clock.now_ms()).encode(),
        }


@dataclass(slots=True)
class NodeValue:
    """The shard's node as its owner wrote it last."""

    node: ShardNode
    version: int


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard that this process owns: what it holds, its node, and the writer of its manifest."""

    segments: SegmentMap
    node: NodeValue
    manifest: ManifestWriter


class ManifestWriter:
    """Appends records to one manifest ledger. Not thread-safe, except for confirm()."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self.changes = 0
        self.entries = 0

    @property
    def ledger_id(self) -> int:
        """The ledger that the shard's node names."""
        return self._writer.ledger_id

    def append(self, record: ledger_manifest.ManifestRecord) -> int:
        """Send a record; returns the number of entries to be confirmed for it. Raises LedgerFailed."""
        for entry in entries_of(ledger_manifest.encode_record(record)):
            self._writer.append(entry)
            self.entries += 1
        self.changes += change_count(record)
        return self.entries

    def confirm(self, entries: int) -> None:
        """Return once so many entries are durable. Raises LedgerFailed."""
        self._writer.confirm(entries)

    def release(self) -> None:
        """Release the ledger's writer; idempotent."""
        self._writer.release()


def read_node(shard: Shard) -> NodeValue | None:
    """Returns the shard's node; None if it was never opened. Raises ConfigurationError, StorageFailed."""
    found = shard.manifests.read(shard.name)
    if found is None:
        return None
    node = ledger_manifest.decode_node(found.value, cluster=shard.cluster, shard=shard.name)
    return NodeValue(node, found.version)


def take_over(shard: Shard, *, retention_ms: int) -> OwnedShard:
    """Become the shard's writer, with an epoch above all earlier ones.

    Raises WriterFenced if another process took the shard at the same time, LedgerFailed if too few bookies answer,
    ConfigurationError, and SegmentDamaged if the manifest cannot be read.
    """
    before = read_node(shard)
    segments = SegmentMap() if before is None else _fenced(shard, before.node.ledger)
    epoch = 1 if before is None else before.node.epoch + 1
    openings = ledger_manifest.with_opening(
        [] if before is None else before.node.openings,
        EpochStart(epoch, shard.clock.now_ms()),
        retention_ms=retention_ms,
    )
    manifest = begin_manifest(shard, segments, epoch=epoch)
    node = ShardNode(
        cluster=shard.cluster, shard=shard.name, epoch=epoch, ledger=manifest.ledger_id, openings=openings,
        annotations={} if before is None else before.node.annotations,
    )  # fmt: skip
    version = name_manifest(shard, node, manifest, version=None if before is None else before.version)
    logger.info("shard_taken_over", extra={"shard": shard.name, "epoch": epoch, "segments": len(segments.segments)})
    return OwnedShard(segments, NodeValue(node, version), manifest)


def begin_manifest(shard: Shard, segments: SegmentMap, *, epoch: int) -> ManifestWriter:
    """Create a manifest ledger that begins with a durable snapshot. Raises LedgerFailed."""
    manifest = ManifestWriter(shard.ledgers.begin_create(shard.metadata(epoch=epoch, segment="manifest"))())
    try:
        manifest.confirm(manifest.append(segments.snapshot(epoch=epoch)))
    except LedgerFailed:
        manifest.release()
        raise
    return manifest


def name_manifest(shard: Shard, node: ShardNode, manifest: ManifestWriter, *, version: int | None) -> int:
    """Name a manifest ledger in the shard's node; returns the node's new version.

    Raises WriterFenced if the node was changed by another process, StorageFailed if the outcome is unknown: then the
    ledger stays, since the node may name it.
    """
    try:
        written = shard.manifests.write(shard.name, ledger_manifest.encode_node(node), version=version)
    except StorageFailed:
        manifest.release()
        raise
    if written is None:
        manifest.release()
        with suppress(LedgerFailed):  # the sweeper deletes it later
            shard.ledgers.delete([manifest.ledger_id])
        raise WriterFenced(f"another process took over shard {shard.name}; this one must end")
    return written


def read_segments(shard: Shard, manifest_ledger: int, *, entries: int) -> SegmentMap:
    """Returns what a manifest ledger's first entries say. Raises SegmentDamaged, LedgerFailed."""
    where = f"shard {shard.name}: its manifest is damaged"
    records = read_records(shard.ledgers, manifest_ledger, count=entries, where=where)
    return ledger_manifest.replay(records, ledger=manifest_ledger)


def _fenced(shard: Shard, manifest_ledger: int) -> SegmentMap:
    """Fence the manifest ledger, then all ledgers that it names and that may have a writer; returns what it says."""
    try:
        [entries] = shard.ledgers.recover([manifest_ledger])
    except LedgerMissing as error:
        raise ConfigurationError(
            f"the manifest ledger {manifest_ledger} of shard {shard.name} is gone: use the bookies that the path "
            "belongs to, or restore the ledger"
        ) from error
    segments = read_segments(shard, manifest_ledger, entries=entries)
    opened = segments.open_segments()
    try:
        counts = shard.ledgers.recover([segment.ledger for segment in opened])
    except LedgerMissing as error:
        raise SegmentDamaged(f"shard {shard.name}: a ledger that its manifest names is gone: {error}") from error
    sealed = [
        SealedSegment(segment.name, segment.ledger, count) for segment, count in zip(opened, counts, strict=True)
    ]  # fmt: skip
    segments.apply(SegmentsSealed(sealed))
    return segments
