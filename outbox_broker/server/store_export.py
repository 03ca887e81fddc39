"""Exports the logs of a broker on BookKeeper, while it runs, as a folder that the reconciliation reads like a broker's.

Its owner is not fenced. A second export to the same folder reads only what has changed: a sealed segment never does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from outbox_broker.log.folder_format import EXPORT
from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.segments.port import SegmentInfo
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.common.private_files import open_private, write_private
from outbox_core.journal.block import SEGMENT_HEAD_BYTES, SegmentHead, SegmentKind
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

LOGS: Final = {"actions": SegmentKind.ACTIONS, "messages": SegmentKind.MESSAGES}
"""Actions first: each message that one names is in the message log when that is read."""
SUFFIX: Final = ".segment"
CONFIRMED_S: Final = 1.0
"""How long the bookies may take to learn what their writer knows to be confirmed, several times over."""
ATTEMPTS_MAX: Final = 20
RETRY_S: Final = 0.25


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
