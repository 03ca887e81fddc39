"""Tracks what may be due soon: messages in memory, and runs of buckets whose time has begun, in the due queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from outbox_broker.schedule.due_queue import DueQueue, TakenMessages
from outbox_broker.schedule.levels import BucketId, is_to_fire
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_records import Quarantined, RunsAdded
from outbox_broker.schedule.sorted_run import DUE, Entry, SortedRun
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

NEAR_MS: Final = 120_000
"""Messages in memory that are due later than this wait in a plain list, outside the queue's heap."""


class DueSoon:
    """The due queue and what feeds it. All but `soonest_ms` and set_aside() is used under `lock`."""

    def __init__(self, context: ScheduleContext) -> None:
        self._context = context
        self.soonest_ms = 0
        """A time before which nothing is due, for readers without the lock."""
        self._reset()

    def rebuild(self) -> None:
        """Rebuild from the state: on opening, and when messages taken from the queue could not be logged."""
        self._reset()
        self.add(self._context.state.pending.values())

    def _reset(self) -> None:
        self._due_queue = DueQueue(self._context.reader.columns)
        self._opened: set[BucketId] = set()
        self._far: list[Entry] = []
        self._far_first_ms: int | None = None
        self._horizon_ms = 0
        self._next_begin_ms = 0
        self.soonest_ms = 0

    # -- what comes and goes -----------------------------------------------------------------------------------------

    def add(self, entries: Collection[Entry]) -> None:
        """Add messages in memory to the queue, or to the list of later ones."""
        if not entries:
            return
        first_ms = min(map(DUE, entries))
        self.soonest_ms = min(self.soonest_ms, first_ms)
        if first_ms < self._horizon_ms:
            for entry in entries:
                if entry.due_ms < self._horizon_ms:
                    self._due_queue.push(entry)
            entries = [entry for entry in entries if entry.due_ms >= self._horizon_ms]
            if not entries:
                return
            first_ms = min(map(DUE, entries))
        self._far += entries
        self._far_first_ms = first_ms if self._far_first_ms is None else min(first_ms, self._far_first_ms)

    def add_runs(self, added: Iterable[RunsAdded]) -> None:
        """Add new runs: those of a bucket that is already open go to the queue."""
        for bucket_runs in added:
            bucket_id = BucketId(bucket_runs.level, bucket_runs.slot)
            if bucket_id in self._opened:
                self._due_queue.add(bucket_runs.runs)
            self._next_begin_ms = min(self._next_begin_ms, bucket_id.start_ms)
        self.update_soonest()

    def replace_memory(self) -> None:
        """Replace the messages in memory by those that remain after a flush."""
        self._due_queue.clear_near()
        self._far, self._far_first_ms = [], None
        self.add(self._context.state.pending.values())

    def take(self, now_ms: int) -> TakenMessages:
        """Take due messages from the queue, up to the limits of a batch. Raises RunDamaged and StorageFailed."""
        options = self._context.options
        return self._due_queue.take(
            now_ms,
            count_max=options.batch_messages_max,
            bytes_max=options.batch_bytes_max,
            is_alive=self._context.state.is_alive,
        )

    # -- as time passes ----------------------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """Feed the queue with whatever may be due: messages in memory, and buckets whose time has begun.

        Raises StorageFailed if a run cannot be read; the queue is rebuilt then, so that the next call adds its bucket.
        """
        while True:
            try:
                self._add_near(now_ms)
                if now_ms >= self._next_begin_ms:
                    self._open_buckets(now_ms)
            except RunDamaged as damage:  # a partly dispatched run; each damaged run is set aside once
                self.quarantine(damage)
            except BaseException:
                self.rebuild()
                raise
            else:
                return

    def update_soonest(self) -> None:
        """Update the time of the next possible due message, for readers without the lock."""
        times = (self._due_queue.next_due_ms(), self._far_first_ms, self._next_begin_ms)
        self.soonest_ms = min(time_ms for time_ms in times if time_ms is not None)

    def next_due_ms(self) -> int | None:
        """Returns a time before which nothing is due; None if nothing is scheduled."""
        times = [self._due_queue.next_due_ms(), self._far_first_ms]
        buckets = self._context.state.buckets.values()
        times += [bucket.first_due_ms() for bucket in buckets if bucket.id not in self._opened]
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def _add_near(self, now_ms: int) -> None:
        if self._far_first_ms is not None and self._far_first_ms <= now_ms + NEAR_MS // 2:
            self._horizon_ms = now_ms + NEAR_MS
            waiting, self._far, self._far_first_ms = self._far, [], None
            self.add([entry for entry in waiting if self._context.state.is_alive(entry)])

    def _open_buckets(self, now_ms: int) -> None:
        waiting = [bucket for bucket in self._context.state.buckets.values() if bucket.id not in self._opened]
        for bucket in waiting:
            if is_to_fire(bucket.id, now_ms=now_ms):
                self._opened.add(bucket.id)
                self._due_queue.add(bucket.runs.values())
        later = (bucket.id.start_ms for bucket in waiting if bucket.id not in self._opened)
        self._next_begin_ms = min(later, default=now_ms + NEAR_MS)

    # -- buckets whose time has begun --------------------------------------------------------------------------------

    def has_opened(self, bucket_id: BucketId) -> bool:
        """Returns whether a bucket's time has begun: it is dispatched from where it is, and not re-filed any more."""
        return bucket_id in self._opened

    def opened(self) -> list[BucketId]:
        """Returns all buckets whose time has begun."""
        return list(self._opened)

    def forget(self, bucket_id: BucketId) -> None:
        """Drop a bucket that is done."""
        self._opened.discard(bucket_id)

    # -- damage ------------------------------------------------------------------------------------------------------

    def quarantine(self, damage: RunDamaged) -> None:
        """Exclude the unreadable messages of a run from dispatch; everything else continues. Raises StorageFailed with
        nothing excluded.
        """
        run, lost = damage.run, damage.lost
        indexes = range(run.taken, run.count) if lost is None else [index for index in lost if index >= run.taken]
        waiting = [index for index in indexes if not run.is_gone(index)]
        logger.critical(
            "run_quarantined",
            extra={"segment": run.segment, "run": run.id, "messages": len(waiting), "error": str(damage)},
        )
        try:
            self._context.act(Quarantined(run.id, lost, self._topics_of(run, waiting)))
            self._context.reader.forget(run)
        finally:
            self.rebuild()  # what was taken from the queue, and is not dispatched, is in it again

    def set_aside(self, damage: RunDamaged) -> None:
        """Like quarantine(), for readers without the lock, if the run is still in a bucket."""
        with self._context.lock:
            if damage.run.id in self._context.state.bucket_of:
                self.quarantine(damage)

    def _topics_of(self, run: SortedRun, indexes: Sequence[int]) -> dict[str, int]:
        """Returns the number of these messages by topic; empty if that is unreadable too."""
        try:
            columns = self._context.reader.read_columns(run)
        except RunDamaged:
            return {} if run.topic is None else {run.topic: len(indexes)}
        return dict(Counter(columns.topics[columns.topic[index]] for index in indexes))
