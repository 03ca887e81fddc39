"""The broker's engine: messages in, deliveries out, everything durable in one data folder. It knows nothing of HTTP.

A publish: checked -> appended to the message log -> synced (callers share a sync) -> answered. A pull: chosen by the
group -> written to the action log -> read from the message log -> handed out. A settlement: decided by the group ->
appended to the action log -> synced -> answered. A message for later: into the schedule (outbox_broker.schedule), which
has segments of its own, and from there, once it is due, into the message log. Whatever is in memory is rebuilt from the
logs on opening.

A hand-out is written but not synced: kill -9 does not touch it, but a power cut may make it forgotten. Its messages are
then handed out again, under another delivery number: the count of openings is in it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.deletion import Deletion
from outbox_broker.engine.group_admin import GroupAdmin
from outbox_broker.engine.publisher import BUCKETS_MS
from outbox_broker.engine.retention import Retention
from outbox_broker.engine.settler import Settler
from outbox_broker.engine.topic_reader import TopicReader
from outbox_broker.log.folder_lock import refuse_nested
from outbox_broker.log.storage import DiskStorage, Storage, Unsynced
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.recovery.recovering import recover
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_broker.schedule.local_segments import LocalSegmentStore
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal

__all__ = ["BUCKETS_MS", "Engine"]


class Engine(Deletion, Settler, TopicReader, GroupAdmin, Retention):
    """One broker on one data folder. All methods may be called from any thread.

    Errors: InvalidMessage (a name or value out of bounds), NotSupported, StorageFailed (nothing was acknowledged).
    """

    def __init__(self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage) -> None:
        """For open(), which is how an engine is made."""
        self.syncs = TimedStorage(storage, clock_s=time.perf_counter)
        super().__init__(folder, clock=clock, options=options, storage=self.syncs)
        self._segments: LocalSegmentStore | None = None

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

        Raises ConfigurationError when another process has the folder, or it is inside another data folder;
        StorageFailed, or SegmentDamaged.
        """
        refuse_nested(folder)
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
        for thread in engine._threads:
            thread.start()
        return engine

    def close(self, *, timeout_ms: int = 10_000) -> None:
        """Stop the threads, sync, let go of the folder; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            wakes = [wake for group in self._waiters.values() for wake in group]
        for wake in wakes:
            wake()
        self._wake_keeper()
        for thread in self._threads:
            thread.join(timeout_ms / 1000)
        self._taking.shutdown()
        self._ending.shutdown()
        self._beside.shutdown()
        with self._lock:
            try:
                self._schedule.close()
                self._messages.sync_and_close()
                self._actions.sync_and_close()
            finally:
                self._let_go()

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Totals since the start, by (what, topic, group or status)."""
        with self._lock:
            return dict(self._state.counters)

    def log_figures(self) -> Mapping[str, int]:
        """Bytes and syncs of the logs since the start, and what is scheduled."""
        schedule = self._schedule.figures()
        with self._lock:
            return {
                "messages_bytes": self._messages.end,
                "actions_bytes": self._actions.end,
                "syncs": self._messages.syncs + self._actions.syncs,
                "scheduled": schedule["scheduled"],
                "publishes_refused": 0 if self._reserve.has_room_beside() else 1,
                "schedule_buckets": schedule["buckets"],
                "quarantined_runs": schedule["quarantined_runs"],
                "quarantined_scheduled": schedule["quarantined_messages"],
                "quarantined_bytes": self._messages.quarantined_bytes + self._actions.quarantined_bytes,
            }

    def check_ready(self) -> None:
        """Raise StorageFailed where the engine can take nothing: closed, or a disk that failed; or cannot hand out what
        it has, for want of an index.
        """
        with self._lock:
            self._refuse_if_closed()
            self._messages.refuse_if_failed()
            self._actions.refuse_if_failed()
            self._refuse_if_unmended()
        self._schedule.check_ready()

    def _let_go(self) -> None:
        self._messages.close()
        self._actions.close()
        if self._segments is not None:
            self._segments.close()
        self._folder_lock.release()

    def _recover(self) -> None:
        self._reserve.release()
        self._open_schedule()
        out = [one for batch in self._batches for one in zip(batch.topics, batch.ids, strict=True)]
        restored = recover(self._state, self._messages, self._actions, options=self._options, out=out)
        self._firing_from = self._state.fired_from  # no checkpoint may pass it before the schedule has settled
        for topic in self._schedule.topics():
            if topic not in self._state.deleted:
                self._state.topic(topic)
        if not restored.is_newest:
            self._write_checkpoint_if_possible()
        self._act(journal.Opened(at_ms=self._clock.now_ms(), number=self._state.openings + 1))
        self._finish_deletions()
        self._reserve.take()
        self._actions.commit()

    def _open_schedule(self) -> None:
        durable = self._options.durability is Durability.FSYNC
        storage = self._storage if durable else Unsynced(self._storage)
        self._segments = LocalSegmentStore.open(self._folder / "schedule", storage=storage)
        options = DelayOptions(
            batch_messages_max=self._options.fire_batch_max,
            memory_messages_max=self._options.schedule_memory_messages_max,
            memory_bytes_max=self._options.schedule_memory_bytes_max,
            cancels_remembered_max=self._options.cancel_tombstones_max,
        )
        self._schedule = DelayStore.open(self._segments, options=options, reserve=self._reserve)
        self._batches.extend(self._schedule.unsettled())
