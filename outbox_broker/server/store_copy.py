"""Copies what bookies keep for a broker to a data folder, as it is at one moment, while the broker runs.

The owner names the segments and their ends; they are read from the bookies beside it. The folder is another generation
of the broker, as a restored one is: it may be served, backed up, or kept.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_broker.backup.restore import begin_restore, finish_restore, refuse_unless_empty
from outbox_broker.log.folder_format import note_format
from outbox_broker.log.folder_lock import PARTS, refuse_nested
from outbox_broker.log.restored_folder import Restored, epoch_of_restore
from outbox_broker.log.storage import Storage
from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.segments.local import SUFFIX
from outbox_broker.segments.port import require_name
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.common.private_files import open_private
from outbox_core.journal.block import SegmentHead, SegmentKind
from outbox_core.protocol.wire import SnapshotAnswer, SnapshotSegment
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

SCHEDULE: Final = PARTS[-1]
ATTEMPTS_MAX: Final = 10
CONFIRMED_S: Final = 1.0
"""How long the bookies may take to learn what their writer knows to be confirmed, several times over."""


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
