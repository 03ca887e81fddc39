"""Exports the logs of a broker on BookKeeper, while it runs, as a folder that the reconciliation reads like a broker's.

Its owner is not fenced. A second export to the same folder reads only what has changed: a sealed segment never does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.segments.port import SegmentInfo
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.common.private_files import open_private
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


@dataclass(slots=True)
class LogsExported:
    """`kept`: segments that an earlier export had written, as they are."""

    segments: int = 0
    kept: int = 0
    written_bytes: int = 0


def export_logs(
    folder: Path, *, view: Callable[[], LedgerView | None], pause: threading.Event | None = None
) -> LogsExported:  # fmt: skip
    """Write the logs to a folder: a new one, or that of an earlier export. `view`: of the broker's shard, as it is now.

    Raises ConfigurationError if there is no broker, StorageFailed if the bookies do not answer, or segments go all the
    time while they are read, SegmentDamaged if a part of one is lost.
    """
    pause, exported = pause or threading.Event(), LogsExported()
    for log, kind in LOGS.items():
        (folder / log).mkdir(mode=0o700, parents=True, exist_ok=True)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            pause.wait(CONFIRMED_S)
            try:
                _export(_viewed(view), folder / log, kind, exported)
                break
            except StorageFailed as error:  # the owner has dropped a segment since, or has not sealed one yet
                if attempt == ATTEMPTS_MAX:
                    raise
                logger.info("log_read_again", extra={"log": log, "error": str(error)})
    return exported


def _viewed(view: Callable[[], LedgerView | None]) -> LedgerView:
    found = view()
    if found is None:
        raise ConfigurationError("no broker has opened this path yet: there is nothing to export")
    return found


def _export(view: LedgerView, folder: Path, kind: SegmentKind, exported: LogsExported) -> None:
    infos = [info for info in view.list() if info.kind is kind and info.name.startswith(f"{folder.name}-")]
    sizes = {info.name: _write(view, info, folder / f"{info.name}{SUFFIX}", exported) for info in infos}
    for info, following in pairwise(infos):
        if info.first + sizes[info.name] != following.first:
            raise StorageFailed(f"{info.name}: the bookies do not know all of it to be confirmed yet")
    names = {f"{info.name}{SUFFIX}" for info in infos}
    for path in folder.glob(f"{folder.name}-*{SUFFIX}"):
        if path.name not in names:
            path.unlink()


def _write(view: LedgerView, info: SegmentInfo, path: Path, exported: LogsExported) -> int:
    """Write one segment, unless it is there as it is; returns how many bytes of blocks it has."""
    head = SegmentHead(kind=info.kind, epoch=info.epoch, first=info.first, created_at_ms=info.created_at_ms).encode()
    exported.segments += 1
    if info.end is not None and path.exists() and path.stat().st_size == SEGMENT_HEAD_BYTES + info.end:
        with path.open("rb") as file:
            if file.read(SEGMENT_HEAD_BYTES) == head:
                exported.kept += 1
                return info.end
    unfinished = path.with_suffix(".new")
    with open_private(unfinished) as file:  # bodies are in it
        file.write(head)
        for piece in view.confirmed_bytes(info.name):
            file.write(piece)
        size_bytes = file.tell()
    unfinished.replace(path)
    exported.written_bytes += size_bytes
    return size_bytes - SEGMENT_HEAD_BYTES
