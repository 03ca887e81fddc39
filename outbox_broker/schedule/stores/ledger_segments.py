"""Segments as pieces of replicated ledgers: the segment store of a cluster's shard. Nothing is on a local disk.

A position is the ordinal of an entry in its segment. A segment that is appended to at its end continues in its ledger;
at any other position, and in each epoch, it continues in a new ledger, and the manifest ledger says from where on.

Any error of an append or a sync is final for this store: what was not confirmed may be lost or not, and only the
recovery by the next opening, at a higher epoch, decides. After it the shard's node is read before anything else, since
only the error of a fence proves another writer, and its absence proves nothing.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

from outbox_broker.schedule.segment_store import Record, WriterFenced
from outbox_broker.schedule.stores.ledger_manifest import (
    LedgerPiece,
    ManifestRecord,
    PieceAdded,
    PieceClosed,
    SegmentsDropped,
    piece_at,
)
from outbox_broker.schedule.stores.ledger_reads import RecordPlace, read_entries, read_record
from outbox_broker.schedule.stores.ledger_records import records_of
from outbox_broker.schedule.stores.ledger_takeover import (
    OwnedShard,
    Shard,
    begin_manifest,
    name_manifest,
    read_node,
    take_over,
)
from outbox_broker.schedule.stores.ledgers import EntryMissing, LedgerFailed, LedgerFenced
from outbox_broker.schedule.stores.open_piece import OpenPiece
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_SNAPSHOTS_PER_RETENTION: Final = 24
_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStoreOptions:
    """Limits of one shard's store."""

    open_ledgers_max: int = 128
    """Ledgers with an open writer: a takeover has to fence so many. The longest unused is closed first."""
    manifest_records_max: int = 10_000
    """Records of a manifest ledger, after which another one begins with a snapshot."""
    retention_ms: int = 24 * 3_600_000
    """How long ledgers of an earlier epoch are kept after it ended. A bookie that restarts forgets the fence of a
    deleted ledger, and would acknowledge the appends of a writer that was paused all the while."""


class LedgerSegmentStore:
    """A SegmentStore on the ledgers of one shard. close() releases what this process holds, and waits for nothing."""

    def __init__(self, shard: Shard, taken: OwnedShard, *, options: LedgerStoreOptions) -> None:
        """Called by open() only."""
        self.epoch = taken.node.node.epoch
        self.bytes_written = 0
        self._shard = shard
        self._options = options
        self._map = taken.segments
        self._node = taken.node
        self._manifest = taken.manifest
        self._open: OrderedDict[str, OpenPiece] = OrderedDict()
        # Guards the map, the manifest, and which pieces are open. Taken after a piece's lock, never before it.
        self._guard = threading.RLock()
        self._failure: StorageFailed | None = None
        self._closed = False
        self._snapshot_ms = shard.clock.monotonic_ms()
        self._has_dropped_old = False  # whether ledgers of earlier epochs were dropped since the snapshot

    @classmethod
    def open(cls, shard: Shard, *, options: LedgerStoreOptions | None = None) -> LedgerSegmentStore:
        """Take the shard over: fence all ledgers of its earlier writer. Raises as take_over() does."""
        options = options or LedgerStoreOptions()
        return cls(shard, take_over(shard, retention_ms=options.retention_ms), options=options)

    def append(self, name: str, records: Sequence[bytes], *, position: int) -> list[int]:
        """Send records to a segment's ledger; see the port."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a segment's name: {name!r}")
        self._refuse_if_unable()
        try:
            while True:
                piece = self._piece_to_append(name, position)
                with piece.lock:
                    if not piece.is_closed:
                        positions = piece.append(records)
                        break
        except LedgerFailed as error:
            raise self._failed(error) from error
        self.bytes_written += sum(map(len, records))
        return positions

    def sync(self, names: Iterable[str]) -> None:
        """Wait for the acknowledgements of all entries of segments; see the port."""
        self._refuse_if_failed()
        names = tuple(names)
        with self._guard:
            pieces = [piece for name in names if (piece := self._open.get(name)) is not None]
        try:
            for piece in pieces:
                piece.confirm()
        except LedgerFailed as error:
            raise self._failed(error) from error
        self._refuse_if_unable()

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """One record; see the port."""
        self._refuse_if_closed()
        piece, end = self._located(name, position)
        return read_record(self._shard.ledgers, piece, RecordPlace(name, position, size_bytes), end=end)

    def scan(self, name: str) -> Iterator[Record]:
        """Every whole record; see the port."""
        self._refuse_if_closed()
        position = 0
        while True:
            piece, end = self._located(name, position)
            if piece is None or end <= position:
                return
            entries = read_entries(self._shard.ledgers, piece.ledger, count=end - piece.begin)
            try:
                yield from records_of(entries, begin=piece.begin)
            except EntryMissing as error:
                raise SegmentDamaged(f"{name}: ledger {piece.ledger} misses entries: {error}") from error
            position = end

    def seal(self, name: str) -> None:
        """Close the segment's ledger; see the port."""
        with self._guard:
            piece = self._open.get(name)
            if piece is None or self._closed or self._failure is not None:
                return
        self._close_piece(name, piece)

    def list(self) -> Sequence[str]:
        """List names from the manifest; see the port."""
        with self._guard:
            return sorted(self._map.segments)

    def delete(self, names: Iterable[str]) -> None:
        """Remove segments from the manifest, then delete their ledgers of this epoch; see the port.

        Ledgers of earlier epochs are left to the sweeper: while one exists, its bookies refuse its former writer.
        """
        self._refuse_if_unable()
        with self._guard:
            known = [name for name in names if name in self._map.segments]
            pieces = [piece for name in known if (piece := self._open.pop(name, None)) is not None]
        if not known:
            return
        for piece in pieces:  # before their ledgers are deleted: BookKeeper's client logs what it cannot close
            piece.writer.release()
        self._record(SegmentsDropped(known))

    def close(self) -> None:
        """Release all writers; idempotent. Waits for nothing: the next opening recovers the ledgers."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            pieces = list(self._open.values())
            self._open.clear()
        for piece in pieces:
            piece.writer.release()
        self._manifest.release()

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _piece_to_append(self, name: str, position: int) -> OpenPiece:
        with self._guard:
            piece = self._open.get(name)
            if piece is not None and piece.end == position and not piece.is_closed:
                self._open.move_to_end(name)
                return piece
        return self._begin_piece(name, position)

    def _begin_piece(self, name: str, position: int) -> OpenPiece:
        """Continue a segment in a new ledger, which counts once the manifest names it."""
        self._close_idle()
        with self._guard:
            before = self._open.get(name)
        if before is not None and before.piece.begin < position:
            before.confirm()  # what stays of it is synced no more
        try:
            writer = self._shard.ledgers.create(self._shard.metadata(epoch=self.epoch, segment=name))
        except LedgerFailed as error:
            raise self._not_created(error) from error
        piece = LedgerPiece(position, writer.ledger_id, self.epoch)
        opened = OpenPiece(piece, writer, position)
        self._record(PieceAdded(name, piece))
        with self._guard:
            self._open.pop(name, None)
            self._open[name] = opened
        if before is not None:
            before.writer.release()
        return opened

    def _close_idle(self) -> None:
        """Limit the number of open ledgers: closes those that were not appended to for longest."""
        with self._guard:
            surplus = len(self._open) + 1 - self._options.open_ledgers_max
            idle = list(islice(self._open.items(), max(0, surplus)))
        for name, piece in idle:
            self._close_piece(name, piece)

    def _close_piece(self, name: str, piece: OpenPiece) -> None:
        try:
            entries = piece.close()
        except LedgerFailed as error:
            raise self._failed(error) from error
        if entries is None:
            return
        with self._guard:
            if self._open.get(name) is piece:
                del self._open[name]
        self._record(PieceClosed(name, piece.piece.ledger, entries))

    def _located(self, name: str, position: int) -> tuple[LedgerPiece | None, int]:
        """Returns the piece that holds a position, and where it ends. What this store appended to it is confirmed."""
        with self._guard:
            pieces = self._map.segments.get(name)
            if pieces is None:
                raise StorageFailed(f"cannot read {name}: there is no such segment")
            piece = piece_at(pieces, position)
            opened = self._open.get(name)
            later = next((one.begin for one in pieces if piece is not None and one.begin > piece.begin), None)
        if piece is None:
            return None, 0
        end = piece.end
        if opened is not None and opened.piece.ledger == piece.ledger:
            end = self._confirmed_end(opened)
        ends = [one for one in (end, later) if one is not None]
        return piece, min(ends, default=piece.begin)

    def _confirmed_end(self, opened: OpenPiece) -> int:
        with opened.lock:
            wanted = opened.sent
        if wanted > opened.confirmed:
            self._refuse_if_failed()
            try:
                opened.confirm()
            except LedgerFailed as error:
                raise self._failed(error) from error
        return opened.piece.begin + wanted

    # -- the manifest ------------------------------------------------------------------------------------------------

    def _record(self, record: ManifestRecord) -> None:
        """Write a change of the manifest durably, and apply it. Raises WriterFenced and StorageFailed, both final."""
        try:
            with self._guard:
                self._refuse_if_unable()
                self._roll_manifest()
                manifest = self._manifest
                entries = manifest.append(record)
                unnamed = self._map.apply(record)
                self._has_dropped_old |= any(piece.epoch < self.epoch for piece in unnamed)
            manifest.confirm(entries)
        except LedgerFailed as error:
            raise self._failed(error) from error
        self._delete_own(piece.ledger for piece in unnamed if piece.epoch == self.epoch)

    def _roll_manifest(self) -> None:
        """Begin another manifest ledger if this one is long. The old one has had this store alone as a writer."""
        if not self._is_manifest_long():
            return
        before = self._manifest
        before.confirm(before.entries)
        manifest = begin_manifest(self._shard, self._map, epoch=self.epoch)
        node = msgspec.structs.replace(self._node.node, ledger=manifest.ledger_id)
        try:
            self._node.version = name_manifest(self._shard, node, manifest, version=self._node.version)
        except StorageFailed as error:
            raise self._failed(LedgerFailed(str(error))) from error
        self._node.node, self._manifest = node, manifest
        self._snapshot_ms, self._has_dropped_old = self._shard.clock.monotonic_ms(), False
        before.release()
        self._delete_own([before.ledger_id])

    def _is_manifest_long(self) -> bool:
        """Returns whether another manifest ledger is due. The sweeper reads snapshots alone, since they are confirmed:
        so one is also due after ledgers of earlier epochs were dropped.
        """
        age_ms = self._shard.clock.monotonic_ms() - self._snapshot_ms
        return self._manifest.records >= self._options.manifest_records_max or (
            self._has_dropped_old and age_ms >= self._options.retention_ms // _SNAPSHOTS_PER_RETENTION
        )

    def _delete_own(self, ledger_ids: Iterable[int]) -> None:
        """Delete ledgers that only this store has written to. What fails is left to the sweeper."""
        ledger_ids = list(ledger_ids)
        if ledger_ids:
            try:
                self._shard.ledgers.delete(ledger_ids)
            except LedgerFailed as error:
                logger.warning("ledgers_not_deleted", extra={"ledgers": len(ledger_ids), "error": str(error)})

    # -- failures ----------------------------------------------------------------------------------------------------

    def _failed(self, error: LedgerFailed) -> StorageFailed:
        """Make a failure final, after reading whose the shard is; returns what to raise."""
        with self._guard:
            if self._failure is None:
                self._failure = self._judged(error)
                logger.critical("shard_failed", extra={"shard": self._shard.name, "error": str(self._failure)})
            return self._raised()

    def _not_created(self, error: LedgerFailed) -> StorageFailed:
        """A ledger that could not be created leaves nothing in doubt; so only a takeover is final."""
        found = self._judged(error)
        if isinstance(found, WriterFenced):
            with self._guard:
                self._failure = self._failure or found
            return found
        return StorageFailed(f"no ledger can be created: {error}; see to it that enough bookies are writable")

    def _judged(self, error: LedgerFailed) -> StorageFailed:
        fenced = WriterFenced(f"another process writes to shard {self._shard.name} now; this one must end")
        if isinstance(error, LedgerFenced):
            return fenced
        failed = StorageFailed(f"the bookies did not confirm a write: {error}; open the shard again")
        try:
            found = read_node(self._shard)
        except Exception:  # whatever it is, the error that led here is the one to report
            logger.warning("manifest_not_read", extra={"shard": self._shard.name}, exc_info=True)
            return failed
        return fenced if found is None or found.node.epoch != self.epoch else failed

    def _raised(self) -> StorageFailed:
        failure = self._failure or StorageFailed("the segment store failed")
        return type(failure)(str(failure))

    def _refuse_if_unable(self) -> None:
        self._refuse_if_failed()
        self._refuse_if_closed()

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise self._raised()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the segment store is closed")
