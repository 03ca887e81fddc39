"""Restores a backup onto bookies, as another generation of the broker that it is of: the way of a data folder to them.

The backup has a data folder's files. What an opening of that folder would take for torn tails is cut here, since in a
closed ledger nothing is one; all else is copied block by block, damage too.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from outbox_broker.backup.manifest import BackedUpFile, Manifest, chunks_of, content_path, digest_of
from outbox_broker.backup.restore import refuse_changed, whole_manifest
from outbox_broker.journal.replay import JournalReplay
from outbox_broker.log.cordon import NAME as CORDON
from outbox_broker.log.folder_lock import PARTS
from outbox_broker.log.restored_folder import NAME as RESTORED
from outbox_broker.log.restored_folder import Restored, epoch_of_restore
from outbox_broker.segments.folder_view import FolderView
from outbox_broker.segments.ledger import ENTRY_BYTES_MAX
from outbox_broker.segments.ledger_import import LedgerImport
from outbox_broker.segments.ledger_takeover import Shard
from outbox_broker.segments.local import LOGS, SUFFIX
from outbox_broker.segments.port import SegmentInfo
from outbox_broker.segments.writer_epoch import FILE_NAME as EPOCH
from outbox_broker.segments.writer_epoch import EpochFile
from outbox_broker.server.store_files import until_answered
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.block import SEGMENT_HEAD_BYTES, scan
from outbox_core.journal.journal import SegmentDamaged

ATTEMPTS_MAX: Final = 10
"""How often a segment is written anew, with a pause, while its bookies do not answer: a long restore outlives a short
outage."""
PAUSE_S: Final = 1.0
Shows = Callable[[int, int], None]
_CURE: Final = "restore it into a folder, start a broker there, and back that up"


def restore_to_bookies(
    backup: Path, shard: Shard, *, clock: Clock, shows: Shows, pause: threading.Event | None = None
) -> tuple[Manifest, Restored]:  # fmt: skip
    """Restore a backup, which is verified before, to a broker's shard that was never opened. `shows`: bytes that are
    done, and all: each is read twice.

    Raises SegmentDamaged if the backup is damaged, or no broker would open what is in it; ConfigurationError if there
    is a broker already, or the backup is none of a broker; both with no broker made. StorageFailed: there is none, or
    all of it.
    """
    imported = LedgerImport(shard)
    try:
        manifest = whole_manifest(backup, shows=lambda done, total: shows(done, 2 * total))
        if not {f"{part}/{EPOCH}" for part in PARTS} <= {file.path for file in manifest.files}:
            raise ConfigurationError(f"{backup} is no backup of a broker: of a delay service only a folder is restored")
        with _laid_out(backup, manifest) as folder:
            _import_parts(imported, folder, manifest, shows=shows, pause=pause or threading.Event())
            now_ms, before = clock.now_ms(), max(EpochFile(folder / part).read() for part in PARTS)
            restored = Restored(
                at_ms=now_ms, backup_at_ms=manifest.at_ms, epoch=epoch_of_restore(now_ms, before=before)
            )  # fmt: skip
            imported.finish(epoch=restored.epoch, annotations=_annotations(folder, restored))
    except OSError as error:
        raise StorageFailed(f"the backup was not restored: {error.filename or backup}: {error.strerror}") from error
    return manifest, restored


@contextmanager
def _laid_out(backup: Path, manifest: Manifest) -> Iterator[Path]:
    """Yields a folder that has the data folder's files, as links to the backup's contents."""
    with tempfile.TemporaryDirectory(prefix="outbox-restore-") as name:
        folder = Path(name)
        for part in PARTS:
            (folder / part).mkdir()
        for file in manifest.files:
            (folder / file.path).symlink_to(content_path(backup.resolve(), file))
        yield folder


def _import_parts(
    imported: LedgerImport, folder: Path, manifest: Manifest, *, shows: Shows, pause: threading.Event
) -> None:  # fmt: skip
    files, done = {file.path: file for file in manifest.files}, manifest.size_bytes
    for part in PARTS:
        view = FolderView(folder / part, boot=manifest.boot)
        if view.missing is not None:
            raise SegmentDamaged(f"no broker opens what is in the backup: {view.missing}")
        for unreadable in view.unreadable:
            raise SegmentDamaged(f"{unreadable.name} is not whole in the backup: {unreadable.why}; {_CURE}")
        ends = _log_ends(view)
        for segment in view.list():
            file = files[f"{part}/{segment.name}{SUFFIX}"]
            if segment.kind not in LOGS or segment.name in ends:  # what was not acknowledged goes at an opening, too
                data = _content(folder / file.path, file)
                end = ends.get(segment.name, len(data))  # of others their log names what counts
                # Where bytes are gone that were durable, what comes is behind where they ended.
                _import(imported, segment, data[:end].ljust(end, b"\0"), pause=pause)
            done += file.size_bytes
            shows(done, 2 * manifest.size_bytes)
    shows(2 * manifest.size_bytes, 2 * manifest.size_bytes)


def _import(imported: LedgerImport, info: SegmentInfo, data: bytes, *, pause: threading.Event) -> None:
    until_answered(
        lambda: imported.add(info, _pieces(data, first=info.first)), attempts_max=ATTEMPTS_MAX,
        pause=lambda: pause.wait(PAUSE_S),
    )  # fmt: skip


def _log_ends(view: FolderView) -> Mapping[str, int]:
    """Returns where each segment of a log ends that counts. Raises SegmentDamaged where an opening would."""
    ends: dict[str, int] = {}
    for log in sorted({segment.name.rpartition("-")[0] for segment in view.list() if segment.kind in LOGS}):
        replay = JournalReplay(view, log, has_checkpoints=log != "messages")
        ends |= {segment.name: following.first - segment.first for segment, following in pairwise(replay.segments)}
        ends |= {segment.name: replay.end - segment.first for segment in replay.segments[-1:]}
    return ends


def _content(path: Path, file: BackedUpFile) -> bytes:
    """Returns the bytes of a segment, without its head. Raises OSError; SegmentDamaged if they are not what was
    verified.
    """
    with path.open("rb") as content:
        chunks = list(chunks_of(content.fileno(), file.size_bytes))
    refuse_changed(file, [digest_of(chunk) for chunk in chunks])
    return b"".join(chunks)[SEGMENT_HEAD_BYTES:]


def _pieces(data: bytes, *, first: int) -> Iterator[bytes]:
    """Yields the bytes of a segment in whole blocks, as many as make an entry. All of them count by now."""
    begin = before = 0
    for block in scan(data, first=first, proven=first + len(data), same_boot=True, wanted=()):
        if block.end - begin > ENTRY_BYTES_MAX and before > begin:
            yield data[begin:before]
            begin = before
        before = block.end
    if begin < len(data):
        yield data[begin:]


def _annotations(folder: Path, restored: Restored) -> Mapping[str, str]:
    annotations = {RESTORED: msgspec.json.encode(restored).decode()}
    if (folder / CORDON).exists():
        annotations[CORDON] = (folder / CORDON).read_text(encoding="utf-8", errors="replace")
    return annotations
