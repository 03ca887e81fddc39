"""Annotations: small values by name that the owner of a broker keeps beside its segments, and the owners after it find.

They are where the segments are: files of a data folder, or on BookKeeper in the znode that names the shard's manifest
(segments/ledger.py). tests/outbox_broker/segments has one suite for both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

from outbox_broker.log.storage import Storage
from outbox_core.common.errors import StorageFailed

VALUE_BYTES_MAX: Final = 64 * 1024


class Annotations(Protocol):
    """The annotations of one owner. Thread-safe; of one name the caller orders the changes."""

    def get(self, name: str) -> bytes | None:
        """Returns a value; None if there is none. It may have been cut by a power failure. Raises StorageFailed."""

    def set(self, name: str, value: bytes | None) -> None:
        """Replace a value, durably; None removes it. Idempotent.

        Raises StorageFailed: then only the next owner knows which of the two it is; WriterFenced, with nothing changed.
        """


class FolderAnnotations:
    """Files of a folder, whose lock its owner has."""

    def __init__(self, folder: Path, *, storage: Storage) -> None:
        self._folder = folder
        self._storage = storage

    def get(self, name: str) -> bytes | None:
        """The file's content; see Annotations."""
        try:
            with (self._folder / name).open("rb") as file:
                return file.read(VALUE_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageFailed(f"{self._folder / name} cannot be read: {error.strerror}") from error

    def set(self, name: str, value: bytes | None) -> None:
        """Write or remove the file; see Annotations. One that is there, whatever it holds, was not removed."""
        path = self._folder / name
        try:
            if value is None:
                self._storage.remove(path)
            else:
                self._write(path, value)
            self._storage.sync_folder(self._folder)
        except OSError as error:
            what = "removed" if value is None else "written"
            raise StorageFailed(f"{path} cannot be {what}: {error.strerror}") from error

    def _write(self, path: Path, value: bytes) -> None:
        descriptor = self._storage.create(path)
        try:
            self._storage.truncate(descriptor, 0)
            self._storage.write(descriptor, value, position=0)
            self._storage.sync(descriptor)
        finally:
            os.close(descriptor)
