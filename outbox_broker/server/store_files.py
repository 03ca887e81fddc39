"""Writes what bookies keep for a broker to files, while the broker runs: its logs for the proof, or all of one moment.

An export has the message and the action log, as the reconciliation reads them. Its owner is not asked. A second export
to the same folder reads only what has changed: a sealed segment never does.

A copy is a data folder. The owner names the segments and their ends, of one moment; they are read from the bookies
beside it. The folder is another generation of the broker, as a restored one is: it may be served, backed up, or kept.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from outbox_broker.backup.restore import begin_restore, finish_restore, refuse_unless_empty
from outbox_broker.log.folder_format import EXPORT, note_format
from outbox_broker.log.folder_lock import PARTS, refuse_nested
from outbox_broker.log.restored_folder import Restored, epoch_of_restore
from outbox_broker.log.storage import Storage
from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.segments.local import SUFFIX
from outbox_broker.segments.port import SegmentInfo, require_name
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.common.private_files import open_private, write_private
from outbox_core.journal.block import SEGMENT_HEAD_BYTES, SegmentHead, SegmentKind
from outbox_core.protocol.wire import SnapshotAnswer, SnapshotSegment
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

LOGS: Final = {"actions": SegmentKind.ACTIONS, "messages": SegmentKind.MESSAGES}
"""Actions first: each message that one names is in the message log when that is read."""
SCHEDULE: Final = PARTS[-1]
CONFIRMED_S: Final = 1.0
"""How long the bookies may take to learn what their writer knows to be confirmed, several times over."""
ATTEMPTS_MAX: Final = 20


# -- an export ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsExported:
    """`kept`: segments that an earlier export had written, as they are."""

    segments: int = 0
    kept: int = 0
    written_bytes: int = 0


def export_logs(
    folder: Path, *, cluster: str, view: Callable[[], LedgerView | None], pause: threading.Event | None = None
) -> LogsExported:  # fmt: skip
    """Write the logs to a folder: a new one, or that of an earlier export of the same cluster. `view`: of the broker's
    shard, as it is now.

    Raises ConfigurationError if there is no broker, or the folder holds other things, with nothing done; StorageFailed
    if the bookies do not answer, or segments go all the time while they are read, SegmentDamaged if a part of one is
    lost.
    """
    pause, exported = pause or threading.Event(), list[LogsExported]()
    _viewed(view)
    try:
        _refuse_other(folder, cluster)
        for log, kind in LOGS.items():
            (folder / log).mkdir(mode=0o700, parents=True, exist_ok=True)
            for attempt in range(1, ATTEMPTS_MAX + 1):
                pause.wait(CONFIRMED_S)
                try:
                    exported.append(_export(_viewed(view), folder / log, kind))
                    break
                except StorageFailed as error:  # the owner has dropped a segment since, or has not sealed one yet
                    if attempt == ATTEMPTS_MAX:
                        raise
                    logger.info("log_read_again", extra={"log": log, "error": str(error)})
    except OSError as error:
        raise StorageFailed(f"nothing was exported to {error.filename or folder}: {error.strerror}") from error
    return LogsExported(
        segments=sum(one.segments for one in exported), kept=sum(one.kept for one in exported),
        written_bytes=sum(one.written_bytes for one in exported),
    )  # fmt: skip


def _refuse_other(folder: Path, cluster: str) -> None:
    """Raise ConfigurationError unless a folder is empty, or an export of this cluster: what an export does not know in
    it, it removes. An empty one becomes an export. Raises OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    marker = folder / EXPORT
    if marker.exists():
        if marker.read_text(encoding="utf-8").strip() != cluster:
            raise ConfigurationError(f"{folder} is the export of another broker: name a new folder")
    elif any(folder.iterdir()):
        raise ConfigurationError(f"{folder} holds other things than an export: name a new folder")
    else:
        write_private(marker, f"{cluster}\n".encode())


def _viewed(view: Callable[[], LedgerView | None]) -> LedgerView:
    found = view()
    if found is None:
        raise ConfigurationError("no broker has opened this path yet: there is nothing to export")
    return found


def _export(view: LedgerView, folder: Path, kind: SegmentKind) -> LogsExported:
    infos = [info for info in view.list() if info.kind is kind and info.name.startswith(f"{folder.name}-")]
    if not infos:  # the first action is written by the opening, and a checkpoint is always kept
        raise StorageFailed(f"the broker has no segment of its {folder.name} yet")
    sizes, kept, written = dict[str, int](), 0, 0
    for info in infos:
        path = folder / f"{info.name}{SUFFIX}"
        known = _known_size(view, info, path)
        sizes[info.name] = _write(view, info, path) if known is None else known
        kept, written = kept + (known is not None), written + (0 if known is not None else sizes[info.name])
    for info, following in pairwise(infos):
        if info.first + sizes[info.name] != following.first:
            raise StorageFailed(f"{info.name}: the bookies do not know all of it to be confirmed yet")
    names = {f"{info.name}{SUFFIX}" for info in infos}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    return LogsExported(segments=len(infos), kept=kept, written_bytes=written)


def _known_size(view: LedgerView, info: SegmentInfo, path: Path) -> int | None:
    """Returns how many bytes of blocks a sealed segment has that an earlier export wrote; None for others."""
    end = view.sealed_bytes(info.name)
    if end is None or not path.exists() or path.stat().st_size != SEGMENT_HEAD_BYTES + end:
        return None
    with path.open("rb") as file:
        return end if file.read(SEGMENT_HEAD_BYTES) == _head_of(info) else None


def _write(view: LedgerView, info: SegmentInfo, path: Path) -> int:
    """Write one segment, durably; returns how many bytes of blocks it has."""
    unfinished = path.with_suffix(".new")
    with open_private(unfinished) as file:  # bodies are in it
        file.write(_head_of(info))
        for piece in view.confirmed_bytes(info.name):
            file.write(piece)
        size_bytes = file.tell()
        file.flush()
        os.fsync(file.fileno())  # a later export keeps it by its size and its head
    unfinished.replace(path)
    return size_bytes - SEGMENT_HEAD_BYTES


def _head_of(info: SegmentInfo) -> bytes:
    return SegmentHead(
        kind=info.kind, epoch=info.epoch, first=info.first, created_at_ms=info.created_at_ms
    ).encode()  # fmt: skip


# -- a copy ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCopied:
    """Of which moment the copy is, and what it has."""

    at_ms: int
    segments: int
    size_bytes: int


def copy_broker(
    folder: Path, *, ask: Callable[[], SnapshotAnswer], view: Callable[[], LedgerView | None], storage: Storage,
    clock: Clock, shows: Callable[[int, int], None], pause: threading.Event | None = None,
) -> BrokerCopied:  # fmt: skip
    """Copy to a folder that is made, or is empty. `ask`: the owner for a snapshot; `view`: of the broker's shard, as it
    is now; `shows`: bytes that are done, and all, as far as that is known.

    Raises ConfigurationError, with nothing done, if the folder is not empty, or the broker that was asked is none on
    BookKeeper; StorageFailed if the bookies do not answer, or segments go all the time while they are read.
    """
    refuse_unless_empty(folder)
    refuse_nested(folder)
    pause = pause or threading.Event()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        begin_restore(folder, storage=storage)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            snapshot = _asked(ask)
            pause.wait(CONFIRMED_S)
            try:
                size_bytes = _copy_all(folder, snapshot, view(), shows)
                break
            except StorageFailed as error:  # a segment was dropped since; or no bookie knows yet what is confirmed
                if attempt == ATTEMPTS_MAX:
                    raise
                logger.info("broker_copied_again", extra={"error": str(error)})
        now_ms = clock.now_ms()
        before = max((segment.epoch for segment in snapshot.segments), default=0)
        restored = Restored(at_ms=now_ms, backup_at_ms=snapshot.at_ms, epoch=epoch_of_restore(now_ms, before=before))
        finish_restore(folder, [folder / part for part in PARTS], restored, storage=storage)
        note_format(folder)
    except OSError as error:
        raise StorageFailed(f"the broker was not copied: {error.filename or folder}: {error.strerror}") from error
    return BrokerCopied(at_ms=snapshot.at_ms, segments=len(snapshot.segments), size_bytes=size_bytes)


def _asked(ask: Callable[[], SnapshotAnswer]) -> SnapshotAnswer:
    snapshot = ask()
    if not snapshot.segments:
        raise ConfigurationError("the broker that was asked has a data folder: back that up, or name another --url")
    for segment in snapshot.segments:
        require_name(segment.name)  # it becomes a path
    return snapshot


def _copy_all(
    folder: Path, snapshot: SnapshotAnswer, view: LedgerView | None, shows: Callable[[int, int], None]
) -> int:  # fmt: skip
    if view is None:
        raise ConfigurationError("no broker has opened this path yet: the one that was asked has another --store")
    for part in PARTS:
        shutil.rmtree(folder / part, ignore_errors=True)  # of an attempt before
        (folder / part).mkdir(mode=0o700)
    copied = 0
    for segment in snapshot.segments:
        part = segment.name.partition("-")[0]
        path = folder / (part if part in PARTS else SCHEDULE) / f"{segment.name}{SUFFIX}"
        copied += _copy(segment, path, view)
        shows(copied, max(copied, snapshot.size_bytes))
    return copied


def _copy(segment: SnapshotSegment, path: Path, view: LedgerView) -> int:
    """Copy one segment up to its end; returns its size. Raises StorageFailed if it is gone, or is not confirmed yet."""
    head = SegmentHead(
        kind=SegmentKind(segment.kind), epoch=segment.epoch, first=segment.first, created_at_ms=segment.created_at_ms
    ).encode()
    left = segment.end
    with open_private(path) as file:
        file.write(head)
        for piece in view.confirmed_bytes(segment.name):
            taken = piece if left is None else piece[:left]
            file.write(taken)
            if left is not None:
                left -= len(taken)
                if not left:
                    break
        size_bytes = file.tell()
    if left:
        raise StorageFailed(f"{segment.name}: the bookies do not know all of it to be confirmed yet")
    return size_bytes
