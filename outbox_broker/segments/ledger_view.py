"""Reads a shard's segments without taking it over: up to what its bookies know to be confirmed.

Its owner goes on writing meanwhile. So a ledger that the view names may be deleted by the time it is read: an error
then means that the view is outdated, and the caller makes another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outbox_broker.segments.ledger_manifest import LedgerPiece, SegmentMap, piece_at
from outbox_broker.segments.ledger_reads import RecordPlace, read_record, read_records
from outbox_broker.segments.ledger_records import ends_record
from outbox_broker.segments.ledger_takeover import Shard, read_node, read_segments
from outbox_broker.segments.ledgers import EntryMissing, Ledgers
from outbox_broker.segments.segment_store import Record
from outbox_core.common.errors import StorageFailed


class LedgerView:
    """A SegmentReader on a shard as its manifest was when the view was made."""

    def __init__(self, shard: Shard, segments: SegmentMap) -> None:
        """Called by open() only."""
        self._ledgers = shard.ledgers
        self._segments = segments.segments

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
        return cls(shard, read_segments(shard, ledger, entries=entries))

    def list(self) -> Sequence[str]:
        """All segments, by name; see the port."""
        return sorted(self._segments)

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """One record, which a confirmed record of the log names, so that it is confirmed; see the port."""
        piece = piece_at(self._pieces(name), position)
        end = None if piece is None else piece.end
        return read_record(self._ledgers, piece, RecordPlace(name, position, size_bytes), end=end)

    def scan(self, name: str) -> Iterator[Record]:
        """Every whole record that is confirmed; see the port."""
        pieces = self._pieces(name)
        for number, piece in enumerate(pieces):
            later = pieces[number + 1].begin if number + 1 < len(pieces) else None
            count = piece.entries if piece.entries is not None else self._ledgers.confirmed(piece.ledger)
            if later is not None:
                count = min(count, later - piece.begin)
            yield from read_records(self._ledgers, piece.ledger, count=count, begin=piece.begin, where=name)
            if later is not None and piece.begin + count < later:
                return  # what follows is not reached without a gap

    def _pieces(self, name: str) -> Sequence[LedgerPiece]:
        pieces = self._segments.get(name)
        if pieces is None:
            raise StorageFailed(f"cannot read {name}: there is no such segment")
        return pieces


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
