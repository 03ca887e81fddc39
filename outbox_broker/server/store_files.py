"""Writes what bookies keep for a broker to files, while the broker runs: its logs for the proof, or all of one moment.

An export has the message and the action log, as the reconciliation reads them. Its owner is not asked.

A copy is a data folder. The owner names the segments and their ends, of one moment; they are read from the bookies
beside it. The folder is another generation of the broker, as a restored one is: it may be served, backed up, or kept.

A second export or copy to the same folder reads only what has changed: a sealed segment never does. One at a time has
the folder's lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

from outbox_broker.backup.restore import finish_restore, restoring
from outbox_broker.log.annotations import FolderAnnotations
from outbox_broker.log.cordon import NAME as CORDON
from outbox_broker.log.folder_format import EXPORT, note_format
from outbox_broker.log.folder_lock import PARTS, FolderLock
from outbox_broker.log.restored_folder import UNFINISHED, Restored, epoch_of_restore, restored
from outbox_broker.log.storage import DiskStorage, Storage
from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.segments.local import SUFFIX
from outbox_broker.segments.port import SegmentInfo, require_name
from outbox_broker.segments.writer_epoch import EpochFile
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.common.private_files import open_private, write_private
from outbox_core.journal.block import SEGMENT_HEAD_BYTES, SegmentHead, SegmentKind
from outbox_core.protocol.wire import SnapshotAnswer
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

LOGS: Final = {"actions": SegmentKind.ACTIONS, "messages": SegmentKind.MESSAGES}
"""Actions first: each message that one names is in the message log when that is read."""
SCHEDULE: Final = PARTS[-1]
COPY: Final = "copy"
"""The file that says of which cluster a data folder is a copy."""
CONFIRMED_S: Final = 1.0
"""How long the bookies may take to learn what their writer knows to be confirmed, several times over."""
ATTEMPTS_MAX: Final = 20
"""How often what the owner has dropped since it was listed, or what is not known to be confirmed yet, is read anew."""
T = TypeVar("T")


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
        with _exporting(folder, cluster):
            for log, kind in LOGS.items():
                (folder / log).mkdir(mode=0o700, exist_ok=True)
                exported.append(until_answered(partial(_export, folder / log, kind, view=view, pause=pause)))
    except OSError as error:
        raise StorageFailed(f"nothing was exported to {error.filename or folder}: {error.strerror}") from error
    return LogsExported(
        segments=sum(of_log.segments for of_log in exported), kept=sum(of_log.kept for of_log in exported),
        written_bytes=sum(of_log.written_bytes for of_log in exported),
    )  # fmt: skip


@contextmanager
def _exporting(folder: Path, cluster: str) -> Iterator[None]:
    """An export's folder as a context, locked. Raises ConfigurationError if another export goes to it, or it holds
    other things, with nothing done; OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_other(folder, cluster)
    lock = FolderLock(folder)
    lock.acquire()
    try:
        _refuse_other(folder, cluster)  # once more, now that nobody else can write
        write_private(folder / EXPORT, f"{cluster}\n".encode())
        yield
    finally:
        lock.release()


def _refuse_other(folder: Path, cluster: str) -> None:
    """Raise ConfigurationError unless a folder is empty, or an export of this cluster: what an export does not know in
    it, it removes.
    """
    if (folder / EXPORT).exists():
        if (folder / EXPORT).read_text(encoding="utf-8").strip() != cluster:
            raise ConfigurationError(f"{folder} is the export of another broker: name a new folder")
    elif any(path.name != "lock" for path in folder.iterdir()):
        raise ConfigurationError(f"{folder} holds other things than an export: name a new folder")


def _export(
    folder: Path, kind: SegmentKind, *, view: Callable[[], LedgerView | None], pause: threading.Event
) -> LogsExported:  # fmt: skip
    """Export one log. Raises StorageFailed, after which it may be tried again."""
    pause.wait(CONFIRMED_S)
    found = _viewed(view)
    infos = [info for info in found.list() if info.kind is kind and info.name.startswith(f"{folder.name}-")]
    if not infos and any(folder.iterdir()):  # a log that was begun has its newest segment always
        raise StorageFailed(f"the broker has no segment of its {folder.name} any more")
    sizes, kept, written = dict[str, int](), 0, 0
    for info in infos:
        path = folder / f"{info.name}{SUFFIX}"
        known = _known_size(found, info, path)
        sizes[info.name] = _write_segment(found, info, path) if known is None else known
        kept, written = kept + (known is not None), written + (0 if known is not None else sizes[info.name])
    for info, following in pairwise(infos):
        if info.first + sizes[info.name] != following.first:
            raise StorageFailed(f"{info.name}: the bookies do not know all of it to be confirmed yet")
    names = {f"{info.name}{SUFFIX}" for info in infos}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    return LogsExported(segments=len(infos), kept=kept, written_bytes=written)


# -- a copy ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCopied:
    """Of which moment the copy is, and what it has; `kept`: segments that an earlier copy had written, as they are."""

    at_ms: int
    segments: int
    size_bytes: int
    kept: int


def copy_broker(
    folder: Path, *, cluster: str, ask: Callable[[], SnapshotAnswer], view: Callable[[], LedgerView | None],
    storage: Storage, clock: Clock, shows: Callable[[int, int], None], pause: threading.Event | None = None,
) -> BrokerCopied:  # fmt: skip
    """Copy to a folder that is made, or is empty, or has an earlier copy of the same cluster that no broker opened.
    `ask`: the owner for a snapshot; `view`: of the broker's shard, as it is now; `shows`: bytes that are done, and all,
    as far as that is known.

    Raises ConfigurationError, with nothing done, if the folder holds other things, or the broker that was asked is none
    on BookKeeper; StorageFailed if the bookies do not answer, or segments go all the time while they are read. The
    folder is opened by nobody then, and may be copied to once more.
    """
    pause = pause or threading.Event()
    try:
        with restoring(folder, storage=storage, may_replace=partial(_is_copy, folder, cluster)):
            write_private(folder / COPY, f"{cluster}\n".encode())
            for part in PARTS:
                (folder / part).mkdir(mode=0o700, exist_ok=True)
            snapshot, copied = until_answered(partial(_copy, folder, ask=ask, view=view, shows=shows, pause=pause))
            now_ms, before = clock.now_ms(), max(segment.epoch for segment in snapshot.segments)
            epoch = epoch_of_restore(now_ms, before=before)
            origin = Restored(at_ms=now_ms, backup_at_ms=snapshot.at_ms, epoch=epoch)
            finish_restore(folder, [folder / part for part in PARTS], origin, storage=storage)
            note_format(folder)
    except OSError as error:
        raise StorageFailed(f"the broker was not copied: {error.filename or folder}: {error.strerror}") from error
    return copied


def _is_copy(folder: Path, cluster: str) -> bool:
    """Returns whether a folder has a copy of this cluster, or a part of one, that no broker opened: that would have
    counted its epochs up, and made it a broker's own. Raises ConfigurationError, OSError.
    """
    if not (folder / COPY).exists() or (folder / COPY).read_text(encoding="utf-8").strip() != cluster:
        return False
    if (folder / UNFINISHED).exists():
        return True
    origin = restored(FolderAnnotations(folder, storage=DiskStorage()))
    return origin is not None and {EpochFile(folder / part).read() for part in PARTS} == {origin.epoch}


def _copy(
    folder: Path, *, ask: Callable[[], SnapshotAnswer], view: Callable[[], LedgerView | None],
    shows: Callable[[int, int], None], pause: threading.Event,
) -> tuple[SnapshotAnswer, BrokerCopied]:  # fmt: skip
    """Copy all of one moment; returns what the owner named, and what was copied. Raises StorageFailed, after which it
    may be tried again.
    """
    snapshot = _asked(ask)
    pause.wait(CONFIRMED_S)
    found, size_bytes, kept, paths = _viewed(view), 0, 0, set[Path]()
    for segment in snapshot.segments:
        part = segment.name.partition("-")[0]
        path = folder / (part if part in PARTS else SCHEDULE) / f"{segment.name}{SUFFIX}"
        info = SegmentInfo(
            name=segment.name, kind=SegmentKind(segment.kind), first=segment.first, end=segment.end,
            created_at_ms=segment.created_at_ms, epoch=segment.epoch,
        )  # fmt: skip
        paths.add(path)
        known = _known_size(found, info, path)
        if known is None or segment.end not in {None, known}:  # None: of an earlier owner, all of it
            known = _write_segment(found, info, path, end=segment.end)
        else:
            kept += 1
        size_bytes += SEGMENT_HEAD_BYTES + known
        shows(size_bytes, max(size_bytes, snapshot.size_bytes))
    for path in [path for part in PARTS for path in (folder / part).iterdir()]:
        if path not in paths:  # of an attempt, or a copy, before
            path.unlink()
    FolderAnnotations(folder, storage=DiskStorage()).set(CORDON, found.annotation(CORDON))
    return snapshot, BrokerCopied(
        at_ms=snapshot.at_ms, segments=len(snapshot.segments), size_bytes=size_bytes, kept=kept
    )  # fmt: skip


def _asked(ask: Callable[[], SnapshotAnswer]) -> SnapshotAnswer:
    snapshot = ask()
    if not snapshot.segments:
        raise ConfigurationError("the broker that was asked has a data folder: back that up, or name another --url")
    for segment in snapshot.segments:
        require_name(segment.name)  # it becomes a path
    return snapshot


# -- both --------------------------------------------------------------------------------------------------------------


def _known_size(view: LedgerView, info: SegmentInfo, path: Path) -> int | None:
    """Returns how many bytes of blocks a sealed segment has that was written to the folder before; None for others. It
    is told by its size and its head, whose checksum counts, and never by its name alone.
    """
    if not path.exists():
        return None
    end = view.sealed_bytes(info.name)
    if end is None or path.stat().st_size != SEGMENT_HEAD_BYTES + end:
        return None
    with path.open("rb") as file:
        return end if file.read(SEGMENT_HEAD_BYTES) == _head_of(info) else None


def until_answered(
    ask: Callable[[], T], *, attempts_max: int = ATTEMPTS_MAX, pause: Callable[[], object] = lambda: None
) -> T:
    """Returns what the bookies answer, after several attempts if need be, with a pause between two. Raises the last
    one's StorageFailed.
    """
    for _ in range(attempts_max - 1):
        try:
            return ask()
        except StorageFailed as error:
            logger.info("bookies_asked_again", extra={"error": str(error)})
            pause()
    return ask()


def _viewed(view: Callable[[], LedgerView | None]) -> LedgerView:
    found = view()
    if found is None:
        raise ConfigurationError("no broker has opened this path yet: correct --store")
    return found


def _write_segment(view: LedgerView, info: SegmentInfo, path: Path, *, end: int | None = None) -> int:
    """Write a segment, up to an end or all that is confirmed, durably; returns how many bytes of blocks it has. Raises
    StorageFailed if it is gone, or so much is not confirmed yet.
    """
    unfinished, size_bytes = path.with_suffix(".new"), 0
    with open_private(unfinished) as file:  # bodies are in it
        file.write(_head_of(info))
        for piece in view.confirmed_bytes(info.name):
            size_bytes += file.write(piece if end is None else piece[: end - size_bytes])
            if size_bytes == end:
                break
        file.flush()
        # A later export keeps it by its size and head, and a copied folder says at its end that it is whole.
        os.fsync(file.fileno())
    if end is not None and size_bytes < end:
        raise StorageFailed(f"{info.name}: the bookies do not know all of it to be confirmed yet")
    unfinished.replace(path)
    return size_bytes


def _head_of(info: SegmentInfo) -> bytes:
    return SegmentHead(
        kind=info.kind, epoch=info.epoch, first=info.first, created_at_ms=info.created_at_ms
    ).encode()  # fmt: skip
