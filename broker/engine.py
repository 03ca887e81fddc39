"""The broker's engine: messages in, deliveries out, everything durable in one data folder. It knows nothing of HTTP.

A publish: checked -> appended to the message log -> synced (callers share a sync) -> answered. A pull: chosen by the
group -> written to the action log -> read from the message log -> handed out. A settlement: decided by the group ->
appended to the action log -> synced -> answered. Whatever is in memory is rebuilt from the two logs on opening.

A hand-out is written but not synced: kill -9 does not touch it, but a power cut may make it forgotten. Its messages are
then handed out again, under another delivery number: the count of openings is in it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from broker.consuming import Consuming
from broker.log.storage import DiskStorage, Storage
from broker.operating import Operating
from broker.options import EngineOptions
from broker.publishing import BUCKETS_MS, Publishing
from broker.recovering import recover
from broker.retention import Retaining
from messaging import journal
from messaging.clock import Clock, SystemClock
from messaging.errors import StorageFailed

__all__ = ["BUCKETS_MS", "Engine"]


class Engine(Publishing, Consuming, Operating, Retaining):
    """One broker on one data folder. All methods may be called from any thread.

    Errors: InvalidMessage (a name or value out of bounds), NotSupported, StorageFailed (nothing was acknowledged).
    """

    def __init__(self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage) -> None:
        """For open(), which is how an engine is made."""
        super().__init__(folder, clock=clock, options=options, storage=storage)
        self._timer = threading.Thread(target=self._run_timer, name="broker-timer", daemon=True)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        clock: Clock | None = None,
        options: EngineOptions | None = None,
        storage: Storage | None = None,
    ) -> Self:
        """Open a data folder, made where it is missing: take its lock, replay its logs, start the timer.

        Raises ConfigurationError when another process has the folder, StorageFailed, or SegmentDamaged.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            engine = cls(
                folder, clock=clock or SystemClock(), options=options or EngineOptions(),
                storage=storage or DiskStorage(),
            )  # fmt: skip
            engine._folder_lock.acquire()
        except OSError as error:
            raise StorageFailed(f"cannot make the data folder {folder}: {error.strerror}") from error
        try:
            engine._recover()
        except BaseException as error:
            engine._let_go()
            if isinstance(error, OSError):
                raise StorageFailed(f"cannot open the data folder {folder}: {error.strerror}") from error
            raise
        engine._timer.start()
        return engine

    def close(self, *, timeout_ms: int = 10_000) -> None:
        """Stop the timer, sync, let go of the folder; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            wakes = [wake for group in self._waiters.values() for wake in group]
        for wake in wakes:
            wake()
        self._timer.join(timeout_ms / 1000)
        with self._lock:
            try:
                self._messages.sync_and_close()
                self._actions.sync_and_close()
            finally:
                self._let_go()

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Totals since the start, by (what, topic, group or status)."""
        with self._lock:
            return dict(self._state.counters)

    def log_figures(self) -> Mapping[str, int]:
        """Bytes and syncs of both logs since the start, and what is scheduled."""
        with self._lock:
            return {
                "messages_bytes": self._messages.end,
                "actions_bytes": self._actions.end,
                "syncs": self._messages.syncs + self._actions.syncs,
                "scheduled": self._state.schedule.count(),
                "quarantined_bytes": self._messages.quarantined_bytes + self._actions.quarantined_bytes,
            }

    def check_ready(self) -> None:
        """Raise StorageFailed where the engine can take nothing: closed, or a disk that failed."""
        with self._lock:
            self._refuse_if_closed()
            self._messages.refuse_if_failed()
            self._actions.refuse_if_failed()

    def _let_go(self) -> None:
        self._messages.close()
        self._actions.close()
        self._folder_lock.release()

    def _recover(self) -> None:
        recover(self._state, self._messages, self._actions, options=self._options)
        self._act(journal.Opened(at_ms=self._clock.now_ms(), number=self._state.openings + 1))
        self._reserve.take()
        self._actions.commit()
