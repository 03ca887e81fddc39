"""Segments as replicated ledgers: those of a cluster's shard (decision 100). Nothing is on a local disk.

A segment is a ledger, which is created with the segment's first block, and never appended to by a later owner. A
manifest ledger says which segments there are. Positions are bytes, of the entries without their marks.

An append sends its block if nothing is on its way to the bookies, and else only queues it. Whoever commits sends what
was queued meanwhile as one entry, and waits for it: so the commits of many threads share the round trips.

Any error of a send or a commit is final for this owner (final_failure): what was not confirmed may be lost or not, and
only the recovery by the next opening, at a higher epoch, decides. Only a ledger that cannot be created leaves nothing
in doubt: the next commit tries again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from outbox_broker.segments.final_failure import FinalFailure
from outbox_broker.segments.ledger_manifest import (
    SealedSegment,
    SegmentCreated,
    SegmentsDropped,
    SegmentsSealed,
    StoredSegment,
)
from outbox_broker.segments.ledger_reads import LedgerBytes
from outbox_broker.segments.ledger_records import FILLER, entries_of
from outbox_broker.segments.ledger_takeover import OwnedShard, Shard, take_over
from outbox_broker.segments.ledgers import LedgerFailed, LedgerWriter
from outbox_broker.segments.manifest_log import ManifestLog, ManifestPlace
from outbox_broker.segments.port import SegmentInfo, require_name
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import Block, SegmentKind

ENTRY_BYTES_MAX: Final = 256 * 1024
"""Of blocks that are sent as one entry; one that is longer is sent alone. An entry is read as a whole."""
UNCONFIRMED_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of a segment's blocks, which are kept in memory until they are confirmed. A merge of the id index appends hundreds of
megabytes before it commits."""
_ON_THEIR_WAY_MAX: Final = 2
"""Entries of a segment that are sent and not confirmed, while more is gathered."""
_REWRITTEN_ENTRIES_MAX: Final = 16
_REWRITTEN_BYTES_MAX: Final = 16 * 1024
"""What a recovery may have to write anew of a ledger to which nothing more is appended. Behind each two entries, a
million messages on 64 shards made 167,000 entries of logs, where 129,000 do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """Limits of one shard's segments."""

    manifest_changes_max: int = 10_000
    """Segments named or sealed in a manifest ledger, after which another one begins with a snapshot."""
    retention_ms: int = 24 * 3_600_000
    """How long ledgers of an earlier epoch are kept after it ended. A bookie that restarts forgets the fence of a
    deleted ledger, and would acknowledge the appends of a writer that was paused all the while."""


class LedgerSegments:
    """Segments on the ledgers of one shard. close() releases what this process holds, and waits for nothing."""

    def __init__(self, shard: Shard, taken: OwnedShard, *, options: LedgerOptions) -> None:
        """Called by open() only."""
        self._epoch = taken.node.node.epoch
        self._shard = shard
        self._manifest = ManifestLog(
            shard, taken, changes_max=options.manifest_changes_max, retention_ms=options.retention_ms
        )
        self._writers: dict[str, LedgerSegmentWriter] = {}
        self._bytes: dict[int, LedgerBytes] = {}  # by ledger
        self._guard = threading.Lock()
        """Guards which segments have a writer. Never held while anything is waited for; innermost."""
        self._failure = FinalFailure(shard, epoch=self._epoch)
        self._closed = False

    @classmethod
    def open(cls, shard: Shard, *, options: LedgerOptions | None = None) -> LedgerSegments:
        """Take the shard over: fence all ledgers of its earlier owner. Raises as take_over() does."""
        options = options or LedgerOptions()
        return cls(shard, take_over(shard, retention_ms=options.retention_ms), options=options)

    @property
    def epoch(self) -> int:
        """Of the shard: incremented with each takeover; see the port."""
        return self._epoch

    @property
    def annotations(self) -> LedgerAnnotations:
        """What the shard's owners leave to those after them."""
        return LedgerAnnotations(self, self._manifest)

    def create(self, name: str, *, kind: SegmentKind, first: int = 0) -> LedgerSegmentWriter:
        """Begin a segment; its ledger is created from the first append on. See the port."""
        require_name(name)
        self.refuse_if_unable()
        info = SegmentInfo(
            name=name, kind=kind, first=first, end=None, created_at_ms=self._shard.clock.now_ms(), epoch=self._epoch
        )
        writer = LedgerSegmentWriter(self, info)
        with self._guard:
            before, self._writers[name] = self._writers.get(name), writer
        if before is not None:
            before.abandon()
        return writer

    def reopen(self, name: str, *, end: int) -> None:
        """Returns None: a ledger has one writer. The takeover recovered it: all of it is durable. See the port."""

    def list(self) -> Sequence[SegmentInfo]:
        """What the manifest names; see the port."""
        return [info_of(segment) for segment in self._manifest.segments()]

    def list_ends(self) -> Sequence[SegmentInfo]:
        """What list() has, and what is begun, with where each ends now that this owner has appended to. Whoever wants
        all of one moment holds what keeps others from appending; make_durable() then makes it so.
        """
        with self._guard:
            writers = list(self._writers.values())
        infos = {info.name: info for info in self.list()}
        infos |= {writer.name: writer.info for writer in writers if writer.end}
        return [infos[name] for name in sorted(infos)]

    def make_durable(self, infos: Iterable[SegmentInfo]) -> None:
        """Return once these segments are durable up to their ends; one that was deleted since is left out. Raises
        StorageFailed.
        """
        for info in infos:
            writer = self._writers.get(info.name)
            if writer is not None:
                writer.commit(info.end)

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """Bytes of a ledger's entries, and of what is not confirmed yet from memory; see the port."""
        self._refuse_if_closed()
        writer = self._writers.get(name)
        if writer is not None:
            return writer.read(position, size_bytes)
        segment = self._known(name)
        return self.bytes_of(segment).read(position, size_bytes, count=segment.entries or 0)

    def blocks(
        self,
        name: str,
        *,
        proven: int = 0,  # noqa: ARG002 - what is confirmed is durable
        wanted: Container[int] | None = None,
    ) -> Iterator[Block]:
        """The blocks of a ledger; what this owner appended is confirmed before. See the port."""
        self._refuse_if_closed()
        writer = self._writers.get(name)
        count = None if writer is None else writer.confirmed_entries()
        segment = self._known(name)
        yield from self.bytes_of(segment).blocks(
            first=segment.first, count=segment.entries or 0 if count is None else count, wanted=wanted
        )

    def delete(self, names: Iterable[str]) -> None:
        """Remove segments from the manifest, then delete their ledgers of this epoch; see the port.

        Ledgers of earlier epochs are left to the sweeper: while one exists, its bookies refuse its former writer.
        """
        self.refuse_if_unable()
        names = tuple(names)
        with self._guard:
            writers = [writer for name in names if (writer := self._writers.pop(name, None)) is not None]
        known = self._manifest.known(names)
        ledgers = [segment.ledger for name in known if (segment := self._manifest.segment(name)) is not None]
        try:
            try:
                # First: who waits for a writer finds then that its segment was deleted.
                dropped = self._manifest.change(SegmentsDropped(known)) if known else None
            finally:
                # Before their ledgers are deleted: BookKeeper's client logs what it cannot close.
                for writer in writers:
                    writer.abandon()
            if dropped is not None:
                self._manifest.confirm(dropped)
        except LedgerFailed as error:
            raise self.failed(error) from error
        for ledger in ledgers:
            self._bytes.pop(ledger, None)

    def check(self) -> None:
        """Whether a write failed, or another process took the shard over; see the port."""
        self.refuse_if_unable()

    def close(self) -> None:
        """Release all writers; idempotent. Waits for nothing: the next opening recovers the ledgers."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            writers = list(self._writers.values())
            self._writers.clear()
        for writer in writers:
            writer.abandon()
        self._manifest.release()

    # -- for the writers of this shard -------------------------------------------------------------------------------

    def begin_ledger(self, info: SegmentInfo) -> Callable[[], LedgerWriter]:
        """Begin to create a segment's ledger; returns what waits for it, and raises LedgerFailed."""
        return self._shard.ledgers.begin_create(self._shard.metadata(epoch=self._epoch, segment=info.name))

    def name_segment(self, writer: LedgerSegmentWriter, info: SegmentInfo, ledger_id: int) -> ManifestPlace | None:
        """Name a segment and its ledger in the manifest; returns the place to confirm. None if it was deleted
        meanwhile. Raises LedgerFailed.
        """
        with self._guard:
            if self._closed or self._writers.get(info.name) is not writer:
                return None
        return self._manifest.change(
            SegmentCreated(
                StoredSegment(info.name, info.kind, info.first, ledger_id, info.epoch, info.created_at_ms)
            )
        )  # fmt: skip

    def confirm_name(self, place: ManifestPlace) -> None:
        """Return once a segment's name is durable. Raises LedgerFailed."""
        self._manifest.confirm(place)

    def note_sealed(self, writer: LedgerSegmentWriter, sealed: SealedSegment) -> None:
        """Note that a ledger is closed. It need not be confirmed: without it, a takeover finds the ledger closed."""
        self._manifest.change(SegmentsSealed([sealed]))
        self.forget(writer)

    def forget(self, writer: LedgerSegmentWriter) -> None:
        """Let go of a writer whose segment has no ledger."""
        with self._guard:
            if self._writers.get(writer.name) is writer:
                del self._writers[writer.name]

    def delete_ledger(self, ledger_id: int) -> None:
        """Delete a ledger that nothing names; what fails is left to the sweeper. Raises LedgerFailed."""
        self._shard.ledgers.delete([ledger_id])

    def bytes_of(self, segment: StoredSegment) -> LedgerBytes:
        """Returns the bytes of a segment's ledger."""
        return self.bytes_in(segment.ledger, segment.name)

    def bytes_in(self, ledger_id: int, name: str) -> LedgerBytes:
        """Returns the bytes of a ledger, with what is remembered of where they are."""
        with self._guard:
            found = self._bytes.get(ledger_id)
            if found is None:
                found = self._bytes[ledger_id] = LedgerBytes(self._shard.ledgers, ledger_id, where=name)
            return found

    @contextmanager
    def unless_deleted(self, writer: LedgerSegmentWriter) -> Iterator[None]:
        """Make a LedgerFailed the final failure, and raise that; but ignore it if the writer's segment was deleted
        meanwhile, which releases what is waited for.
        """
        try:
            yield
        except LedgerFailed as error:
            if self._closed or self.is_writing(writer):
                raise self.failed(error) from error

    def is_writing(self, writer: LedgerSegmentWriter) -> bool:
        """Returns whether a writer's segment was neither deleted nor replaced nor sealed."""
        return self._writers.get(writer.name) is writer

    def failed(self, error: LedgerFailed) -> StorageFailed:
        """Make a failure final, unless the segments were closed; returns what to raise."""
        if self._closed:
            return StorageFailed("the segments are closed")
        return self._failure.note(error)

    def not_created(self, error: LedgerFailed) -> StorageFailed:
        """Returns what to raise as a ledger cannot be created: it leaves nothing in doubt."""
        return self._failure.note_not_created(error)

    def refuse_if_unable(self) -> None:
        """Raise StorageFailed or WriterFenced if nothing can be written."""
        self._failure.refuse()
        self._refuse_if_closed()

    def _known(self, name: str) -> StoredSegment:
        segment = self._manifest.segment(name)
        if segment is None:
            raise StorageFailed(f"cannot read {name}: there is no such segment")
        return segment

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the segments are closed")


class LedgerAnnotations:
    """Annotations in the shard's node, by the compare-and-set that names a manifest: so whoever takes the shard over
    has those that were acknowledged, and who was deposed can change none.
    """

    def __init__(self, segments: LedgerSegments, manifest: ManifestLog) -> None:
        """Called by LedgerSegments only."""
        self._segments = segments
        self._manifest = manifest

    def get(self, name: str) -> bytes | None:
        """As the owner read it, or wrote it since; see Annotations."""
        value = self._manifest.annotation(name)
        return None if value is None else value.encode()

    def set(self, name: str, value: bytes | None) -> None:
        """Write the node; see Annotations. Any error is final for this owner, as that of a commit is."""
        self._segments.refuse_if_unable()
        try:
            self._manifest.annotate(name, None if value is None else value.decode())
        except LedgerFailed as error:
            raise self._segments.failed(error) from error


class _OpenLedger(NamedTuple):
    """A ledger with this process's writer, and what is known of where its bytes are."""

    writer: LedgerWriter
    source: LedgerBytes


class LedgerSegmentWriter:
    """A SegmentWriter on one ledger. `_turn` guards all fields, and is held while entries are sent, for their order; it
    is let go of while one is waited for.
    """

    def __init__(self, segments: LedgerSegments, info: SegmentInfo) -> None:
        """Called by LedgerSegments only."""
        self._segments = segments
        self._info = info
        self._turn = threading.Condition()
        self._creating = threading.Lock()
        """Held while the ledger is created; taken before `_turn`."""
        self._creation: Callable[[], LedgerWriter] | None = None
        self._ledger: _OpenLedger | None = None
        self._named_at: ManifestPlace | None = None
        self._queued: deque[bytes] = deque()
        self._queued_bytes = 0
        self._kept: deque[tuple[int, bytes]] = deque()  # not confirmed yet, with their positions
        self._end = 0
        self._durable = 0
        self._sent_end = 0
        self._sent = self._confirmed = 0  # entries
        self._known = self._known_bytes = self._confirmed_bytes = self._sent_bytes = 0
        """What the bookies know to be confirmed: it travels with the entries after it."""
        self._waiting = 0  # threads that wait for an entry
        self._done = False

    @property
    def name(self) -> str:
        """See the port."""
        return self._info.name

    @property
    def end(self) -> int:
        """See the port."""
        return self._end

    @property
    def info(self) -> SegmentInfo:
        """What the port says of the segment, with where it ends now."""
        return replace(self._info, end=self._end)

    def append(self, block: bytes) -> int:
        """Queue a block. It is sent if nothing else is on its way, and so is a full entry: see the port."""
        self._segments.refuse_if_unable()
        if self._end - self._durable >= UNCONFIRMED_BYTES_MAX:
            self.commit()
        with self._turn:
            if self._done or not self._segments.is_writing(self):
                raise StorageFailed(f"{self.name} is sealed, or was deleted")
            with self._segments.unless_deleted(self):
                if self._end == 0:
                    self._creation = self._segments.begin_ledger(self._info)
                self._queued.append(block)
                self._kept.append((self._end, block))
                self._queued_bytes += len(block)
                self._end += len(block)
                while self._ledger is not None and self._is_to_send():
                    self._send_next(self._ledger)
            return self._end

    def commit(self, end: int | None = None) -> int:
        """Send what is queued, and wait for the bookies; see the port."""
        self._segments.refuse_if_unable()
        with self._turn:
            wanted = self._end if end is None else end
        is_waiting = self._durable < wanted and self._segments.is_writing(self)
        if is_waiting and (ledger := self._created()) is not None:
            with self._segments.unless_deleted(self):
                if (named_at := self._named_at) is not None:  # another thread may confirm it meanwhile
                    self._segments.confirm_name(named_at)
                    self._named_at = None
                self._confirm(ledger, wanted)
        self._segments.refuse_if_unable()
        return self._durable

    def cut(self, end: int) -> None:
        """Does nothing: what was appended stays in the ledger. See the port."""

    def seal(self) -> None:
        """Close the ledger; see the port."""
        if self._done:
            return
        self.commit()
        with self._turn:
            self._done = True
            # Not what was sent: a filler that nobody waited for may be behind the end at which the ledger is closed.
            ledger, entries, end = self._ledger, self._confirmed, self._durable
        if ledger is not None:
            with self._segments.unless_deleted(self):
                ledger.writer.begin_close()()
                self._segments.note_sealed(self, SealedSegment(self.name, ledger.writer.ledger_id, entries, end))

    def abandon(self) -> None:
        """Release the ledger's writer; see the port."""
        self._done = True
        ledger = self._ledger  # without the turn: whoever has it may wait for a bookie
        if ledger is not None:
            ledger.writer.release()
        else:  # no segment came of it: a ledger that is being created is left to the sweeper
            self._segments.forget(self)

    def read(self, position: int, size_bytes: int) -> bytes:
        """Returns bytes of this segment: those that are not confirmed from memory."""
        with self._turn:
            end = min(position + size_bytes, self._end)
            durable, count, ledger = self._durable, self._confirmed, self._ledger
            kept = [(start, block) for start, block in self._kept if start < end]
        data = b""
        if position < durable and ledger is not None:
            data = ledger.source.read(position, min(end, durable) - position, count=count)
        return data + b"".join(
            block[max(0, position + len(data) - start) : end - start]
            for start, block in kept
            if start + len(block) > position + len(data) and start < end
        )

    def confirmed_entries(self) -> int:
        """Returns how many entries the ledger has, once they are confirmed."""
        self.commit()
        with self._turn:
            return self._confirmed

    # -- entries -----------------------------------------------------------------------------------------------------

    def _created(self) -> _OpenLedger | None:
        """Wait for the ledger, or try again to create it. Returns None if the segment was deleted meanwhile."""
        with self._creating:
            if self._ledger is not None:
                return self._ledger
            creation, self._creation = self._creation, None
            try:
                writer = (creation or self._segments.begin_ledger(self._info))()
            except LedgerFailed as error:
                raise self._segments.not_created(error) from error
            with self._segments.unless_deleted(self):
                try:
                    named_at = self._segments.name_segment(self, self._info, writer.ledger_id)
                except LedgerFailed:
                    writer.release()
                    raise
                if named_at is not None:
                    ledger = _OpenLedger(writer, self._segments.bytes_in(writer.ledger_id, self.name))
                    with self._turn:
                        self._named_at, self._ledger = named_at, ledger
                    return ledger
                writer.release()
                self._segments.delete_ledger(writer.ledger_id)
            return None

    def _is_to_send(self) -> bool:
        """Returns whether an append sends: what nobody waits for is soon at the bookies, too."""
        is_idle = self._sent == self._confirmed and bool(self._queued)
        return is_idle or self._queued_bytes >= ENTRY_BYTES_MAX

    def _confirm(self, ledger: _OpenLedger, wanted: int) -> None:
        """Send and wait, until all up to a position is durable, or the segment is deleted. Raises LedgerFailed."""
        with self._turn:
            while self._durable < wanted and self._segments.is_writing(self):
                if self._queued and self._waiting < _ON_THEIR_WAY_MAX:
                    self._send_next(ledger)
                elif self._waiting:
                    self._turn.wait()
                    continue
                entries, end, size_bytes = self._sent, self._sent_end, self._sent_bytes
                self._waiting += 1
                self._turn.release()
                try:
                    ledger.writer.confirm(entries)
                finally:
                    self._turn.acquire()
                    self._waiting -= 1
                    self._turn.notify_all()
                self._note_confirmed(entries, end=end, size_bytes=size_bytes)
            self._send_filler(ledger)

    def _note_confirmed(self, entries: int, *, end: int, size_bytes: int) -> None:
        if entries > self._confirmed:
            self._confirmed, self._confirmed_bytes, self._durable = entries, size_bytes, end
            while self._kept and self._kept[0][0] + len(self._kept[0][1]) <= end:
                self._kept.popleft()

    def _send_next(self, ledger: _OpenLedger) -> None:
        """Send blocks that are queued: as many as fit into an entry, or one."""
        blocks = [self._queued.popleft()]
        size_bytes = len(blocks[0])
        while self._queued and size_bytes + len(self._queued[0]) <= ENTRY_BYTES_MAX:
            blocks.append(self._queued.popleft())
            size_bytes += len(blocks[-1])
        self._queued_bytes -= size_bytes
        for entry in entries_of(blocks[0] if len(blocks) == 1 else b"".join(blocks)):
            self._send(ledger, entry)

    def _send_filler(self, ledger: _OpenLedger) -> None:
        """A recovery writes each entry anew that the bookies do not know to be confirmed. Behind many or large entries
        that were sent together, one more entry makes that known, so that a takeover is short; nothing waits for it.
        """
        entries, size_bytes = self._sent - self._known, self._sent_bytes - self._known_bytes
        is_long = entries > _REWRITTEN_ENTRIES_MAX or (entries > 1 and size_bytes > _REWRITTEN_BYTES_MAX)
        if is_long and self._confirmed == self._sent and not self._done:
            self._send(ledger, FILLER)

    def _send(self, ledger: _OpenLedger, entry: bytes) -> None:
        self._known, self._known_bytes = self._confirmed, self._confirmed_bytes
        try:
            ledger.writer.append(entry)
        except LedgerFailed:
            raise
        except Exception as error:  # of the client, as of Java's memory: a part of a block may have been sent
            raise LedgerFailed(f"{type(error).__name__}: {error}") from error
        if entry != FILLER:
            self._sent_end += len(entry) - 1
        ledger.source.note_written(self._sent_end)
        self._sent += 1
        self._sent_bytes += len(entry)


def info_of(segment: StoredSegment) -> SegmentInfo:
    """Returns what the port says of a segment in a manifest."""
    return SegmentInfo(
        name=segment.name, kind=SegmentKind(segment.kind), first=segment.first, end=segment.end,
        created_at_ms=segment.created_at_ms, epoch=segment.epoch,
    )  # fmt: skip
