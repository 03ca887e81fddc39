"""The broker's engine: publishes, deliveries and settlements, all durable in one data folder. Independent of HTTP.

A publish is validated -> appended to the message log -> synced (callers share a sync) -> acknowledged. A pull is chosen
by the group -> recorded in the action log -> read from the message log -> delivered. A settlement is decided by the
group -> appended to the action log -> synced -> acknowledged. A scheduled message goes into the schedule
(outbox_broker.schedule), which has segments of its own, and once it is due, into the message log. The in-memory state
is rebuilt from the logs at startup.
A delivery is written but not synced: it survives kill -9, but a power failure may erase it. Its messages are then
delivered again, under another delivery number, which contains the broker's epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_operations import DeadLetterOperations
from outbox_broker.engine.dead_letter_reader import DeadLetterReader
from outbox_broker.engine.dead_letter_writer import DeadLetterWriter
from outbox_broker.engine.deletion import Deletion
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.group_admin import GroupAdmin
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.index_repair import IndexRepair
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.operations import Operations
from outbox_broker.engine.publisher import BUCKETS_MS, Publisher
from outbox_broker.engine.puller import Puller
from outbox_broker.engine.purger import Purger
from outbox_broker.engine.retention import LogRetention
from outbox_broker.engine.settler import Settler
from outbox_broker.engine.stall_watch import StallWatch
from outbox_broker.engine.timer import EngineTimer
from outbox_broker.engine.topic_reader import TopicReader
from outbox_broker.engine.wakeups import RecentGroupDeletions, Wakeups
from outbox_broker.journal.journal import Journal
from outbox_broker.log.cordon import Cordon
from outbox_broker.log.folder_format import note_format, refuse_other_format
from outbox_broker.log.folder_lock import FolderLock, refuse_nested
from outbox_broker.log.storage import DiskStorage, Storage, UnsyncedStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.recovery.startup_recovery import recover
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import SegmentKind

__all__ = ["BUCKETS_MS", "Engine"]


class Engine:
    """One broker on one data folder. Thread-safe.

    Its operations are methods of its parts: `publisher` (publish, cancel, what is scheduled), `puller` (take, pull),
    `settler` (ack, nack, extend), `reader` (broadcast reads), `admin` (groups; lists and redrives of dead letters),
    `dead_letters` (discard), `deletion`, `purger`, `stalls` (why a group gets nothing), `operations` (cordon, what is
    left), `wakeups` (subscribe) and `retention`. Errors of all: InvalidMessage (a name or value out of bounds),
    NotSupported, StorageFailed (nothing was acknowledged).
    """

    def __init__(self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage) -> None:
        """Called by open(), which creates engines."""
        self.syncs = TimedStorage(storage, clock_s=time.perf_counter)
        self._folder_lock = FolderLock(folder)
        self._opened: list[LocalSegments] = []
        self.context = context = EngineContext(folder, clock=clock, options=options, storage=self.syncs)
        self.wakeups = wakeups = Wakeups(context)
        self.writer = writer = LogWriter(context)
        groups = GroupRegistry(context, writer)
        dead_letters = DeadLetterWriter(context, writer, wakeups)
        self._deleted = deleted = RecentGroupDeletions()
        self._index_repair = index_repair = IndexRepair(context)
        self.dispatcher = dispatcher = Dispatcher(context, writer, wakeups)
        self.lateness = dispatcher.lateness
        self.retention = LogRetention(context, writer, wakeups, groups, dispatcher)
        self.stalls = StallWatch(context, wakeups, groups)
        self.timer = EngineTimer(context, wakeups, dispatcher, keep_house=self._keep_house)
        self._cordon = cordon = Cordon(folder, storage=self.syncs, clock=clock)
        self.publisher = Publisher(context, writer, wakeups, groups, dispatcher, self.timer, cordon=cordon)
        self.puller = Puller(context, writer, wakeups, groups, dead_letters, deleted, index_repair, dispatcher)
        self.settler = Settler(context, writer, wakeups, dead_letters, self.puller)
        self.reader = TopicReader(context, groups, index_repair, dispatcher, self.puller)
        dead_letter_reader = DeadLetterReader(context, dead_letters, index_repair)
        self.admin = GroupAdmin(context, writer, wakeups, groups, dead_letter_reader, index_repair)
        self.dead_letters = DeadLetterOperations(context, writer, groups, dead_letter_reader)
        self.deletion = Deletion(context, writer, wakeups, groups, deleted, dispatcher)
        self.purger = Purger(context, writer, wakeups, groups, self.publisher, self.dead_letters)
        self.operations = Operations(context, groups, dispatcher, cordon=cordon)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        clock: Clock | None = None,
        options: EngineOptions | None = None,
        storage: Storage | None = None,
    ) -> Self:
        """Open a data folder, creating it if needed: take its lock, replay its logs, start the timer.

        Raises ConfigurationError when another process uses the folder, or it is inside another data folder, or of a
        format that this release does not open, before anything is changed;
        StorageFailed, or SegmentDamaged; RuntimeError if the process can have no more threads.
        """
        refuse_nested(folder)
        refuse_other_format(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            engine = cls(
                folder, clock=clock or SystemClock(), options=options or EngineOptions(),
                storage=storage or DiskStorage(),
            )  # fmt: skip
            engine._folder_lock.acquire()
        except OSError as error:
            reason = "a file has this name" if isinstance(error, FileExistsError) else error.strerror
            raise StorageFailed(f"cannot make the data folder {folder}: {reason}") from error
        try:
            note_format(folder)  # it is asked again, now that nobody else can write
            engine._recover()
        except BaseException as error:
            engine._let_go()
            if isinstance(error, OSError):
                raise StorageFailed(f"cannot open the data folder {folder}: {error.strerror}") from error
            raise
        try:
            engine.timer.start()
        except BaseException:  # no more threads: a later open must find the folder free
            engine.close()
            raise
        return engine

    def close(self, *, timeout_ms: int = 10_000) -> None:
        """Stop the threads, sync, release the folder; idempotent."""
        context = self.context
        with context.lock:
            if context.closed:
                return
            context.closed = True
        self.wakeups.wake_all()
        self.timer.join(timeout_ms / 1000)
        self.dispatcher.shutdown()
        self.publisher.shutdown()
        with context.lock:
            try:
                context.schedule.close()
                context.messages.sync_and_close()
                with suppress(StorageFailed):  # if the disk failed, nobody was told that all is durable
                    context.actions.seal()
            finally:
                self._let_go()

    @property
    def deletions(self) -> int:
        """The number of deletions so far: a pull that may wait captures it at its start."""
        return self._deleted.deletions

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Returns totals since the start, by (what, topic, group or status)."""
        with self.context.lock:
            return dict(self.context.state.counters)

    def due_within(self, spans_ms: Sequence[int]) -> list[int]:
        """Returns how many scheduled messages are due within each ascending span from now; and last, the total."""
        return self.context.schedule.due_within(spans_ms, now_ms=self.context.clock.now_ms())

    def log_figures(self) -> Mapping[str, int]:
        """Returns the logs' bytes on the disk, their syncs since the start, schedule sizes, and the disk's space."""
        context, schedule = self.context, self.context.schedule.figures()
        disk = context.reserve.disk_space()
        with context.lock:
            return {
                "messages_bytes": context.messages.size_bytes,
                "actions_bytes": context.actions.size_bytes,
                "syncs": sum(count for _, count in self.syncs.counts()),
                "scheduled": schedule["scheduled"],
                "publishes_refused": 0 if context.reserve.has_room_beside() else 1,
                "disk_free_bytes": disk.free_bytes,
                "disk_size_bytes": disk.total_bytes,
                "schedule_buckets": schedule["buckets"],
                "quarantined_runs": schedule["quarantined_runs"],
                "quarantined_scheduled": schedule["quarantined_messages"],
                "quarantined_bytes": context.messages.quarantined_bytes + context.actions.recovered.damaged_bytes,
            }

    def check_ready(self) -> None:
        """Raise StorageFailed if the engine can accept nothing (closed, or a failed disk), or cannot deliver for lack
        of an index, or cannot dispatch what is due.
        """
        context = self.context
        with context.lock:
            context.refuse_if_closed()
            context.messages.refuse_if_failed()
            self._check_segments()
            self._index_repair.refuse_if_unmended()
        context.schedule.check_ready()
        self.dispatcher.check_ready()

    def check_usable(self) -> None:
        """Raise StorageFailed if nothing can be made durable until the folder is reopened, as after a failed sync."""
        self.context.messages.refuse_if_failed()
        self._check_segments()
        self.context.schedule.check_ready()

    def _keep_house(self) -> None:
        self.writer.write_checkpoint_if_due()
        self.retention.check()
        self.stalls.check()

    def _check_segments(self) -> None:
        for segments in self._opened:
            segments.check()

    def _open_segments(self, name: str) -> LocalSegments:
        context = self.context
        is_synced = context.options.durability is Durability.FSYNC
        storage = context.storage if is_synced else UnsyncedStorage(context.storage)
        segments = LocalSegments.open(context.folder / name, storage=storage, clock=context.clock)
        self._opened.append(segments)
        return segments

    def _let_go(self) -> None:
        context = self.context
        context.messages.close()
        for segments in self._opened:
            segments.close()
        self._folder_lock.release()

    def _recover(self) -> None:
        context, state = self.context, self.context.state
        context.reserve.release()
        self._cordon.load()
        unsettled = self._open_schedule()
        context.actions = Journal(
            self._open_segments("actions"), name="actions", kind=SegmentKind.ACTIONS,
            segment_bytes=min(context.options.segment_bytes, context.options.checkpoint_bytes),
        )  # fmt: skip
        out = [topic_and_id for batch in unsettled for topic_and_id in zip(batch.topics, batch.ids, strict=True)]
        recover(state, context.messages, context.actions, options=context.options, out=out)
        context.dispatching_from = state.dispatched_from  # no checkpoint may pass it before the schedule has settled
        for topic in context.schedule.topics():
            if topic not in state.deleted:
                state.topic(topic)
        self.writer.act(journal.Opened(at_ms=context.clock.now_ms(), number=state.epoch + 1))
        self.deletion.finish_deletions()
        context.reserve.take()
        context.actions.commit()

    def _open_schedule(self) -> Sequence[DueBatch]:
        """Open the schedule; returns the batches that it dispatched and does not know to be appended."""
        context, options = self.context, self.context.options
        delay_options = DelayOptions(
            batch_messages_max=options.fire_batch_max,
            memory_messages_max=options.schedule_memory_messages_max,
            memory_bytes_max=options.schedule_memory_bytes_max,
            cancels_remembered_max=options.cancel_tombstones_max,
        )
        context.schedule = DelayStore.open(
            self._open_segments("schedule"), options=delay_options, reserve=context.reserve
        )  # fmt: skip
        unsettled = context.schedule.unsettled()
        self.dispatcher.resume(unsettled)
        return unsettled
