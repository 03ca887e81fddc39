"""Takes a backup: copies what a snapshot of a data folder links into a target, as far as that has it not.

The copy is bounded in memory, at a rate, and synced chunk by chunk: else the broker's own syncs would wait behind
hundreds of megabytes. The manifest comes last: a backup that is killed anywhere leaves the one before it as it was.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_broker.backup.manifest import (
    CONTENTS,
    MANIFEST,
    MANIFEST_FORMAT,
    BackedUpFile,
    Manifest,
    ManifestDamaged,
    SegmentIdentity,
    chunks_of,
    content_of,
    content_path,
    digest_of,
    read_manifest,
    write_manifest,
)
from outbox_broker.backup.snapshot import FolderSnapshots, SnapshotContents, SnapshotFile, SnapshotHold
from outbox_broker.log.folder_format import format_of, refuse_other_format
from outbox_broker.log.folder_lock import FolderLock, is_data_folder
from outbox_broker.log.storage import Storage
from outbox_broker.segments.local import LOGS, SUFFIX
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.block import SEGMENT_HEAD_BYTES, SegmentRefused, decode_segment_head
from outbox_core.runtime.build_info import build

_LOG_SEGMENT: Final = re.compile(rf"(.+)-\d{{12}}{re.escape(SUFFIX)}")
_LATER_SEGMENTS: Final = 2
_COPYING: Final = "copying.new"
_TARGET_NAMES: Final = frozenset({CONTENTS, MANIFEST, f"{MANIFEST}.new", "lock", "lost+found"})
Shows = Callable[[int, int], None]
"""Is told how many bytes are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupTaken:
    """A backup: of which moment, its files and bytes, and how many bytes were copied, as the target had them not.
    `was_running`: whether a broker ran on the folder.
    """

    at_ms: int
    files: int
    size_bytes: int
    copied_bytes: int
    was_running: bool


class BackupTarget:
    """A folder that holds one backup, and is given the next one."""

    def __init__(self, folder: Path, *, storage: Storage, clock: Clock, bytes_per_second: int | None) -> None:
        """`bytes_per_second`: None is as fast as it goes."""
        self._folder = folder
        self._storage = storage
        self._clock = clock
        self._bytes_per_second = bytes_per_second
        self._pause = threading.Condition()

    def take(self, data: Path, *, ask: Callable[[str], object], shows: Shows) -> BackupTaken:
        """Take a backup of a data folder, of this moment. `ask`, with a token: ask the broker that runs on it for a
        snapshot.

        Raises ConfigurationError if there is no data folder, a backup of it is being taken, or the target holds other
        things; StorageFailed, with the backup before it as it was.
        """
        if not is_data_folder(data):
            raise ConfigurationError(f"{data} is no data folder of a broker or a delay service")
        refuse_other_format(data)
        try:
            self._refuse_other_target(data)
            with ExitStack() as held:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = FolderLock(self._folder)
                lock.acquire()
                held.callback(lock.release)
                hold = held.enter_context(SnapshotHold(data))
                snapshot, was_running = _snapshot_of(data, hold, clock=self._clock, ask=ask)
                return self._copy_all(data, hold, snapshot, was_running=was_running, shows=shows)
        except OSError as error:
            raise StorageFailed(f"no backup was taken: {error.filename or self._folder}: {error.strerror}") from error

    def _refuse_other_target(self, data: Path) -> None:
        """Raise ConfigurationError if the target is no place for a backup of this folder."""
        target, source = self._folder.resolve(), data.resolve()
        if target.is_relative_to(source) or source.is_relative_to(target):
            raise ConfigurationError(f"{target} and the data folder {source} are inside one another: use one beside it")
        if target.exists() and not target.is_dir():
            raise ConfigurationError(f"{target} is no folder")
        others = {path.name for path in target.iterdir()} - _TARGET_NAMES if target.exists() else set()
        if others:
            raise ConfigurationError(f"{target} holds other things, as {min(others)}: name an empty one, or a backup")

    def _copy_all(
        self, data: Path, hold: SnapshotHold, snapshot: SnapshotContents, *, was_running: bool, shows: Shows
    ) -> BackupTaken:  # fmt: skip
        (self._folder / CONTENTS).mkdir(mode=0o700, exist_ok=True)
        self._storage.sync_folder(self._folder)
        sealed = _sealed_in(self._stored_before())
        total, copied, kept = sum(file.size_bytes for file in snapshot.files), 0, 0
        begun_ms = self._clock.monotonic_ms()

        def passed(size_bytes: int) -> None:
            nonlocal copied
            copied += size_bytes
            shows(copied + kept, total)
            self._keep_pace(copied, begun_ms=begun_ms)

        stored: list[BackedUpFile] = []
        for file in snapshot.files:
            known = sealed.get(file.path)
            if known is not None and self._has(known, file, hold.path(file)):
                stored.append(known)
                kept += file.size_bytes
                continue
            stored.append(self._copy(file, hold.path(file), passed))
        self._storage.sync_folder(self._folder / CONTENTS)
        write_manifest(self._folder, _manifest_of(data, snapshot, stored), self._storage)
        self._remove_all_but({file.content for file in stored})
        shows(total, total)
        return BackupTaken(
            at_ms=snapshot.at_ms, files=len(stored), size_bytes=total, copied_bytes=copied, was_running=was_running
        )

    def _copy(self, file: SnapshotFile, path: Path, passed: Callable[[int], None]) -> BackedUpFile:
        """Copy a file up to its size, aside, and rename it to its content's name. Raises OSError, StorageFailed."""
        aside = self._folder / CONTENTS / _COPYING
        self._storage.remove(aside)
        source, copy = os.open(path, os.O_RDONLY | os.O_CLOEXEC), self._storage.create(aside)
        digests, position = list[str](), 0
        try:
            for chunk in chunks_of(source, file.size_bytes):
                self._storage.write(copy, chunk, position=position)
                self._storage.sync(copy)
                os.posix_fadvise(copy, position, len(chunk), os.POSIX_FADV_DONTNEED)  # the broker's pages stay
                digests.append(digest_of(chunk))
                position += len(chunk)
                passed(len(chunk))
        finally:
            os.close(source)
            os.close(copy)
        if position != file.size_bytes:
            # Only what counts for nothing is ever cut, of a write that failed; that takes a full disk.
            raise StorageFailed(f"no backup was taken: {file.path} was cut while it was read; take it once more")
        stored = BackedUpFile(
            path=file.path, size_bytes=file.size_bytes, content=content_of(digests), chunks=digests,
            segment=_identity_of(path),
        )  # fmt: skip
        # Over one of this name, too, which may be damaged.
        aside.replace(content_path(self._folder, stored))
        return stored

    def _stored_before(self) -> Iterable[BackedUpFile]:
        """Returns the files of the backup that the target holds; none where its manifest is damaged."""
        if not (self._folder / MANIFEST).exists():
            return ()
        try:
            return read_manifest(self._folder).files
        except ManifestDamaged:
            return ()

    def _has(self, known: BackedUpFile, file: SnapshotFile, path: Path) -> bool:
        """Returns whether the target has a sealed segment: told by its size and its head, never by its name alone, and
        where its content is gone or was cut, no.
        """
        if known.size_bytes != file.size_bytes or known.segment != _identity_of(path):
            return False
        try:
            return content_path(self._folder, known).stat().st_size == known.size_bytes
        except FileNotFoundError:
            return False

    def _remove_all_but(self, contents: set[str]) -> None:
        """Remove the contents of the backup before, and what a killed one has left."""
        for path in (self._folder / CONTENTS).iterdir():
            if path.name not in contents:
                self._storage.remove(path)

    def _keep_pace(self, copied: int, *, begun_ms: int) -> None:
        if self._bytes_per_second is None:
            return
        due_ms = begun_ms + 1_000 * copied // self._bytes_per_second
        with self._pause:
            while (left_ms := due_ms - self._clock.monotonic_ms()) > 0:
                self._clock.wait(self._pause, left_ms)


def _snapshot_of(
    data: Path, hold: SnapshotHold, *, clock: Clock, ask: Callable[[str], object]
) -> tuple[SnapshotContents, bool]:  # fmt: skip
    """Returns a snapshot of a folder, and whether a broker runs on it, which has made the snapshot then."""
    token, lock = secrets.token_hex(16), FolderLock(data)
    try:
        lock.acquire()
    except ConfigurationError:
        ask(token)
        return hold.found(token), True
    try:
        snapshot = FolderSnapshots(data, clock=clock, locks=tuple).take(token)
        return snapshot or hold.found(token), False
    finally:
        lock.release()


def _manifest_of(data: Path, snapshot: SnapshotContents, stored: list[BackedUpFile]) -> Manifest:
    found = format_of(data)
    return Manifest(
        format=MANIFEST_FORMAT, release=build().version, folder_format=found, at_ms=snapshot.at_ms, boot=snapshot.boot,
        size_bytes=sum(file.size_bytes for file in stored), files=stored,
    )  # fmt: skip


def _sealed_in(files: Iterable[BackedUpFile]) -> Mapping[str, BackedUpFile]:
    """Returns the segments of logs, by path, that were sealed for good in a backup: those with two behind them. The one
    before the newest may have been the newest again, after a power failure, and have grown to another end.
    """
    logs: defaultdict[str, list[BackedUpFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.path):
        matched = _LOG_SEGMENT.fullmatch(file.path)
        if matched and file.segment is not None and file.segment.kind in LOGS:
            logs[matched[1]].append(file)
    return {file.path: file for segments in logs.values() for file in segments[:-_LATER_SEGMENTS]}


def _identity_of(path: Path) -> SegmentIdentity | None:
    """Returns what the head of a segment says; None for other files, and where it is damaged. Raises OSError."""
    if path.suffix != SUFFIX:
        return None
    with path.open("rb") as file:
        try:
            head = decode_segment_head(file.read(SEGMENT_HEAD_BYTES))
        except SegmentRefused:
            return None
    return SegmentIdentity(kind=head.kind, epoch=head.epoch, first=head.first, created_at_ms=head.created_at_ms)
