"""Restores a backup into an empty folder, as another generation of the broker that it is of.

The folder says that it is being restored until all is on the disk, so that no part of one is ever opened. What was
copied is durable then, as no page of it can be missing: the notes of logs are made this machine's. Epochs jump above
all those of the broker that was backed up, in its later life, too (log/restored_folder.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from outbox_broker.backup.manifest import (
    CHUNK_BYTES,
    BackedUpFile,
    Manifest,
    chunks_of,
    content_path,
    digest_of,
)
from outbox_broker.backup.verify import check_backup
from outbox_broker.log.folder_format import refuse_format
from outbox_broker.log.folder_lock import FolderLock, refuse_nested
from outbox_broker.log.restored_folder import NAME as RESTORED
from outbox_broker.log.restored_folder import UNFINISHED, Restored, epoch_of_restore
from outbox_broker.log.storage import Storage, write_synced
from outbox_broker.segments.local import boot_id
from outbox_broker.segments.writer_epoch import FILE_NAME as EPOCH
from outbox_broker.segments.writer_epoch import EpochFile
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.journal.segment_note import NOTE_SUFFIX, SegmentNote, encode_note, parse_note

_OF_DISKS: Final = frozenset({"lost+found"})
"""What an empty disk has."""


def restore_backup(
    backup: Path, folder: Path, *, storage: Storage, clock: Clock, shows: Callable[[int, int], None]
) -> tuple[Manifest, Restored]:  # fmt: skip
    """Restore a backup, which is verified before, into a folder that is made, or is empty. `shows`: bytes that are
    done, and all: each is read twice.

    Raises SegmentDamaged if the backup is damaged, ConfigurationError if the folder is in use or not empty, or this
    release does not open what is in the backup, all with nothing done; StorageFailed.
    """
    _refuse_unless_empty(folder)
    refuse_nested(folder)
    try:
        manifest = whole_manifest(backup, shows=lambda done, total: shows(done, 2 * total))
        with restoring(folder, storage=storage):  # looks once more, now that nobody else can write
            return manifest, _restore(backup, folder, manifest, storage=storage, clock=clock, shows=shows)
    except OSError as error:
        raise StorageFailed(f"the backup was not restored: {error.filename or folder}: {error.strerror}") from error


def whole_manifest(backup: Path, *, shows: Callable[[int, int], None]) -> Manifest:
    """Returns the manifest of a backup, each byte of which is as it was written. Raises SegmentDamaged if one is not;
    ConfigurationError if this release does not open what is in it; StorageFailed.
    """
    manifest, damage = check_backup(backup, shows=shows)
    if manifest is None or damage:
        raise SegmentDamaged(f"the backup {backup} is damaged, and was not restored: {damage[0]}; restore another one")
    if manifest.folder_format is not None:
        refuse_format(manifest.folder_format, of=f"the data folder in the backup {backup}")
    return manifest


def refuse_changed(file: BackedUpFile, digests: Sequence[str]) -> None:
    """Raise SegmentDamaged if what was read of a file is not what was verified."""
    if digests != file.chunks:
        raise SegmentDamaged(f"{file.path}: the backup was changed while it was restored")


def _restore(
    backup: Path, folder: Path, manifest: Manifest, *, storage: Storage, clock: Clock,
    shows: Callable[[int, int], None],
) -> Restored:  # fmt: skip
    parts = {(folder / file.path).parent for file in manifest.files}
    for part in parts:
        part.mkdir(mode=0o700, exist_ok=True)
    done, epochs = manifest.size_bytes, [0]
    for file in manifest.files:
        path = folder / file.path
        _copy(backup, file, path, storage)
        if path.name == EPOCH:
            epochs.append(EpochFile(path.parent).read())
        if path.suffix == NOTE_SUFFIX:
            _make_note_ours(path, storage, of_boot=manifest.boot)
        done += file.size_bytes
        shows(done, 2 * manifest.size_bytes)
    now_ms = clock.now_ms()
    restored = Restored(
        at_ms=now_ms, backup_at_ms=manifest.at_ms, epoch=epoch_of_restore(now_ms, before=max(epochs))
    )  # fmt: skip
    finish_restore(folder, parts if parts == {folder} else parts - {folder}, restored, storage=storage)
    return restored


def _nothing_replaced() -> bool:
    """What is in a folder is nobody's to replace."""
    return False


@contextmanager
def restoring(
    folder: Path, *, storage: Storage, may_replace: Callable[[], bool] = _nothing_replaced
) -> Iterator[None]:  # fmt: skip
    """A folder that is made, or is empty, as a context: it is locked, and says that what is in it is a part, until
    finish_restore(). `may_replace`: whether what is in it may be replaced. Raises ConfigurationError if it is in use,
    or not empty, with nothing done; OSError.
    """
    if not may_replace():
        _refuse_unless_empty(folder)
    refuse_nested(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FolderLock(folder)
    lock.acquire()
    try:
        if not may_replace():
            _refuse_unless_empty(folder, besides=frozenset({"lock"}))
        os.close(storage.create(folder / UNFINISHED))
        storage.sync_folder(folder)
        yield
    finally:
        lock.release()


def finish_restore(folder: Path, parts: Iterable[Path], restored: Restored, *, storage: Storage) -> None:
    """Make what was restored to a folder another generation of its broker, which may be opened. Raises OSError."""
    for part in parts:
        EpochFile(part).write(restored.epoch, storage)
        storage.sync_folder(part)
    write_synced(folder / RESTORED, msgspec.json.encode(restored), storage)
    storage.sync_folder(folder)
    storage.sync_folder(folder.parent)
    storage.remove(folder / UNFINISHED)  # last: from here on it may be opened
    storage.sync_folder(folder)


def _copy(backup: Path, file: BackedUpFile, path: Path, storage: Storage) -> None:
    """Copy a file, durably. Raises OSError; SegmentDamaged if it is not what was verified."""
    source, copy = os.open(content_path(backup, file), os.O_RDONLY | os.O_CLOEXEC), storage.create(path)
    try:
        digests: list[str] = []
        for position, chunk in zip(count(0, CHUNK_BYTES), chunks_of(source, file.size_bytes), strict=False):
            storage.write(copy, chunk, position=position)
            digests.append(digest_of(chunk))
        refuse_changed(file, digests)
        storage.sync(copy)
    finally:
        os.close(source)
        os.close(copy)


def _make_note_ours(path: Path, storage: Storage, *, of_boot: str) -> None:
    """Have a note say what holds of a copy. If it was of the start of the machine on which the backup was taken, no
    page was missing then, so none is missing here, where all was synced. Else some may have been, and the start that
    it names is no other machine's either: so it stays.
    """
    note = parse_note(path.read_bytes())
    if note is not None and note.boot and note.boot == of_boot:
        write_synced(path, encode_note(SegmentNote(note.end, boot_id())), storage)


def _refuse_unless_empty(folder: Path, *, besides: frozenset[str] = frozenset()) -> None:
    """Raise ConfigurationError unless a folder is empty, or is not there."""
    try:
        found = {path.name for path in folder.iterdir()} - besides - _OF_DISKS
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read: {error.strerror}") from error
    if UNFINISHED in found:
        raise ConfigurationError(f"{folder} holds a part of a backup, whose restore did not end: empty it, and repeat")
    if found:
        raise ConfigurationError(f"{folder} is not empty ({min(found)}): restore into a new folder")
