"""The manifest of a shard's segments: which ledgers hold which positions. Values and pure functions, no I/O.

A node names the manifest ledger of the current epoch. That ledger begins with a snapshot; records of changes follow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, TypeAlias

import msgspec

from outbox_core.common.errors import ConfigurationError
from outbox_core.journal.journal import SegmentDamaged

FORMAT: Final = 1
_GRANULARITY_PARTS: Final = 144
_BEGIN: Final = attrgetter("begin")


class EpochStart(msgspec.Struct, frozen=True, array_like=True):
    """When an epoch began: all earlier ones had ended by then. UTC milliseconds."""

    epoch: int
    at_ms: int


class ShardNode(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a shard's node, as JSON."""

    format: int = FORMAT
    cluster: str
    shard: str
    epoch: int
    ledger: int
    openings: list[EpochStart] = []


class LedgerPiece(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive positions of a segment in one ledger, from `begin` to the next piece. `entries`: None while open."""

    begin: int
    ledger: int
    epoch: int
    entries: int | None = None

    @property
    def end(self) -> int | None:
        """The position behind the ledger's last entry; None while it is open."""
        return None if self.entries is None else self.begin + self.entries


class PiecesAdded(msgspec.Struct, frozen=True, array_like=True, tag="pieces"):
    """Segments continue in new ledgers, each in one; what a segment had behind its piece's begin is dropped."""

    pieces: list[tuple[str, LedgerPiece]]


class ClosedPiece(msgspec.Struct, frozen=True, array_like=True):
    """The final number of a ledger's entries."""

    segment: str
    ledger: int
    entries: int


class PiecesClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """Ledgers have their final numbers of entries. Segments that were dropped meanwhile are ignored."""

    pieces: list[ClosedPiece]


class SegmentsDropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """Segments were deleted."""

    segments: list[str]


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """All segments, as a manifest ledger begins."""

    epoch: int
    segments: dict[str, list[LedgerPiece]]


ManifestRecord: TypeAlias = PiecesAdded | PiecesClosed | SegmentsDropped | Snapshot
_RECORDS: Final = msgspec.msgpack.Decoder(ManifestRecord)


@dataclass(slots=True)
class SegmentMap:
    """The pieces of each segment, ordered by position. Changed by apply() alone."""

    segments: dict[str, list[LedgerPiece]] = field(default_factory=dict)

    def apply(self, record: ManifestRecord) -> list[LedgerPiece]:
        """Apply a record; returns the pieces that no segment names any more."""
        match record:
            case PiecesAdded(pieces=added):
                return [unnamed for name, piece in added for unnamed in self._add(name, piece)]
            case PiecesClosed(pieces=closed):
                for one in closed:
                    self._close(one)
                return []
            case SegmentsDropped(segments=names):
                return [piece for name in names for piece in self.segments.pop(name, [])]
            case Snapshot(segments=segments):
                self.segments = {name: list(pieces) for name, pieces in segments.items()}
                return []

    def _add(self, name: str, piece: LedgerPiece) -> list[LedgerPiece]:
        before = self.segments.get(name, [])
        kept = [one for one in before if one.begin < piece.begin]
        self.segments[name] = [*kept, piece]
        return before[len(kept) :]

    def _close(self, closed: ClosedPiece) -> None:
        if closed.segment in self.segments:
            self.segments[closed.segment] = [
                msgspec.structs.replace(one, entries=closed.entries) if one.ledger == closed.ledger else one
                for one in self.segments[closed.segment]
            ]

    def snapshot(self, *, epoch: int) -> Snapshot:
        """Returns the map as a record."""
        return Snapshot(epoch, {name: list(pieces) for name, pieces in self.segments.items()})

    def ledgers(self) -> Iterator[int]:
        """Yields every ledger that a segment names."""
        return (piece.ledger for pieces in self.segments.values() for piece in pieces)

    def open_pieces(self) -> list[tuple[str, LedgerPiece]]:
        """Returns the pieces whose ledgers may still have a writer, each with its segment."""
        return [(name, one) for name, pieces in self.segments.items() for one in pieces if one.entries is None]


def change_count(record: ManifestRecord) -> int:
    """Returns how many pieces or segments a record changes; none if it is a snapshot."""
    match record:
        case PiecesAdded() | PiecesClosed():
            return len(record.pieces)
        case SegmentsDropped():
            return len(record.segments)
        case Snapshot():
            return 0


def piece_at(pieces: Sequence[LedgerPiece], position: int) -> LedgerPiece | None:
    """Returns the piece that holds a position; None if there is none."""
    index = bisect_right(pieces, position, key=_BEGIN) - 1
    return pieces[index] if index >= 0 else None


def replay(records: Iterable[bytes], *, ledger: int) -> SegmentMap:
    """Returns the map that a manifest ledger's records make. Raises SegmentDamaged if the ledger has no snapshot."""
    found = SegmentMap()
    is_empty = True
    for data in records:
        try:
            record = _RECORDS.decode(data)
        except msgspec.MsgspecError as error:
            raise SegmentDamaged(f"manifest ledger {ledger}: a record cannot be read: {error}") from error
        if is_empty and not isinstance(record, Snapshot):
            break
        is_empty = False
        found.apply(record)
    if is_empty:
        raise SegmentDamaged(f"manifest ledger {ledger}: it does not begin with a snapshot")
    return found


def encode_record(record: ManifestRecord) -> bytes:
    """Returns a record of a manifest ledger."""
    return msgspec.msgpack.encode(record)


def encode_node(node: ShardNode) -> bytes:
    """Returns the value of a shard's node."""
    return msgspec.json.encode(node)


def decode_node(value: bytes, *, cluster: str, shard: str) -> ShardNode:
    """Returns a node's content. Raises ConfigurationError if it is of another cluster or of a newer version."""
    try:
        version = msgspec.json.decode(value, type=_Version).format
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"the node of shard {shard} is no manifest ({error}): name the path that `outbox delay init` made"
        ) from error
    if version > FORMAT:
        raise ConfigurationError(
            f"the manifest of shard {shard} has version {version}; this code reads version {FORMAT}: upgrade this node"
        )
    node = msgspec.json.decode(value, type=ShardNode)
    if (node.cluster, node.shard) != (cluster, shard):
        raise ConfigurationError(
            f"the path holds shard {node.shard} of cluster {node.cluster!r}, not shard {shard} of {cluster!r}: "
            "name this cluster's own ZooKeeper path"
        )
    return node


def with_opening(openings: Sequence[EpochStart], opening: EpochStart, *, retention_ms: int) -> list[EpochStart]:
    """Returns the openings with another one, bounded: those older than twice the retention are dropped, and of several
    within a small part of it the last is kept. Both make epochs appear to end later, never earlier.
    """
    kept = [one for one in openings if one.at_ms > opening.at_ms - 2 * retention_ms]
    if kept and opening.at_ms - kept[-1].at_ms < retention_ms // _GRANULARITY_PARTS:
        kept.pop()
    return [*kept, opening]


def has_expired(epoch: int, openings: Sequence[EpochStart], *, now_ms: int, retention_ms: int) -> bool:
    """Returns whether an epoch ended at least `retention_ms` ago."""
    ended_ms = min((one.at_ms for one in openings if one.epoch > epoch), default=None)
    return ended_ms is not None and now_ms - ended_ms >= retention_ms


class _Version(msgspec.Struct):
    format: int
