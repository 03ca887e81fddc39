"""Reads a shard's segments without taking it over: up to what its bookies know to be confirmed.

Its owner goes on writing meanwhile. So a ledger that the view names may be deleted by the time it is read: an error
then means that the view is outdated, and the caller makes another one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final

from outbox_broker.segments.ledger import info_of
from outbox_broker.segments.ledger_manifest import SegmentMap, ShardNode, StoredSegment
from outbox_broker.segments.ledger_reads import LedgerBytes, read_records
from outbox_broker.segments.ledger_records import MARK_BYTES, ends_record
from outbox_broker.segments.ledger_takeover import Shard, read_node, read_segments
from outbox_broker.segments.ledgers import EntryMissing, Ledgers
from outbox_broker.segments.port import SegmentInfo
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import Block

_CONFIRMED_LAG_MAX: Final = 64
"""Entries behind those that the bookies know to be confirmed, among which one may be that the log names."""


class LedgerView:
    """A SegmentReader on a shard as its manifest was when the view was made."""

    def __init__(self, shard: Shard, node: ShardNode, segments: SegmentMap) -> None:
        """Called by open() only."""
        self._node = node
        self._ledgers = shard.ledgers
        self._segments = segments.segments
        self._bytes: dict[str, LedgerBytes] = {}

    @classmethod
    def open(cls, shard: Shard) -> LedgerView | None:
        """Read the shard's manifest; None if the shard was never opened.

        Raises ConfigurationError if it is of another cluster or of a newer version, SegmentDamaged, StorageFailed.
        """
        node = read_node(shard)
        if node is None:
            return None
        ledger = node.node.ledger
        # The snapshot was durable before the node named its ledger, whatever the bookies know of it.
        entries = max(shard.ledgers.confirmed(ledger), snapshot_entries(shard.ledgers, ledger))
        return cls(shard, node.node, read_segments(shard, ledger, entries=entries))

    def annotation(self, name: str) -> bytes | None:
        """Returns what the owners of the shard have left under a name; see Annotations."""
        value = self._node.annotations.get(name)
        return None if value is None else value.encode()

    def list(self) -> Sequence[SegmentInfo]:
        """All segments, by name; see the port."""
        return [info_of(self._segments[name]) for name in sorted(self._segments)]

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """Bytes that a confirmed record of the log names, so that they are confirmed; see the port."""
        segment = self._known(name)
        source = self._bytes.setdefault(name, LedgerBytes(self._ledgers, segment.ledger, where=name))
        count = self._count(segment) + (_CONFIRMED_LAG_MAX if segment.entries is None else 0)
        return source.read(position, size_bytes, count=count)

    def blocks(
        self,
        name: str,
        *,
        proven: int = 0,  # noqa: ARG002 - what is confirmed is durable
        wanted: Container[int] | None = None,
    ) -> Iterator[Block]:
        """Every block that is confirmed; see the port."""
        segment = self._known(name)
        source = LedgerBytes(self._ledgers, segment.ledger, where=name)
        return source.blocks(first=segment.first, count=self._count(segment), wanted=wanted)

    def sealed_bytes(self, name: str) -> int | None:
        """Returns how long a segment is; None where it may still grow. Raises StorageFailed."""
        segment = self._known(name)
        if segment.entries is None:
            return None
        if segment.end is not None or not segment.entries:
            return segment.end or 0
        length = self._ledgers.length_bytes(segment.ledger, segment.entries - 1)
        return length - MARK_BYTES * segment.entries

    def confirmed_bytes(self, name: str) -> Iterator[bytes]:
        """Yields all that is confirmed of a segment, piece by piece. Raises SegmentDamaged if some of it is lost, and
        StorageFailed.
        """
        segment = self._known(name)
        return read_records(self._ledgers, segment.ledger, count=self._count(segment), where=name)

    def _count(self, segment: StoredSegment) -> int:
        return self._ledgers.confirmed(segment.ledger) if segment.entries is None else segment.entries

    def _known(self, name: str) -> StoredSegment:
        segment = self._segments.get(name)
        if segment is None:
            raise StorageFailed(f"cannot read {name}: there is no such segment")
        return segment


def snapshot_entries(ledgers: Ledgers, manifest_ledger: int) -> int:
    """Returns how many entries a manifest ledger's snapshot has, from the marks of its entries."""
    count = 0
    while True:
        try:
            [entry] = ledgers.read(manifest_ledger, count, count)
        except EntryMissing:
            return count
        count += 1
        if ends_record(entry):
            return count
