"""The broker's engine: publishes, deliveries and settlements, all durable in its segments. Independent of HTTP.

A publish is validated -> appended to the message log -> synced (callers share a sync) -> acknowledged. A pull is chosen
by the group -> recorded in the action log -> read from the message log -> delivered. A settlement is decided by the
group -> appended to the action log -> synced -> acknowledged. A scheduled message is appended to the message log as any
other, for the schedule (outbox_broker.schedule), which files it in segments of its own; once it is due, it is appended
again, to its topic. The in-memory state is rebuilt from the logs at startup.
A delivery is written but not synced: it survives kill -9, but a power failure may erase it. Its messages are then
delivered again, under another delivery number, which contains the broker's epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Self, TypeAlias

from outbox_broker.backup.snapshot import FolderSnapshots
from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_operations import DeadLetterOperations
from outbox_broker.engine.dead_letter_reader import DeadLetterReader
from outbox_broker.engine.dead_letter_writer import DeadLetterWriter
from outbox_broker.engine.deletion import Deletion
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.footer_repair import FooterRepair
from outbox_broker.engine.group_admin import GroupAdmin
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.message_arrivals import MessageArrivals
from outbox_broker.engine.operations import Operations
from outbox_broker.engine.publisher import BUCKETS_MS, Publisher
from outbox_broker.engine.puller import Puller
from outbox_broker.engine.purger import Purger
from outbox_broker.engine.recurring_publisher import RecurringPublisher
from outbox_broker.engine.redrive_clock import RedriveClock
from outbox_broker.engine.retention import LogRetention
from outbox_broker.engine.segment_cleaner import SegmentCleaner
from outbox_broker.engine.settler import Settler
from outbox_broker.engine.stall_watch import StallWatch
from outbox_broker.engine.timer import EngineTimer
from outbox_broker.engine.topic_reader import TopicReader
from outbox_broker.engine.wakeups import RecentGroupDeletions, Wakeups
from outbox_broker.group.consumer_group import EPOCH_SHIFT
from outbox_broker.journal.journal import Journal
from outbox_broker.log.annotations import Annotations, FolderAnnotations
from outbox_broker.log.cordon import Cordon
from outbox_broker.log.disk_reserve import Reserve, is_refused
from outbox_broker.log.folder_format import note_format, refuse_other_format
from outbox_broker.log.folder_lock import FolderLock, refuse_nested
from outbox_broker.log.restored_folder import restored
from outbox_broker.log.storage import DiskStorage, Storage, UnsyncedStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.recovery.startup_recovery import recover
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.segments.local import LocalSegments
from outbox_broker.segments.port import Segments, WriterFenced
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import SegmentKind

__all__ = ["BUCKETS_MS", "Engine", "OpenSegments"]

OpenSegments: TypeAlias = Callable[[str], Segments]
"""Opens the segments of one of an engine's parts, by its name: messages, actions, schedule."""


class Engine:
    """One broker on one data folder. Thread-safe.

    Its operations are methods of its parts: `publisher` (publish, cancel, what is scheduled), `puller` (take, pull),
    `settler` (ack, nack, extend), `reader` (broadcast reads), `admin` (groups; lists of dead letters), `dead_letters`
    (redrive, discard), `recurring` (messages that come again and again), `deletion`, `purger`, `stalls` (why a group
    gets nothing), `operations` (cordon, what is left), `snapshots` (for a backup), `wakeups` (subscribe), `retention`,
    and `cleaner` (of old segments). Errors of all: InvalidMessage (a name or value out of bounds), NotSupported,
    StorageFailed (nothing was acknowledged).
    """

    def __init__(
        self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage, segments: OpenSegments | None,
        reserve: Reserve | None, annotations: Annotations | None,
    ) -> None:  # fmt: skip
        """Called by open(), which creates engines."""
        self.syncs = TimedStorage(storage, clock_s=time.perf_counter)
        self._folder_lock = FolderLock(folder)
        self._open_segments = self._open_folder if segments is None else segments
        self._opened: list[Segments] = []
        self._folders: list[LocalSegments] = []
        self.context = context = EngineContext(
            folder, clock=clock, options=options, storage=self.syncs, reserve=reserve
        )  # fmt: skip
        self.wakeups = wakeups = Wakeups(context)
        self.writer = writer = LogWriter(context)
        groups = GroupRegistry(context, writer)
        dead_letters = DeadLetterWriter(context, writer, wakeups)
        self._deleted = deleted = RecentGroupDeletions()
        self._footer_repair = footer_repair = FooterRepair(context, writer)
        self.dispatcher = dispatcher = Dispatcher(context, writer, wakeups)
        self.lateness = dispatcher.lateness
        self._redrive_clock = redrive_clock = RedriveClock(context, writer)
        self.cleaner = SegmentCleaner(context, writer, footer_repair)
        self.retention = LogRetention(context, writer, wakeups, groups, dispatcher, self.cleaner)
        self.stalls = StallWatch(context, wakeups, groups)
        self.timer = EngineTimer(context, wakeups, dispatcher, redrive_clock, keep_house=self._keep_house)
        self._annotations = annotations or FolderAnnotations(folder, storage=self.syncs)
        self._cordon = cordon = Cordon(self._annotations, clock=clock)
        self.publisher = Publisher(context, writer, wakeups, groups, dispatcher, self.timer, cordon=cordon)
        self.puller = Puller(
            context, writer, wakeups, groups, dead_letters, deleted, footer_repair, dispatcher, redrive_clock
        )
        self.settler = Settler(context, writer, wakeups, dead_letters, self.puller)
        self.reader = TopicReader(context, groups, footer_repair, dispatcher, self.puller)
        dead_letter_reader = DeadLetterReader(context, dead_letters, footer_repair)
        self.admin = GroupAdmin(context, writer, wakeups, groups, dead_letter_reader, footer_repair, redrive_clock)
        self.dead_letters = DeadLetterOperations(context, writer, wakeups, groups, dead_letter_reader, redrive_clock)
        self.recurring = RecurringPublisher(context, writer, groups, self.publisher)
        self.deletion = Deletion(context, writer, wakeups, groups, deleted, dispatcher, self.recurring)
        self.purger = Purger(context, writer, wakeups, groups, self.publisher, self.dead_letters)
        self.snapshots = FolderSnapshots(folder, clock=clock, locks=self.locks) if segments is None else None
        self.operations = Operations(context, groups, dispatcher, footer_repair, cordon=cordon)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        clock: Clock | None = None,
        options: EngineOptions | None = None,
        storage: Storage | None = None,
        segments: OpenSegments | None = None,
        reserve: Reserve | None = None,
        annotations: Annotations | None = None,
    ) -> Self:
        """Open a data folder, creating it if needed: take its lock, replay its logs, start the timer.

        `segments` opens what one of the engine's parts keeps ("messages", "actions", "schedule"), and makes this engine
        its owner: by default a folder of that name in the data folder, through `storage`. They may be the same for all
        parts. `reserve`: whether there is room, if not by the disk of the data folder. `annotations`: what owners leave
        to those after them, if not in files of the data folder.
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
                storage=storage or DiskStorage(), segments=segments, reserve=reserve, annotations=annotations,
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
            engine.recurring.start()
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
        self.recurring.join(timeout_ms / 1000)
        self.dispatcher.shutdown()
        with context.lock:
            try:
                with suppress(WriterFenced):  # another owner has all that was acknowledged
                    context.schedule.close()
                    if not is_refused(self._check_segments):  # else the disk failed, and who waited for it was told
                        context.messages.seal()
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
        return self.context.schedule.queries.due_within(spans_ms, now_ms=self.context.clock.now_ms())

    def log_figures(self) -> Mapping[str, int]:
        """Returns the logs' bytes on the disk, their syncs since the start, schedule sizes, and the disk's space."""
        context, schedule, disk = (
            self.context,
            self.context.schedule.queries.figures(),
            self.context.reserve.disk_figures(),
        )
        with context.lock:
            return {
                "messages_bytes": context.messages.size_bytes,
                "messages_unwanted_bytes": min(self.cleaner.unwanted_bytes, context.messages.size_bytes),
                "moved_messages": self.cleaner.moved_messages,
                "actions_bytes": context.actions.size_bytes,
                "syncs": sum(count for _, count in self.syncs.counts()),
                "scheduled": schedule["scheduled"],
                "publishes_refused": 0 if context.reserve.has_room_beside() else 1,
                **disk,
                "schedule_buckets": schedule["buckets"],
                "quarantined_runs": schedule["quarantined_runs"],
                "quarantined_scheduled": schedule["quarantined_messages"],
                "quarantined_bytes": sum(log.recovered.damaged_bytes for log in (context.messages, context.actions)),
            }

    def unconfirmed_bytes(self) -> int:
        """Returns how much was appended and is not known to be durable, of all three logs."""
        context = self.context
        return sum(log.end - log.durable for log in (context.messages, context.actions, context.schedule.log))

    def check_ready(self) -> None:
        """Raise StorageFailed if the engine can accept nothing (closed, or a failed disk), or cannot deliver for lack
        of an index, or cannot dispatch what is due.
        """
        context = self.context
        with context.lock:
            context.refuse_if_closed()
            self._check_segments()
            self._footer_repair.refuse_if_unmended()
        context.schedule.check_ready()
        self.dispatcher.check_ready()

    def check_usable(self) -> None:
        """Raise StorageFailed if nothing can be made durable until the folder is reopened, as after a failed sync."""
        self._check_segments()
        self.context.schedule.check_ready()

    def _keep_house(self) -> None:
        if self.snapshots is not None:
            self.snapshots.remove_abandoned()
        self.writer.write_checkpoint_if_due()
        self.retention.check()
        self.stalls.check()

    def locks(self) -> Sequence[AbstractContextManager[object]]:
        """Returns the locks under which all that it keeps stands still, in their order. Held briefly."""
        segments = (folder.standing_still() for folder in self._folders)
        return self.context.lock, self.context.schedule.standing_still(), *segments

    def _check_segments(self) -> None:
        for segments in self._opened:
            segments.check()

    def _opened_segments(self, name: str) -> Segments:
        segments = self._open_segments(name)
        self._opened.append(segments)
        return segments

    def _open_folder(self, name: str) -> Segments:
        context = self.context
        is_synced = context.options.durability is Durability.FSYNC
        storage = context.storage if is_synced else UnsyncedStorage(context.storage)
        segments = LocalSegments.open(context.folder / name, storage=storage, clock=context.clock)
        self._folders.append(segments)
        return segments

    def _let_go(self) -> None:
        for segments in self._opened:
            segments.close()
        self._folder_lock.release()

    def _recover(self) -> None:
        context, state = self.context, self.context.state
        context.reserve.release()
        self._cordon.load()
        origin = restored(self._annotations)
        context.receipts_from = 0 if origin is None else origin.epoch << EPOCH_SHIFT
        context.messages = Journal(
            self._opened_segments("messages"), name="messages", kind=SegmentKind.MESSAGES,
            segment_bytes=context.options.segment_bytes, has_checkpoints=False,
        )  # fmt: skip
        context.messages.resume()  # first: what arrived in it is durable before a checkpoint of the schedule says so
        unsettled = self._open_schedule()
        context.actions = Journal(
            self._opened_segments("actions"), name="actions", kind=SegmentKind.ACTIONS,
            segment_bytes=min(context.options.segment_bytes, context.options.checkpoint_bytes),
        )  # fmt: skip
        out = [topic_and_id for batch in unsettled for topic_and_id in zip(batch.topics, batch.ids, strict=True)]
        recover(
            state, context.messages, context.actions, folder=context.folder, options=context.options,
            now_ms=context.clock.now_ms(), out=out,
        )  # fmt: skip
        context.dispatching_from = state.dispatched_from  # no checkpoint may pass it before the schedule has settled
        # A power cut, or damage, may have taken the last arrivals: no number is given again that a deletion made void.
        context.schedule.skip_numbers(max((deleted.scheduled_end for deleted in state.deleted.values()), default=0))
        for topic in context.schedule.queries.topics():
            if topic not in state.deleted:
                state.topic(topic)
        self._redrive_clock.resume()
        # The folder's epoch counts failed openings, too, and is far higher after a restore.
        number = max(state.epoch + 1, context.actions.epoch)
        opened = journal.Opened(at_ms=context.clock.now_ms(), number=number, messages_end=context.messages.end)
        self.writer.act(opened)
        self.deletion.finish_deletions()
        context.reserve.take()
        context.messages.commit()  # footers that were made anew: nobody else would, until the next publish
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
            self._opened_segments("schedule"), options=delay_options, reserve=context.reserve,
            arrivals=MessageArrivals(context, self.writer),
        )  # fmt: skip
        unsettled = context.schedule.unsettled()
        self.dispatcher.resume(unsettled)
        return unsettled
