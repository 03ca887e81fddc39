"""Checks a backup: each byte of it is as it was written, and none is missing or too much. Reads only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outbox_broker.backup.manifest import (
    CHUNK_BYTES,
    CONTENTS,
    MANIFEST,
    BackedUpFile,
    Manifest,
    ManifestDamaged,
    chunks_of,
    content_path,
    digest_of,
    read_manifest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupDamage:
    """Bytes of a file of the backup, from `first` to `end` (exclusive), that are not as they were written. `path`: the
    file of the data folder that they are of; empty for the manifest.
    """

    file: str
    path: str
    first: int
    end: int
    what: str

    def __str__(self) -> str:
        of = f" ({self.path})" if self.path else ""
        return f"{self.file}{of}: {self.what} from {self.first} to {self.end}"


def check_backup(backup: Path, *, shows: Callable[[int, int], None]) -> tuple[Manifest | None, list[BackupDamage]]:
    """Returns the manifest, None if that itself is damaged, and what is damaged.

    Raises ConfigurationError if it is no backup, or one of a later format; StorageFailed.
    """
    try:
        manifest = read_manifest(backup)
    except ManifestDamaged as error:
        return None, [BackupDamage(file=MANIFEST, path="", first=0, end=error.size_bytes, what=error.what)]
    done, damage = 0, list[BackupDamage]()
    for file in manifest.files:
        damage += _damage_in(backup, file)
        done += file.size_bytes
        shows(done, manifest.size_bytes)
    return manifest, damage


def _damage_in(backup: Path, file: BackedUpFile) -> Iterator[BackupDamage]:
    """Yields what is damaged of a file, in order."""

    def damage(first: int, end: int, what: str) -> BackupDamage:
        return BackupDamage(file=f"{CONTENTS}/{file.content}", path=file.path, first=first, end=end, what=what)

    position = 0
    try:
        with content_path(backup, file).open("rb") as content:
            size_bytes = os.fstat(content.fileno()).st_size
            for chunk, expected in zip(chunks_of(content.fileno(), file.size_bytes), file.chunks, strict=False):
                # Of a file that was cut the last chunk is not compared: that it was cut says it all.
                end = min(position + CHUNK_BYTES, file.size_bytes)
                if position + len(chunk) == end and digest_of(chunk) != expected:
                    yield damage(position, end, "changed")
                position = end
    except FileNotFoundError:
        yield damage(0, file.size_bytes, "missing")
    except OSError as error:  # a sector that the disk cannot read
        yield damage(position, file.size_bytes, f"unreadable ({error.strerror})")
    else:
        if size_bytes < file.size_bytes:
            yield damage(size_bytes, file.size_bytes, "cut")
        elif size_bytes > file.size_bytes:
            yield damage(file.size_bytes, size_bytes, "added")
