"""What every part of the schedule stands on: the lock, the log, the state, the wheel. No verbs of its users.

A change is written to the log, then done by the very code that replays it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.schedule.bucket_filing import BucketFiling
from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.due_queue import Wheel
from outbox_broker.schedule.id_index import IdIndex
from outbox_broker.schedule.levels import BucketId, BucketState, is_to_fire
from outbox_broker.schedule.schedule_log import PREFIX, Place, ScheduleLog
from outbox_broker.schedule.schedule_records import BucketChanged, LogRecord, Quarantined, RunsAdded, Scheduled
from outbox_broker.schedule.schedule_state import Bucket, ScheduleState
from outbox_broker.schedule.segment_store import SegmentStore
from outbox_broker.schedule.sorted_run import DUE, UNKNOWN_TOPIC, Entry, SortedRun, id_hashes, topic_hash
from outbox_broker.schedule.sorted_run_reader import RunDamaged, RunReader
from outbox_broker.state.message_identities import Identities
from outbox_core.common.errors import StorageFailed

logger = logging.getLogger(__name__)

IDS_PREFIX: Final = "ids-"
NEAR_MS: Final = 120_000
"""Messages in memory that are due later wait in a plain list, and are not in the wheel's heap yet."""


class Identified(Protocol):
    """What tells which message it is."""

    @property
    def topic(self) -> str:
        """The topic."""

    @property
    def id(self) -> str:
        """The message id."""


class DelayCore:
    """The shared half of a DelayStore. Methods with an underscore are called under the lock."""

    def __init__(self, store: SegmentStore, options: DelayOptions, reserve: Reserve | None) -> None:
        """For DelayStore.open()."""
        self._store = store
        self._reserve = reserve
        self._options = options
        self._keeping = threading.RLock()  # held before the lock; buckets change only under it
        self._lock = threading.RLock()
        self._state = ScheduleState(cancels_max=options.cancels_remembered_max)
        self._log = ScheduleLog(store)
        self._reader = RunReader(store, self._state)
        self._index = IdIndex(
            store, pieces_max=options.index_pieces_max, merged_pieces_max=options.index_merged_pieces_max
        )
        self._filing = BucketFiling(store, self._state)
        self._wheel = Wheel(self._reader.columns)
        self._opened: set[BucketId] = set()
        self._far: list[Entry] = []
        self._far_first_ms: int | None = None
        self._horizon_ms = 0
        self._next_begin_ms = 0
        self._soonest_ms = 0
        self._garbage: list[str] = []
        self._garbage_at_checkpoint: list[str] = []
        self._ids_made = 0
        self._again: deque[int] = deque()
        self._recent: tuple[Identities[str], ...] = ()  # topics and ids of the last flushes
        self._recovered: dict[int, set[int]] = {}  # hashes of topics and ids that came lately, before this was opened
        self._closed = False

    # -- opening -----------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Rebuild everything from the log, and remove segments that it does not name."""
        for record in self._log.recover():
            self._state.apply(record)
        self._log.begin_anew(self._state.checkpoint())
        used = {self._log.name, *self._state.segments()}
        names = set(self._store.list())
        self._ids_made = max(
            (int(one.removeprefix(IDS_PREFIX)) for one in names if one.startswith(IDS_PREFIX)), default=0
        )
        self._store.delete(sorted(names - used))
        self._again.extend(sorted(self._state.hand_outs))
        for name in used:
            if not name.startswith(PREFIX):
                self._store.seal(name)  # opened again when it is written to
        self._rebuild_wheel()
        for bucket in [one for one in self._state.buckets.values() if one.is_empty()]:
            self._finish(bucket)

    def _rebuild_wheel(self) -> None:
        """From the state: on opening, and where what was taken out of the wheel could not be written down."""
        self._wheel = Wheel(self._reader.columns)
        self._opened.clear()
        self._far, self._far_first_ms, self._horizon_ms, self._next_begin_ms = [], None, 0, 0
        self._soonest_ms = 0
        self._remember(self._state.pending.values())

    # -- changes -----------------------------------------------------------------------------------------------------

    def _act(self, record: LogRecord) -> Place:
        """Write a change down, then do it; durable with the place that is returned."""
        place = self._write(record)
        self._state.apply(record)
        return place

    def _write(self, record: LogRecord) -> Place:
        """Write a change down; where the disk is full, in the room that is kept for all but new messages."""
        if self._reserve is None or isinstance(record, Scheduled):
            return self._log.append(record)
        return self._reserve.spend(lambda: self._log.append(record))

    def _quarantine(self, damage: RunDamaged) -> None:
        """What cannot be read of a run is never served; all else goes on."""
        run = damage.run
        bucket = self._state.bucket_of[run.id]
        lost = damage.lost
        waiting = [one for one in (range(run.count) if lost is None else lost) if one >= run.taken]
        waiting = [one for one in waiting if not run.is_gone(one)]
        logger.critical(
            "run_quarantined",
            extra={"segment": bucket.segment, "run": run.id, "messages": len(waiting), "error": str(damage)},
        )
        self._act(Quarantined(run.id, lost, self._topics_of(bucket, run, waiting)))
        self._reader.forget(run)
        self._rebuild_wheel()

    def _set_aside(self, damage: RunDamaged) -> None:
        """_quarantine() for who reads without the lock."""
        with self._lock:
            if damage.run.id in self._state.bucket_of:
                self._quarantine(damage)

    def _topics_of(self, bucket: Bucket, run: SortedRun, indexes: Sequence[int]) -> dict[str, int]:
        """How many of each topic are among these; none where that cannot be read either."""
        try:
            columns = self._reader.read_columns(bucket.segment, run)
        except RunDamaged:
            return {} if run.topic is None else {run.topic: len(indexes)}
        return dict(Counter(columns.topics[columns.topic[index]] for index in indexes))

    def _finish(self, bucket: Bucket) -> None:
        """A bucket is done: its segment goes once that is durable."""
        self._act(BucketChanged(bucket.id.level, bucket.id.slot, BucketState.DONE))
        for run in bucket.runs.values():
            self._reader.forget(run)
        self._opened.discard(bucket.id)
        self._garbage.append(bucket.segment)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the schedule is closed")

    # -- what is near ------------------------------------------------------------------------------------------------

    def _remember(self, entries: Collection[Entry]) -> None:
        """Put messages in memory where they will be found in time."""
        if not entries:
            return
        first_ms = min(map(DUE, entries))
        self._soonest_ms = min(self._soonest_ms, first_ms)
        if first_ms < self._horizon_ms:
            for entry in entries:
                if entry.due_ms < self._horizon_ms:
                    self._wheel.push(entry)
            entries = [entry for entry in entries if entry.due_ms >= self._horizon_ms]
            if not entries:
                return
            first_ms = min(map(DUE, entries))
        self._far += entries
        self._far_first_ms = first_ms if self._far_first_ms is None else min(first_ms, self._far_first_ms)

    def _look_ahead(self) -> None:
        """Note when something may be due next, for who asks without the lock."""
        times = (self._wheel.next_due_ms(), self._far_first_ms, self._next_begin_ms)
        self._soonest_ms = min(time_ms for time_ms in times if time_ms is not None)

    def _advance(self, now_ms: int) -> None:
        """Let the wheel have whatever may be due: messages in memory, and buckets whose time has begun."""
        while True:
            try:
                self._remember_near(now_ms)
                if now_ms >= self._next_begin_ms:
                    self._open_buckets(now_ms)
            except RunDamaged as damage:  # one that had fired by half: each is set aside once
                self._quarantine(damage)
            else:
                return

    def _remember_near(self, now_ms: int) -> None:
        if self._far_first_ms is not None and self._far_first_ms <= now_ms + NEAR_MS // 2:
            self._horizon_ms = now_ms + NEAR_MS
            waiting, self._far, self._far_first_ms = self._far, [], None
            self._remember([entry for entry in waiting if self._state.is_alive(entry)])

    def _open_buckets(self, now_ms: int) -> None:
        waiting = [bucket for bucket in self._state.buckets.values() if bucket.id not in self._opened]
        for bucket in waiting:
            if is_to_fire(bucket.id, now_ms=now_ms):
                self._opened.add(bucket.id)
                self._wheel.add(bucket.runs.values())
        later = (bucket.id.start_ms for bucket in waiting if bucket.id not in self._opened)
        self._next_begin_ms = min(later, default=now_ms + NEAR_MS)

    def _place_runs(self, added: Iterable[RunsAdded]) -> None:
        """Buckets got runs: those of one that fires already go to the wheel."""
        for one in added:
            bucket_id = BucketId(one.level, one.slot)
            if bucket_id in self._opened:
                self._wheel.add(one.runs)
            self._next_begin_ms = min(self._next_begin_ms, bucket_id.start_ms)
        self._look_ahead()

    def may_know(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Whether anything may be known of messages of these ids on these topics. Waits for nobody.

        Every id is looked for in the places that it passes, in the order in which it passes them.
        """
        state = self._state
        return (
            state.known.has_any(ids)
            or state.canceled.has_any(ids)
            or any(some.has_any(ids) for some in self._recent)
            or self._may_be_recovered(ids, topics)
        )

    def knows(self, topic: str, message_id: str) -> bool:
        """Whether this message waits, fired lately, or was canceled, before or after it came. Waits for nobody."""
        return (
            self._state.known.get(topic, message_id) is not None
            or self._state.canceled.knows(topic, message_id)
            or self._is_recent(topic, message_id)
        )

    def canceled_among(self, messages: Sequence[Identified]) -> list[int]:
        """Which of these messages were canceled, before or after they came, as far as remembered. Waits for nobody."""
        canceled = self._state.canceled
        if not len(canceled):
            return []
        return [at for at, one in enumerate(messages) if canceled.knows(one.topic, one.id)]

    def _is_recent(self, topic: str, message_id: str) -> bool:
        """Whether this message came with one of the last flushes."""
        some_have = any(some.get(topic, message_id) is not None for some in self._recent)
        return some_have or self._may_be_recovered([message_id], [topic])

    def _may_be_recovered(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Whether one of these ids came lately, before this was opened, on one of these topics."""
        recovered = self._recovered
        if not recovered:
            return False
        known = recovered.keys() & {UNKNOWN_TOPIC, *map(topic_hash, topics)}
        hashes = id_hashes(ids) if known else []
        return any(not recovered[topic].isdisjoint(hashes) for topic in known)

    def _note_recovered(self, hashes: Iterable[tuple[int, int]]) -> None:
        """Hashes of topics and ids that came before this was opened."""
        recovered = {topic: set(some) for topic, some in self._recovered.items()}  # others look meanwhile
        for topic, hash_ in hashes:
            recovered.setdefault(topic, set()).add(hash_)
        self._recovered = recovered
