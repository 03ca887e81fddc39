"""Makes a shard of segments that another medium has, as a backup's. The shard has no owner before, and none meanwhile.

Each segment becomes a ledger that is closed. Nothing names one until the last step, the compare-and-set that makes the
shard's node: so whoever is killed before it leaves no shard, and ledgers for the sweeper; and behind it all is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from outbox_broker.segments.ledger_manifest import EpochStart, SegmentMap, ShardNode, StoredSegment
from outbox_broker.segments.ledger_records import entries_of
from outbox_broker.segments.ledger_takeover import Shard, begin_manifest, name_manifest, read_node
from outbox_broker.segments.port import SegmentInfo, WriterFenced, require_name
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.journal import SegmentDamaged

UNCONFIRMED_BYTES_MAX: Final = 8 * 1024 * 1024
_LEDGER_EPOCH: Final = 0
"""Of the ledgers, below that of any owner: the sweeper finds those of an import that was killed whoever owns the shard
by then, and no former owner is to be fenced by them."""


class LedgerImport:
    """The segments of one shard as they are written. For one thread."""

    def __init__(self, shard: Shard) -> None:
        """Raises ConfigurationError if the shard was opened before; StorageFailed."""
        self._shard = shard
        self._map = SegmentMap()
        if read_node(shard) is not None:
            raise self._refusal("there is a broker at this path already")

    def add(self, info: SegmentInfo, pieces: Iterable[bytes]) -> None:
        """Write a segment, durably. Each piece has whole blocks, or what is left of damaged ones. Raises
        LedgerFailed.
        """
        require_name(info.name)
        if info.name in self._map.segments:
            raise SegmentDamaged(f"{info.name} is there twice, in two parts of the broker: one of them was renamed")
        writer = self._shard.ledgers.begin_create(self._shard.metadata(epoch=_LEDGER_EPOCH, segment=info.name))()
        entries = end = unconfirmed = 0
        try:
            for piece in pieces:
                for entry in entries_of(piece):
                    writer.append(entry)
                    entries, unconfirmed = entries + 1, unconfirmed + len(entry)
                end += len(piece)
                if unconfirmed >= UNCONFIRMED_BYTES_MAX:
                    writer.confirm(entries)
                    unconfirmed = 0
            writer.confirm(entries)
            writer.begin_close()()
        finally:
            writer.release()
        self._map.segments[info.name] = StoredSegment(
            info.name, info.kind, info.first, writer.ledger_id, info.epoch, info.created_at_ms, entries, end
        )

    def finish(self, *, epoch: int, annotations: Mapping[str, str]) -> None:
        """Make the shard, of all that was added; its first owner has the epoch behind this one.

        Raises ConfigurationError if another process opened it meanwhile; StorageFailed: where ZooKeeper did not answer
        in time, it may be there, and whole.
        """
        for segment in self._map.segments.values():
            # A sweeper that ran meanwhile takes what nothing names, and is old enough.
            if self._shard.ledgers.confirmed(segment.ledger) != segment.entries:
                raise StorageFailed(f"{segment.name}: its ledger is not as it was written; repeat this")
        manifest = begin_manifest(self._shard, self._map, epoch=_LEDGER_EPOCH)
        node = ShardNode(
            cluster=self._shard.cluster, shard=self._shard.name, epoch=epoch, ledger=manifest.ledger_id,
            openings=[EpochStart(epoch, self._shard.clock.now_ms())], annotations=dict(annotations),
        )  # fmt: skip
        try:
            name_manifest(self._shard, node, manifest, version=None)
        except WriterFenced as error:
            raise self._refusal("a broker was started at this path meanwhile") from error
        manifest.release()

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{why} (cluster {self._shard.cluster}): name another path; or, if nobody wants that broker any more, stop "
            "its nodes, and delete its path in ZooKeeper"
        )
