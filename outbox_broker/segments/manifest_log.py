"""The manifest that a shard's owner writes: which ledgers hold the shard's segments, in a ledger named by its node.

A change is applied and sent at once, and counts once it is confirmed. Many changes may share one wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from outbox_broker.segments.ledger_manifest import ManifestRecord, StoredSegment, encode_node
from outbox_broker.segments.ledger_takeover import (
    ManifestWriter,
    OwnedShard,
    Shard,
    begin_manifest,
    name_manifest,
)
from outbox_broker.segments.ledgers import LedgerFailed
from outbox_core.common.errors import StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_SNAPSHOTS_PER_RETENTION: Final = 24


@dataclass(frozen=True, slots=True)
class ManifestPlace:
    """The end of a change in a manifest ledger."""

    writer: ManifestWriter
    entries: int


class ManifestLog:
    """One shard's manifest in one epoch. Thread-safe; its guard is innermost, but for those of the ledgers."""

    def __init__(self, shard: Shard, taken: OwnedShard, *, changes_max: int, retention_ms: int) -> None:
        """`changes_max`: segments named or closed in a manifest ledger, after which another begins with a snapshot."""
        self.epoch = taken.node.node.epoch
        self._shard = shard
        self._map = taken.segments
        self._node = taken.node
        self._writer = taken.manifest
        self._changes_max = changes_max
        self._retention_ms = retention_ms
        self._guard = threading.Lock()
        self._naming = threading.Lock()
        """Held while the node is written, by one thread at a time; taken after the guard."""
        self._unnamed: list[tuple[ManifestPlace, list[int]]] = []  # ledgers to delete once a change is confirmed
        self._snapshot_ms = shard.clock.monotonic_ms()
        self._has_dropped_old = False  # whether ledgers of earlier epochs were dropped since the snapshot

    def segments(self) -> list[StoredSegment]:
        """Returns all segments, sorted by name."""
        with self._guard:
            return [self._map.segments[name] for name in sorted(self._map.segments)]

    def segment(self, name: str) -> StoredSegment | None:
        """Returns a segment; None if there is none of this name."""
        with self._guard:
            return self._map.segments.get(name)

    def names(self, segment: str, ledger_id: int) -> bool:
        """Returns whether a segment is in a ledger."""
        found = self.segment(segment)
        return found is not None and found.ledger == ledger_id

    def known(self, names: Iterable[str]) -> list[str]:
        """Returns those names that are segments."""
        with self._guard:
            return [name for name in names if name in self._map.segments]

    def change(self, record: ManifestRecord) -> ManifestPlace:
        """Apply a change, and send it, without waiting; it counts once it is confirmed. Raises LedgerFailed, which is
        final.
        """
        with self._guard:
            self._roll()
            place = ManifestPlace(self._writer, self._writer.append(record))
            unnamed = self._map.apply(record)
            self._has_dropped_old |= any(segment.epoch < self.epoch for segment in unnamed)
            own = [segment.ledger for segment in unnamed if segment.epoch == self.epoch]
            if own:
                self._unnamed.append((place, own))
            return place

    def confirm(self, place: ManifestPlace) -> None:
        """Return once a change is durable, and delete the ledgers of this epoch that it, or one before, left without a
        name. Raises LedgerFailed, which is final.
        """
        place.writer.confirm(place.entries)  # a ledger that another one has followed is confirmed
        with self._guard:
            unnamed, self._unnamed = self._unnamed, []
            self._unnamed = [one for one in unnamed if not self._is_confirmed(one[0], by=place)]
            done = [ids for change, ids in unnamed if self._is_confirmed(change, by=place)]
        self._delete([ledger_id for ids in done for ledger_id in ids])

    def annotation(self, name: str) -> str | None:
        """Returns what the shard's node says under a name."""
        return self._node.node.annotations.get(name)

    def annotate(self, name: str, value: str | None) -> None:
        """Have the shard's node say something under a name; None: nothing. By its version: an owner that was deposed
        changes nothing of its successor's. Raises LedgerFailed, which is final.
        """
        with self._naming:
            before = self._node.node
            annotations = {other: said for other, said in before.annotations.items() if other != name}
            annotations |= {} if value is None else {name: value}
            # Also where nothing changes: an owner that was deposed must not say of its successor's that it is so.
            node = msgspec.structs.replace(before, annotations=annotations)
            try:
                version = self._shard.manifests.write(self._shard.name, encode_node(node), version=self._node.version)
            except StorageFailed as error:  # it may have been written: only another opening finds out
                raise LedgerFailed(str(error)) from error
            if version is None:
                raise LedgerFailed("the shard's node was changed by another process")
            self._node.node, self._node.version = node, version

    def release(self) -> None:
        """Release the manifest ledger's writer, without waiting for anything."""
        self._writer.release()

    def _is_confirmed(self, change: ManifestPlace, *, by: ManifestPlace) -> bool:
        is_before = change.writer is by.writer and change.entries <= by.entries
        return is_before or change.writer is not self._writer

    def _roll(self) -> None:
        """Begin another manifest ledger if this one is long. The old one has had this process alone as a writer."""
        if not self._is_long():
            return
        before = self._writer
        before.confirm(before.entries)
        writer = begin_manifest(self._shard, self._map, epoch=self.epoch)
        with self._naming:
            node = msgspec.structs.replace(self._node.node, ledger=writer.ledger_id)
            try:
                self._node.version = name_manifest(self._shard, node, writer, version=self._node.version)
            except StorageFailed as error:  # whose the shard is, and what it names, the caller's failure finds out
                raise LedgerFailed(str(error)) from error
            self._node.node, self._writer = node, writer
        self._snapshot_ms, self._has_dropped_old = self._shard.clock.monotonic_ms(), False
        before.release()
        self._delete([before.ledger_id])

    def _is_long(self) -> bool:
        """Returns whether another manifest ledger is due. The sweeper reads snapshots alone, since they are confirmed:
        so one is also due after ledgers of earlier epochs were dropped.
        """
        age_ms = self._shard.clock.monotonic_ms() - self._snapshot_ms
        return self._writer.changes >= self._changes_max or (
            self._has_dropped_old and age_ms >= self._retention_ms // _SNAPSHOTS_PER_RETENTION
        )

    def _delete(self, ledger_ids: Sequence[int]) -> None:
        """Delete ledgers that only this process has written to. What fails is left to the sweeper."""
        if ledger_ids:
            try:
                self._shard.ledgers.delete(ledger_ids)
            except LedgerFailed as error:
                logger.warning("ledgers_not_deleted", extra={"ledgers": len(ledger_ids), "error": str(error)})
