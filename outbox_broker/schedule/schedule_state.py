"""In-memory state of the schedule, changed only by applying records of the log.

No I/O, no clock. Messages in buckets are not in it: their runs are, at some two hundred bytes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import assert_never

from outbox_broker.schedule import schedule_records
from outbox_broker.schedule.delay_options import TOPIC_NAMES_MAX
from outbox_broker.schedule.levels import BucketId, BucketState
from outbox_broker.schedule.recent_cancels import Cancel, RememberedCancels
from outbox_broker.schedule.schedule_records import FROM_MEMORY, Passed
from outbox_broker.schedule.sorted_run import ID, PAYLOAD, SEQ, TOPIC, Entry, SortedRun
from outbox_broker.state.message_id_map import MessageIdMap


@dataclass(slots=True, eq=False)
class Bucket:
    """A bucket: segments of runs, each up to its end; the last one is written to by the process that began it.

    `handed` counts the unsettled batch parts from it, which keep it alive.
    """

    id: BucketId
    segments: dict[str, int] = field(default_factory=dict)
    state: BucketState = BucketState.OPEN
    runs: dict[int, SortedRun] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)
    handed: int = 0

    def is_empty(self) -> bool:
        """Returns whether every message of it was dispatched and settled, moved on or canceled."""
        return not self.handed and not self.quarantined and all(run.taken == run.count for run in self.runs.values())

    def first_due_ms(self) -> int | None:
        """Returns a lower bound of the due times that remain."""
        return min((run.first_due_ms for run in self.runs.values() if run.taken < run.count), default=None)


@dataclass(frozen=True, slots=True)
class ScheduleHandOut:
    """A dispatched batch; `entries` are those of its messages that were in memory, and `done` those that were settled
    before the others. Both by arrival.
    """

    batch: int
    parts: list[schedule_records.Part]
    entries: dict[int, Entry]
    done: set[int] = field(default_factory=set)


class ScheduleState:
    """The whole state. Changed under its owner's lock, and by replay before that."""

    def __init__(self, *, cancels_max: int, topic_names_max: int = TOPIC_NAMES_MAX) -> None:
        """`topic_names_max`: beyond so many topics, those on which nothing is scheduled are forgotten with a flush."""
        self._topic_names_max = topic_names_max
        self.next_seq = 1
        self.next_run = 1
        self.next_batch = 1
        self.pending: dict[int, Entry] = {}  # in the log, not in a bucket yet; by arrival, in that order
        self.removed = 0  # how many left it other than by a flush
        self.pending_bytes = 0
        self.passed: dict[int, Passed] = {}  # dispatched before they were in a bucket; by arrival
        self.known: MessageIdMap[Entry | Passed] = MessageIdMap(TOPIC)  # both of these
        self.buckets: dict[BucketId, Bucket] = {}
        self.bucket_of: dict[int, Bucket] = {}  # by run id
        self.index: list[schedule_records.StoredIndex] = []
        self.hand_outs: dict[int, ScheduleHandOut] = {}
        self.canceled = RememberedCancels(cancels_max)
        self.topics: Counter[str] = Counter()

    def apply(self, record: schedule_records.LogRecord) -> None:  # noqa: C901 - one arm a record
        """Apply a record."""
        # Also where what it names was lost with the end of another log: its number is in buckets and batches.
        self.next_seq = max(self.next_seq, schedule_records.arrivals_before(record))
        match record:
            case schedule_records.Scheduled():
                self._schedule(record.entries)
                self.canceled.stop(record.dead_topics, record.dead)
            case schedule_records.ScheduleCanceled():
                self._cancel(record)
            case schedule_records.BatchHanded():
                self._hand_out(record)
            case schedule_records.BatchFired():
                self._settle(record.batch)
                self._schedule_again(record.again)
            case schedule_records.BatchFiredInPart():
                self.hand_outs[record.batch].done.update(record.done)
                self._schedule_again(record.again)
            case schedule_records.Flushed():
                self._flush(record)
            case schedule_records.BucketChanged():
                self._change(BucketId(record.level, record.slot), BucketState(record.state))
            case schedule_records.Moved():
                self._move(record)
            case schedule_records.SegmentsMerged():
                self._merge(record)
            case schedule_records.Quarantined():
                self._quarantine(record)
            case schedule_records.ScheduleCheckpoint():
                self._restore(record)
            case _:
                assert_never(record)

    def run(self, run_id: int) -> tuple[Bucket, SortedRun]:
        """Returns a run and its bucket. Raises KeyError if the run is gone."""
        bucket = self.bucket_of[run_id]
        return bucket, bucket.runs[run_id]

    def is_open(self, bucket_id: BucketId) -> bool:
        """Returns whether direct writes may go to a bucket: it does not exist yet, or still accepts them."""
        bucket = self.buckets.get(bucket_id)
        return bucket is None or bucket.state is BucketState.OPEN

    def is_alive(self, entry: Entry) -> bool:
        """Returns whether a message in memory is still to be delivered."""
        return entry.seq in self.pending

    def first_undelivered_ms(self) -> int | None:
        """Returns a lower bound of the due times in buckets and in batches that are not settled; None without any."""
        in_buckets = (bucket.first_due_ms() for bucket in self.buckets.values())
        in_memory = (entry.due_ms for out in self.hand_outs.values() for entry in out.entries.values())
        runs = (run for out in self.hand_outs.values() for run, _, _ in out.parts if run != FROM_MEMORY)
        in_runs = (self.run(run)[1].first_due_ms for run in runs)
        return min((due_ms for due_ms in chain(in_buckets, in_memory, in_runs) if due_ms is not None), default=None)

    def topics_before(self, seq: int) -> Counter[str]:
        """Returns how many messages of each topic are in memory that arrived before a number."""
        return Counter(map(TOPIC, self.pending.values())) - Counter(map(TOPIC, self._since(seq)))

    def _since(self, seq: int) -> list[Entry]:
        """Returns the messages in memory from an arrival number on, mostly few, in order."""
        return list(takewhile(lambda entry: entry.seq >= seq, reversed(self.pending.values())))[::-1]

    def segments(self) -> Iterator[str]:
        """Yields the names of all segments in use, except for the log's."""
        for bucket in self.buckets.values():
            yield from bucket.segments
        for piece in self.index:
            yield piece.segment

    @property
    def flushed_bytes_max(self) -> int:
        """The maximum disk space of a flush of what is in memory, in bytes: messages, columns and spares; ids."""
        return 2 * self.pending_bytes + 64 * (len(self.pending) + len(self.passed))

    def checkpoint(self, *, arrived_to: int) -> schedule_records.ScheduleCheckpoint:
        """Returns the state as a record; `arrived_to` as there. It contains everything in memory, so it is written when
        that is little.
        """
        return schedule_records.ScheduleCheckpoint(
            next_seq=self.next_seq,
            next_run=self.next_run,
            next_batch=self.next_batch,
            buckets=[
                schedule_records.StoredBucket(
                    bucket.id.level, bucket.id.slot, bucket.segments, bucket.state, list(bucket.runs.values()),
                    list(bucket.quarantined),
                )
                for bucket in self.buckets.values()
            ],
            index=self.index,
            hand_outs=[
                schedule_records.StoredHandOut(
                    hand_out.batch, hand_out.parts, list(hand_out.entries.values()), list(hand_out.done)
                )
                for hand_out in self.hand_outs.values()
            ],
            topics={topic: count for topic, count in self.topics.items() if count},
            pending=list(self.pending.values()),
            cancels=self.canceled.stored(),
            fired=list(self.passed.values()),
            arrived_to=arrived_to,
        )  # fmt: skip

    def add_runs(self, added: Iterable[schedule_records.RunsAdded]) -> None:
        """Add runs to their buckets, which are created if new; reserves the runs' ids."""
        for bucket_runs in added:
            bucket_id = BucketId(bucket_runs.level, bucket_runs.slot)
            bucket = self.buckets.get(bucket_id)
            if bucket is None:
                bucket = self.buckets[bucket_id] = Bucket(bucket_id)
            bucket.segments[bucket_runs.segment] = bucket_runs.end
            self._place(bucket, bucket_runs.runs)

    def _place(self, bucket: Bucket, runs: Iterable[SortedRun]) -> None:
        for run in runs:
            bucket.runs[run.id] = run
            self.bucket_of[run.id] = bucket
            self.next_run = max(self.next_run, run.id + 1)

    # -- what records do ---------------------------------------------------------------------------------------------

    def _schedule(self, entries: Sequence[Entry]) -> None:
        self.pending.update(zip(map(SEQ, entries), entries, strict=True))
        self.known.put_all(list(map(ID, entries)), entries)
        self.topics.update(map(TOPIC, entries))
        self.pending_bytes += sum(map(len, map(PAYLOAD, entries)))
        if entries:
            self.next_seq = max(self.next_seq, entries[-1].seq + 1)

    def _schedule_again(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            known = self.known.get(entry.topic, entry.id)
            if known is not None:
                self.passed.pop(known.seq, None)
        self._schedule(entries)

    def _cancel(self, record: schedule_records.ScheduleCanceled) -> None:
        at_ms, scope = record.at_ms, record.scope
        stopped = zip(record.stopped, record.stopped_topics, strict=True)
        cancels = [Cancel(message_id, at_ms, topic, scope) for message_id, topic in stopped]
        self.canceled.add(
            [*cancels, *(Cancel(message_id, at_ms, None, scope) for message_id in record.early)], at_ms=at_ms
        )
        for seq in record.arrivals:  # afterwards, so that readers without the lock find it in one of them
            entry = self.pending.pop(seq, None)
            if entry is not None:
                self._forget(entry)
                self.topics[entry.topic] -= 1
        for run_id, index in record.marks:
            self.run(run_id)[1].mark_gone(index)
        self.topics.subtract(record.topics)

    def _forget(self, entry: Entry) -> None:
        known = self.known.get(entry.topic, entry.id)
        if known is not None and known.seq == entry.seq:  # a replay may know of a later one of this id
            self.known.pop(entry.topic, entry.id)
        self.pending_bytes -= len(entry.payload)
        self.removed += 1

    def _hand_out(self, record: schedule_records.BatchHanded) -> None:
        entries: dict[int, Entry] = {}
        for seq in [start for run_id, start, _ in record.parts if run_id == FROM_MEMORY]:
            entry = self.pending.pop(seq, None)
            if entry is None:
                continue  # lost with the end of its log, before anybody was told that it is stored
            entries[seq] = entry
            passed = self.passed[seq] = Passed(entry.due_ms, seq, entry.id, entry.topic)
            self.known.put(entry.id, passed)
            self.pending_bytes -= len(entry.payload)
            self.topics[entry.topic] -= 1
        self.removed += len(entries)
        self.topics.subtract(record.topics)
        parts = [part for part in record.parts if part[0] != FROM_MEMORY or part[1] in entries]
        self.hand_outs[record.batch] = ScheduleHandOut(record.batch, parts, entries)
        self.next_batch = max(self.next_batch, record.batch + 1)
        for run_id, _, stop in record.parts:
            if run_id != FROM_MEMORY:
                bucket, run = self.run(run_id)
                run.taken = max(run.taken, stop)
                bucket.handed += 1

    def _settle(self, batch: int) -> None:
        hand_out = self.hand_outs.pop(batch, None)
        if hand_out is not None:
            for run_id, _, _ in hand_out.parts:
                if run_id != FROM_MEMORY:
                    self.bucket_of[run_id].handed -= 1

    def _flush(self, record: schedule_records.Flushed) -> None:
        self.add_runs(record.added)
        if record.index is not None:
            self.index.append(record.index)
        for run_id, index in record.gone:
            self.run(run_id)[1].mark_gone(index)
        for run_id, index in record.fired:
            self.run(run_id)[1].mark_fired(index)
        before = record.before_seq
        # They are the same, but where a replay did not find all that was filed.
        self.topics.update(record.topics)
        self.topics.subtract(self.topics_before(before))
        self._restore_memory(
            self._since(before), [message for message in self.passed.values() if message.seq >= before]
        )

    def _restore_memory(self, pending: Sequence[Entry], passed: Sequence[Passed]) -> None:
        """Replace what is in memory."""
        self.pending = dict(zip(map(SEQ, pending), pending, strict=True))
        self.passed = {message.seq: message for message in passed}
        self.pending_bytes = sum(map(len, map(PAYLOAD, pending)))
        came: list[Entry | Passed] = [*pending, *passed]
        self.known = MessageIdMap(TOPIC, list(map(ID, came)), came)
        if len(self.topics) > self._topic_names_max:
            self.topics = Counter({topic: count for topic, count in self.topics.items() if count})

    def _quarantine(self, record: schedule_records.Quarantined) -> None:
        bucket, run = self.run(record.run)
        bucket.quarantined.add(run.id)
        left = (index for index in range(run.taken, run.count) if not run.is_gone(index))
        for index in left if record.lost is None else record.lost:
            run.mark_lost(index)
        if record.lost is None:
            run.taken, run.is_unreadable = run.count, True
        self.topics.subtract(record.topics)

    def _change(self, bucket_id: BucketId, state: BucketState) -> None:
        bucket = self.buckets[bucket_id]
        bucket.state = state
        if state is BucketState.DONE:
            for run_id in bucket.runs:
                del self.bucket_of[run_id]
            del self.buckets[bucket_id]

    def _move(self, record: schedule_records.Moved) -> None:
        bucket = self.buckets[BucketId(record.level, record.slot)]
        bucket.state = BucketState.EXPANDING
        for run_id, taken in record.taken:
            bucket.runs[run_id].taken = taken
        self.add_runs(record.added)
        for run_id, index in record.gone:
            self.run(run_id)[1].mark_gone(index)

    def _merge(self, record: schedule_records.SegmentsMerged) -> None:
        bucket = self.buckets[BucketId(record.level, record.slot)]
        for run_id in record.runs:
            del bucket.runs[run_id], self.bucket_of[run_id]
        for name in record.segments:
            del bucket.segments[name]
        self.add_runs(record.added)
        for run_id, index in record.gone:
            self.run(run_id)[1].mark_gone(index)

    def _restore(self, record: schedule_records.ScheduleCheckpoint) -> None:
        for stored in record.buckets:
            bucket_id = BucketId(stored.level, stored.slot)
            bucket = self.buckets[bucket_id] = Bucket(bucket_id, stored.segments, BucketState(stored.state))
            bucket.quarantined = set(stored.quarantined)
            self._place(bucket, stored.runs)
        for out in record.hand_outs:
            self.hand_outs[out.batch] = ScheduleHandOut(
                out.batch, out.parts, {entry.seq: entry for entry in out.entries}, set(out.done)
            )
            for run_id, _, _ in out.parts:
                if run_id != FROM_MEMORY:
                    self.bucket_of[run_id].handed += 1
        self.next_seq, self.next_run, self.next_batch = record.next_seq, record.next_run, record.next_batch
        self.index = list(record.index)
        self.canceled.restore(record.cancels)
        self.topics = Counter(record.topics)
        self._restore_memory(record.pending, record.fired)
