"""The format of a backup: a manifest, and contents by their checksums.

    TARGET/manifest.jsonl      the manifest, one line of JSON, and a line with its SHA-256
    TARGET/contents/<sha256>   the bytes of a file of the data folder

A content is named by the SHA-256 of its chunks' SHA-256s: so what is there is never written over, a second backup
copies only what is new, and one that is killed leaves the backup before it as it was. SHA-256, not the CRC-32C of the
logs: 32 bits tell damage, and not whether two files of a year of backups are the same. Each chunk has its own, so that
damage is told by its range. A file is named by its path in a data folder; a store on another medium has the same paths.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from outbox_broker.log.folder_format import FolderFormat
from outbox_broker.log.storage import Storage, write_synced
from outbox_core.common.errors import DECODE_ERRORS, ConfigurationError, StorageFailed
from outbox_core.journal.journal import SegmentDamaged

MANIFEST: Final = "manifest.jsonl"
CONTENTS: Final = "contents"
CHUNK_BYTES: Final = 4 * 1024 * 1024
MANIFEST_FORMAT: Final = 1
_PATH: Final = re.compile(r"(?:[a-z]+/)?[a-z0-9][a-z0-9.-]*")
_CONTENT: Final = re.compile(r"[0-9a-f]{64}")


class SegmentIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the head of a segment says: no other segment of the same owner has all of it."""

    kind: int
    epoch: int
    first: int
    created_at_ms: int


class BackedUpFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the data folder. `chunks`: the SHA-256 of each CHUNK_BYTES of it. `segment`: None for other files, and
    for a segment whose head is damaged.
    """

    path: str
    size_bytes: int
    content: str
    chunks: list[str]
    segment: SegmentIdentity | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One backup. `at_ms`: the moment of which it is; `boot`: the machine's start then; `release`: the one that took
    it; `folder_format`: that of the data folder, None if it does not say one.
    """

    format: int
    release: str
    folder_format: FolderFormat | None
    at_ms: int
    boot: str
    size_bytes: int
    files: list[BackedUpFile]


_decode = msgspec.json.Decoder(Manifest).decode


class ManifestDamaged(SegmentDamaged):
    """A manifest that is not as it was written."""

    def __init__(self, what: str, *, size_bytes: int) -> None:
        super().__init__(f"{MANIFEST}: {what}; use another backup")
        self.what = what
        self.size_bytes = size_bytes


def content_of(chunks: Sequence[str]) -> str:
    """Returns the name of a content."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, chunks))).hexdigest()


def digest_of(chunk: bytes) -> str:
    """Returns the checksum of a chunk."""
    return hashlib.sha256(chunk).hexdigest()


def content_path(backup: Path, file: BackedUpFile) -> Path:
    """Returns where the bytes of a file are."""
    return backup / CONTENTS / file.content


def chunks_of(descriptor: int, size_bytes: int) -> Iterator[bytes]:
    """Yields an open file's bytes up to a size, chunk by chunk; less if it is shorter. Raises OSError."""
    for position in range(0, size_bytes, CHUNK_BYTES):
        chunk = os.pread(descriptor, min(CHUNK_BYTES, size_bytes - position), position)
        if chunk:
            yield chunk


def write_manifest(backup: Path, manifest: Manifest, storage: Storage) -> None:
    """Replace a backup's manifest, durably: from then on it is the backup. Raises OSError."""
    line = msgspec.json.encode(manifest)
    write_synced(backup / MANIFEST, line + b"\n" + _signature(line), storage)
    storage.sync_folder(backup)


def read_manifest(backup: Path) -> Manifest:
    """Returns the manifest of a backup. Raises ConfigurationError if it has none, or one of a later format;
    ManifestDamaged; StorageFailed.
    """
    try:
        data = (backup / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(f"{backup} is no backup: it has no {MANIFEST}") from error
    except OSError as error:
        raise StorageFailed(f"cannot read {backup / MANIFEST}: {error.strerror}") from error
    line, _, signature = data.partition(b"\n")
    if signature != _signature(line):
        raise ManifestDamaged("changed", size_bytes=len(data))
    try:
        manifest = _decode(line)
    except DECODE_ERRORS as error:
        # Whole, and of another shape: what a later release writes.
        raise ConfigurationError(
            f"{backup} is a backup of a later format than {MANIFEST_FORMAT}, which this release reads"
        ) from error
    if manifest.format > MANIFEST_FORMAT:
        raise ConfigurationError(
            f"{backup} is a backup of format {manifest.format}, of release {manifest.release}, and this release reads "
            f"formats up to {MANIFEST_FORMAT}: use that release, or a later one"
        )
    for file in manifest.files:
        if not _PATH.fullmatch(file.path) or not _CONTENT.fullmatch(file.content):
            raise ManifestDamaged(f"names a file {file.path!r}, which no data folder has", size_bytes=len(data))
    return manifest


def _signature(line: bytes) -> bytes:
    return msgspec.json.encode({"sha256": hashlib.sha256(line).hexdigest()}) + b"\n"
