"""Segments as pieces of replicated ledgers: the segment store of a cluster's shard (decision 100). Nothing is on a
local disk.

A position is the ordinal of an entry in its segment. A segment that is appended to at its end continues in its ledger;
at any other position, and in each epoch, it continues in a new ledger, and the manifest ledger says from where on.
What is appended to many segments at once has its ledgers created at once, and named by one record of the manifest,
which the sync of the segments waits for.

Any error of an append or a sync is final for this store (final_failure): what was not confirmed may be lost or not, and
only the recovery by the next opening, at a higher epoch, decides.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from outbox_broker.segments.final_failure import FinalFailure
from outbox_broker.segments.ledger_manifest import (
    ClosedPiece,
    LedgerPiece,
    PiecesAdded,
    PiecesClosed,
    SegmentsDropped,
    piece_at,
)
from outbox_broker.segments.ledger_reads import RecordPlace, read_record, read_records
from outbox_broker.segments.ledger_takeover import OwnedShard, Shard, take_over
from outbox_broker.segments.ledgers import EntryMissing, LedgerFailed, LedgerWriter
from outbox_broker.segments.manifest_log import ManifestLog
from outbox_broker.segments.open_piece import OpenPiece
from outbox_broker.segments.segment_store import Record, SegmentAppend
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged

Positions = list[int]
"""Where each record of an append begins and, last, the new end. The class has a method named list."""
_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStoreOptions:
    """Limits of one shard's store."""

    open_ledgers_max: int = 128
    """Ledgers with an open writer: a takeover has to fence so many. Those that were appended to least often are closed
    first. What is appended at once is not closed, though it may be more."""
    continued_pieces_max: int = 16
    """Pieces of a segment that the next epoch continues: each is another ledger to open when the segment is scanned."""
    manifest_changes_max: int = 10_000
    """Pieces named or closed in a manifest ledger, after which another one begins with a snapshot."""
    retention_ms: int = 24 * 3_600_000
    """How long ledgers of an earlier epoch are kept after it ended. A bookie that restarts forgets the fence of a
    deleted ledger, and would acknowledge the appends of a writer that was paused all the while."""


@dataclass(frozen=True, slots=True)
class _Closing:
    """A piece whose ledger is being closed; `wait` returns when it is, and raises LedgerFailed."""

    segment: str
    piece: OpenPiece
    wait: Callable[[], None]

    @property
    def ledger_id(self) -> int:
        """Identifies the ledger."""
        return self.piece.piece.ledger


class LedgerSegmentStore:
    """A SegmentStore on the ledgers of one shard. close() releases what this process holds, and waits for nothing."""

    def __init__(self, shard: Shard, taken: OwnedShard, *, options: LedgerStoreOptions) -> None:
        """Called by open() only."""
        self.epoch = taken.node.node.epoch
        self.bytes_written = 0
        self._shard = shard
        self._options = options
        self._manifest = ManifestLog(
            shard, taken, changes_max=options.manifest_changes_max, retention_ms=options.retention_ms
        )
        self._open: OrderedDict[str, OpenPiece] = OrderedDict()
        self._closing: dict[int, _Closing] = {}  # by ledger; the manifest says that they are open
        # Guards which pieces are open or closing. Taken after a piece's lock, never before it.
        self._guard = threading.Lock()
        self._failure = FinalFailure(shard, epoch=self.epoch)
        self._closed = False

    @classmethod
    def open(cls, shard: Shard, *, options: LedgerStoreOptions | None = None) -> LedgerSegmentStore:
        """Take the shard over: fence all ledgers of its earlier writer. Raises as take_over() does."""
        options = options or LedgerStoreOptions()
        return cls(shard, take_over(shard, retention_ms=options.retention_ms), options=options)

    def append(self, name: str, records: Sequence[bytes], *, position: int) -> list[int]:
        """Send records to a segment's ledger; see the port."""
        [positions] = self.append_all([SegmentAppend(name, records, position)])
        return positions

    def append_all(self, appends: Sequence[SegmentAppend]) -> list[list[int]]:
        """Send records to the ledgers of segments, which are created at once; see the port."""
        by_name = {one.name: one for one in appends}
        if len(by_name) < len(appends):
            raise ValueError("two appends to one segment")
        for name in by_name:
            if not _NAME.fullmatch(name):
                raise ValueError(f"not a segment's name: {name!r}")
        self._refuse_if_unable()
        positions: dict[str, list[int]] = {}
        try:
            while waiting := [one for name, one in by_name.items() if name not in positions]:
                positions |= self._appended(waiting)
        except LedgerFailed as error:
            raise self._failed(error) from error
        except StorageFailed:
            raise
        except Exception as error:  # of the client, as of Java's memory: a part of a record may have been sent
            raise self._failed(LedgerFailed(f"{type(error).__name__}: {error}")) from error
        self.bytes_written += sum(len(record) for one in appends for record in one.records)
        return [positions[one.name] for one in appends]

    def sync(self, names: Iterable[str]) -> None:
        """Wait for the acknowledgements of all entries of segments; see the port."""
        self._failure.refuse()
        if not (names := tuple(names)):  # who asks for a failure alone waits for nobody who holds the guard
            self._refuse_if_closed()
            return
        with self._guard:
            pieces = [(name, piece) for name in names if (piece := self._open.get(name)) is not None]
        try:
            for name, piece in pieces:
                with self._unless_deleted(name, piece):
                    self._confirm(piece)
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
            count = end - piece.begin
            try:
                yield from read_records(
                    self._shard.ledgers, piece.ledger, count=count, begin=piece.begin, where=name
                )  # fmt: skip
            except EntryMissing as error:
                raise SegmentDamaged(f"{name}: ledger {piece.ledger} misses entries: {error}") from error
            position = end

    def seal(self, name: str) -> None:
        """Close the segment's ledger; see the port."""
        with self._guard:
            piece = self._open.get(name)
            if piece is None or self._closed or self._failure.has_happened:
                return
        try:
            self._begin_closing([(name, piece)])
            self._finish_closing()
        except LedgerFailed as error:
            raise self._failed(error) from error

    def list(self) -> Sequence[str]:
        """List names from the manifest; see the port."""
        return self._manifest.segments()

    def delete(self, names: Iterable[str]) -> None:
        """Remove segments from the manifest, then delete their ledgers of this epoch; see the port.

        Ledgers of earlier epochs are left to the sweeper: while one exists, its bookies refuse its former writer.
        """
        self._refuse_if_unable()
        known = self._manifest.known(names)
        if not known:
            return
        with self._guard:
            pieces = [piece for name in known if (piece := self._open.pop(name, None)) is not None]
            gone = [ledger_id for ledger_id, one in self._closing.items() if one.segment in known]
            for ledger_id in gone:
                del self._closing[ledger_id]
        try:
            try:
                dropped = self._manifest.change(SegmentsDropped(known))  # first: see _unless_deleted()
            finally:
                for piece in pieces:  # before their ledgers are deleted: BookKeeper's client logs what it cannot close
                    piece.writer.release()
            self._manifest.confirm(dropped)
        except LedgerFailed as error:
            raise self._failed(error) from error

    def continues(self, name: str) -> bool:
        """Returns whether a segment has few pieces; see the port. Those of earlier epochs are recovered and closed: all
        of their entries are durable, and their writers can add nothing.
        """
        return len(self._manifest.pieces(name) or ()) < self._options.continued_pieces_max

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

    def _appended(self, appends: Sequence[SegmentAppend]) -> dict[str, Positions]:
        """Append; returns the positions by segment, without those whose ledger was closed meanwhile."""
        with self._guard:
            pieces = {one.name: piece for one in appends if (piece := self._continued(one)) is not None}
        lacking = [one for one in appends if one.name not in pieces]
        if lacking:
            pieces |= self._begin_pieces(lacking, beside=pieces)
        positions: dict[str, list[int]] = {}
        for one in appends:
            piece = pieces[one.name]
            with piece.lock:
                if not piece.is_closed:
                    positions[one.name] = piece.append(one.records)
        return positions

    def _continued(self, append: SegmentAppend) -> OpenPiece | None:
        """Returns the open piece that ends where an append begins."""
        piece = self._open.get(append.name)
        if piece is None or piece.end != append.position or piece.is_closed:
            return None
        self._open.move_to_end(append.name)
        return piece

    def _begin_pieces(self, appends: Sequence[SegmentAppend], *, beside: Collection[str]) -> dict[str, OpenPiece]:
        """Continue segments in new ledgers, which count once the change of the manifest is confirmed."""
        names = [one.name for one in appends]
        self._make_room(len(names), but={*names, *beside})
        with self._guard:
            before = {name: piece for name in names if (piece := self._open.get(name)) is not None}
        for one in appends:
            if one.name in before and before[one.name].piece.begin < one.position:
                self._confirm(before[one.name])  # what stays of it is synced no more
        writers = self._created(names)
        pieces = [
            (one.name, LedgerPiece(one.position, writer.ledger_id, self.epoch))
            for one, writer in zip(appends, writers, strict=True)
        ]
        self._refuse_if_unable()
        named_at = self._manifest.change(PiecesAdded(pieces))
        opened = {
            name: OpenPiece(piece, writer, piece.begin, named_at)
            for (name, piece), writer in zip(pieces, writers, strict=True)
        }
        with self._guard:
            for name, piece in opened.items():
                self._open.pop(name, None)
                self._open[name] = piece
        for old in before.values():
            old.writer.release()
        return opened

    def _created(self, names: Sequence[str]) -> Sequence[LedgerWriter]:
        """Create a ledger for each segment, all at once. Raises StorageFailed with none created."""
        creations = [
            self._shard.ledgers.begin_create(self._shard.metadata(epoch=self.epoch, segment=name)) for name in names
        ]
        writers: list[LedgerWriter] = []
        failures: list[LedgerFailed] = []
        for creation in creations:
            try:
                writers.append(creation())
            except LedgerFailed as error:
                failures.append(error)
        if failures:
            for writer in writers:
                writer.release()
            with suppress(LedgerFailed):  # the sweeper deletes them later
                self._shard.ledgers.delete([writer.ledger_id for writer in writers])
            raise self._failure.note_not_created(failures[0]) from failures[0]
        return writers

    def _confirm(self, piece: OpenPiece) -> None:
        """Return once all that was sent to a piece is durable, and its name in the manifest."""
        if (named_at := piece.named_at) is not None:  # another thread may confirm it meanwhile
            self._manifest.confirm(named_at)
            piece.named_at = None
        piece.confirm()

    @contextmanager
    def _unless_deleted(self, segment: str, piece: OpenPiece) -> Iterator[None]:
        """Ignore a failure if the segment was deleted meanwhile, which releases the writer that is waited for."""
        try:
            yield
        except LedgerFailed:
            if self._manifest.names(segment, piece.piece.ledger):
                raise

    def _make_room(self, count: int, *, but: Collection[str]) -> None:
        """Limit the number of open ledgers. Of those that were appended to least often, the last used is closed first:
        a flush comes to each of many buckets once, so the one that was used longest ago is needed next.
        """
        self._finish_closing()
        with self._guard:
            surplus = max(0, len(self._open) + count - self._options.open_ledgers_max)
            idle = [(name, piece) for name, piece in reversed(self._open.items()) if name not in but]
        self._begin_closing(sorted(idle, key=lambda one: one[1].uses)[:surplus])

    def _begin_closing(self, pieces: Iterable[tuple[str, OpenPiece]]) -> None:
        """Begin to close ledgers; nothing waits for their ends but the next call of _finish_closing()."""
        for name, piece in pieces:
            wait = None
            with self._unless_deleted(name, piece):
                self._confirm(piece)
                wait = piece.begin_close()
            if wait is None:
                continue
            with self._guard:
                self._closing[piece.piece.ledger] = _Closing(name, piece, wait)
                if self._open.get(name) is piece:
                    del self._open[name]

    def _finish_closing(self) -> None:
        """Wait for the ledgers that are being closed, and note their ends in the manifest. The note need not be
        confirmed: without it, a takeover finds the ledgers closed.
        """
        with self._guard:
            closing = list(self._closing.values())
        for one in closing:
            with self._unless_deleted(one.segment, one.piece):
                one.wait()
        with self._guard:
            closed = [one for one in closing if self._closing.pop(one.ledger_id, None) is one]
            if closed and not self._closed:
                ends = [ClosedPiece(one.segment, one.ledger_id, one.piece.sent) for one in closed]
                self._manifest.change(PiecesClosed(ends))

    def _located(self, name: str, position: int) -> tuple[LedgerPiece | None, int]:
        """Returns the piece that holds a position, and where it ends. What this store appended to it is confirmed."""
        with self._guard:
            pieces = self._manifest.pieces(name)
            if pieces is None:
                raise StorageFailed(f"cannot read {name}: there is no such segment")
            piece = piece_at(pieces, position)
            if piece is None:
                return None, 0
            opened = self._writable(name, piece)
        later = next((one.begin for one in pieces if one.begin > piece.begin), None)
        end = piece.end if opened is None else self._confirmed_end(name, opened)
        ends = [one for one in (end, later) if one is not None]
        return piece, min(ends, default=piece.begin)

    def _writable(self, name: str, piece: LedgerPiece) -> OpenPiece | None:
        """Returns the open or closing piece of this process that a piece of the manifest is. Under the guard."""
        closing = self._closing.get(piece.ledger)
        opened = self._open.get(name) if closing is None else closing.piece
        return opened if opened is not None and opened.piece.ledger == piece.ledger else None

    def _confirmed_end(self, segment: str, opened: OpenPiece) -> int:
        with opened.lock:
            wanted = opened.sent
        if wanted > opened.confirmed:
            self._failure.refuse()
            try:
                with self._unless_deleted(segment, opened):
                    opened.confirm()
            except LedgerFailed as error:
                raise self._failed(error) from error
        return opened.piece.begin + wanted

    # -- failures ----------------------------------------------------------------------------------------------------

    def _failed(self, error: LedgerFailed) -> StorageFailed:
        """Make a failure final, unless the store was closed; returns what to raise."""
        if self._closed:
            return StorageFailed("the segment store is closed")
        return self._failure.note(error)

    def _refuse_if_unable(self) -> None:
        self._failure.refuse()
        self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the segment store is closed")
