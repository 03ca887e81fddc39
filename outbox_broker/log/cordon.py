"""A cordon: the owner of a data folder takes no new messages, for as long as the folder has the file `cordoned`.

The file is there or not, whatever it holds: one that a power failure cut still keeps the cordon. What it holds is for
people: since when, and why.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

import msgspec

from outbox_broker.log.storage import Storage
from outbox_core.common.clock import Clock
from outbox_core.common.errors import DECODE_ERRORS, BrokerCordoned, StorageFailed
from outbox_core.protocol.wire import CordonNote
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

FILE_NAME: Final = "cordoned"
RETRY_AFTER_MS: Final = 10_000
"""A cordon is for maintenance: publishers need not ask every second."""
_FILE_BYTES_MAX: Final = 64 * 1024
_decode = msgspec.json.Decoder(CordonNote).decode


class Cordon:
    """The cordon of one data folder. Thread-safe."""

    def __init__(self, folder: Path, *, storage: Storage, clock: Clock) -> None:
        self._path = folder / FILE_NAME
        self._storage = storage
        self._clock = clock
        self._changing = threading.Lock()
        self.lock = threading.RLock()
        """Held while a batch is stored, from the check on: once a cordon is set, no batch is on its way."""
        self._note: CordonNote | None = None

    @property
    def note(self) -> CordonNote | None:
        """Since when there is a cordon, and why; None: there is none."""
        return self._note

    def load(self) -> None:
        """Read from the folder whether there is a cordon: its owner calls this before it takes anything."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_FILE_BYTES_MAX)
        except FileNotFoundError:
            return
        try:
            self._note = _decode(data)
        except DECODE_ERRORS:
            self._note = CordonNote(since_ms=0, reason="its file cannot be read")

    def refuse(self) -> None:
        """Raise BrokerCordoned if there is a cordon. Under `lock`."""
        if self._note is not None:
            why = f" ({self._note.reason})" if self._note.reason else ""
            raise BrokerCordoned(
                f"the broker is cordoned{why}: it takes no new messages until it is uncordoned; nothing was stored",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def begin(self, *, reason: str = "") -> None:
        """Take no new messages from now on, also after a restart; a second one changes the reason alone, if it has one.

        Raises StorageFailed: then what was before holds until the folder is opened again.
        """
        with self._changing:
            before = self._note
            if before is None:
                note = CordonNote(since_ms=self._clock.now_ms(), reason=reason)
            else:
                note = CordonNote(since_ms=before.since_ms, reason=reason or before.reason)
            try:
                self._write(msgspec.json.encode(note))
            except OSError as error:
                raise StorageFailed(f"the cordon cannot be written: {error.strerror}") from error
            with self.lock:
                self._note = note
        logger.warning("broker_cordoned", extra={"reason": note.reason})

    def end(self) -> None:
        """Take messages again; idempotent. Raises StorageFailed: then there is a cordon still."""
        with self._changing:
            try:
                self._storage.remove(self._path)
                self._storage.sync_folder(self._path.parent)
            except OSError as error:
                raise StorageFailed(f"the cordon cannot be removed: {error.strerror}") from error
            with self.lock:
                was_cordoned, self._note = self._note is not None, None
        if was_cordoned:
            logger.warning("broker_uncordoned")

    def _write(self, data: bytes) -> None:
        descriptor = self._storage.create(self._path)
        try:
            self._storage.truncate(descriptor, 0)
            self._storage.write(descriptor, data, position=0)
            self._storage.sync(descriptor)
        finally:
            os.close(descriptor)
        self._storage.sync_folder(self._path.parent)
