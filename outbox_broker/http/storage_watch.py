"""Ends a server whose storage has failed for good, so that what supervises the process starts it again.

A failed sync is final for the process that saw it: it can make nothing durable any more, and a second sync would prove
nothing. The next process recovers what is on the disk, as after a crash. PostgreSQL and etcd end in the same way. A
failing /livez would not do: systemd has no probe. Not for an embedded broker, whose process is its user's, nor for a
node of a cluster, which opens the shard again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Self

from outbox_core.common.errors import StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_EVERY_MS: Final = 1_000
_JOIN_SECONDS: Final = 10


class StorageWatch:
    """Within its block, a thread checks the storage, and stops the server once it has failed."""

    def __init__(self, check: Callable[[], None], *, stop: Callable[[], None], every_ms: int = _EVERY_MS) -> None:
        """`check`: raises StorageFailed if the storage takes nothing until it is reopened. `stop`: of the server."""
        self._check = check
        self._stop = stop
        self._every_ms = every_ms
        self._ended = threading.Event()
        self._failure: StorageFailed | None = None
        self._thread = threading.Thread(target=self._run, name="storage-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)

    def raise_failure(self) -> None:
        """Raise the error for which the server was stopped, if any."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        is_logged = False
        while not self._ended.wait(self._every_ms / 1000):
            try:
                self._check()
                is_logged = False
            except StorageFailed as error:
                self._failure = error
                logger.critical("server_stops_for_its_storage", extra={"error": str(error)})
                self._stop()
                return
            except Exception:  # too many open files; or a disk that will fail the next sync, which ends the server
                if not is_logged:
                    logger.exception("storage_check_failed")
                is_logged = True
