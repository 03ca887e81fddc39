"""The manifest of a shard's segments: which ledger each of them is in. Values and pure functions, no I/O.

A node names the manifest ledger of the current epoch. That ledger begins with a snapshot; records of changes follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.protocol.decoder_cache import json_decoder

FORMAT: Final = 2
_GRANULARITY_PARTS: Final = 144


class EpochStart(msgspec.Struct, frozen=True, array_like=True):
    """When an epoch began: all earlier ones had ended by then. UTC milliseconds."""

    epoch: int
    at_ms: int


class ShardNode(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a shard's node, as JSON. `annotations`: what its owners leave to those after them."""

    format: int = FORMAT
    cluster: str
    shard: str
    epoch: int
    ledger: int
    openings: list[EpochStart] = []
    annotations: dict[str, str] = {}


class StoredSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment in its ledger, by its port's words. `entries` and `end`: None while they are not known; a ledger whose
    entries are known is closed.
    """

    name: str
    kind: int
    first: int
    ledger: int
    epoch: int
    created_at_ms: int
    entries: int | None = None
    end: int | None = None


class SegmentCreated(msgspec.Struct, frozen=True, array_like=True, tag="created"):
    """A segment was begun in a new ledger. It replaces one of the same name."""

    segment: StoredSegment


class SealedSegment(msgspec.Struct, frozen=True, array_like=True):
    """The final number of a ledger's entries, and the position behind the last one, if it is known."""

    name: str
    ledger: int
    entries: int
    end: int | None = None


class SegmentsSealed(msgspec.Struct, frozen=True, array_like=True, tag="sealed"):
    """Ledgers are closed. Segments that were dropped meanwhile are ignored."""

    segments: list[SealedSegment]


class SegmentsDropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """Segments were deleted."""

    names: list[str]


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """All segments, as a manifest ledger begins."""

    epoch: int
    segments: list[StoredSegment]


ManifestRecord: TypeAlias = SegmentCreated | SegmentsSealed | SegmentsDropped | Snapshot
_RECORDS: Final = msgspec.msgpack.Decoder(ManifestRecord)


@dataclass(slots=True)
class SegmentMap:
    """The segments of a shard by name. Changed by apply() alone."""

    segments: dict[str, StoredSegment] = field(default_factory=dict)

    def apply(self, record: ManifestRecord) -> list[StoredSegment]:
        """Apply a record; returns what is named no more."""
        match record:
            case SegmentCreated(segment=segment):
                before = self.segments.pop(segment.name, None)
                self.segments[segment.name] = segment
                return [] if before is None else [before]
            case SegmentsSealed(segments=sealed):
                for one in sealed:
                    self._seal(one)
                return []
            case SegmentsDropped(names=names):
                return [dropped for name in names if (dropped := self.segments.pop(name, None)) is not None]
            case Snapshot(segments=segments):
                self.segments = {segment.name: segment for segment in segments}
                return []

    def _seal(self, sealed: SealedSegment) -> None:
        segment = self.segments.get(sealed.name)
        if segment is not None and segment.ledger == sealed.ledger:
            self.segments[sealed.name] = msgspec.structs.replace(segment, entries=sealed.entries, end=sealed.end)

    def snapshot(self, *, epoch: int) -> Snapshot:
        """Returns the map as a record."""
        return Snapshot(epoch, list(self.segments.values()))

    def ledgers(self) -> Iterator[int]:
        """Yields every ledger that a segment is in."""
        return (segment.ledger for segment in self.segments.values())

    def open_segments(self) -> list[StoredSegment]:
        """Returns the segments whose ledgers may still have a writer."""
        return [segment for segment in self.segments.values() if segment.entries is None]


def change_count(record: ManifestRecord) -> int:
    """Returns how many segments a record changes; none if it is a snapshot."""
    match record:
        case SegmentCreated():
            return 1
        case SegmentsSealed():
            return len(record.segments)
        case SegmentsDropped():
            return len(record.names)
        case Snapshot():
            return 0


def replay(records: Iterable[bytes], *, ledger: int) -> SegmentMap:
    """Returns the map that a manifest ledger's records make. Raises SegmentDamaged if the ledger has no snapshot."""
    found = SegmentMap()
    is_empty = True
    for data in records:
        try:
            record = _RECORDS.decode(data)
        except DECODE_ERRORS as error:
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
    """Returns a node's content. Raises ConfigurationError if it is of another cluster or of another version."""
    try:
        version = json_decoder(_Version).decode(value).format
    except DECODE_ERRORS as error:
        raise ConfigurationError(
            f"the node of shard {shard} is no manifest ({error}): name the path that `outbox delay init` made"
        ) from error
    if version > FORMAT:
        raise ConfigurationError(
            f"the manifest of shard {shard} has version {version}; this code reads version {FORMAT}: upgrade this node"
        )
    if version < FORMAT:
        raise ConfigurationError(
            f"the manifest of shard {shard} has version {version}, an earlier format, and this code reads version "
            f"{FORMAT}: drain the cluster with the version that wrote it, and begin at an empty ZooKeeper path"
        )
    node = json_decoder(ShardNode).decode(value)
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
