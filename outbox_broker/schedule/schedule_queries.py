"""Finds scheduled messages by id and by topic, and counts them by topic and by due time. Changes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Final

from outbox_broker.common.cancel_topic_patterns import Scope, covers
from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.levels import candidates
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.sorted_run import Columns, SortedRun, TimedMessage, id_hashes, topic_hash, topic_number
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_core.common.errors import StorageFailed

_PAGE: Final = 1_000
"""Page size for ids of messages in memory; for those in buckets, a page is a run."""


@dataclass(frozen=True, slots=True)
class ScheduledListing:
    """A scheduled message, without its payload."""

    id: str
    topic: str
    due_ms: int


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """The current or former location of a message in a bucket."""

    run: SortedRun
    index: int
    topic: str
    due_ms: int

    @property
    def has_fired(self) -> bool:
        """Whether the message was dispatched before it was written here."""
        return self.run.has_fired(self.index)


class CoveredTopics:
    """The topics of a schedule that a scope covers."""

    def __init__(self, scope: Scope, topics: Mapping[str, int]) -> None:
        self.scope = scope
        self._topics = topics

    def may_wait(self, but: Container[str]) -> bool:
        """Returns whether anything waits on topics of the scope other than these."""
        return any(topic not in but for topic in self._waiting)

    def has_any(self, hashes: AbstractSet[int]) -> bool:
        """Returns whether one of these hashes belongs to a topic of the scope, as far as its name is known; the hash of
        an unknown topic counts only for the scope of all topics.
        """
        return bool(hashes) and (self.scope is None or not self._hashes.isdisjoint(hashes))

    @cached_property
    def _waiting(self) -> list[str]:
        return [topic for topic, count in self._topics.items() if count > 0 and covers(self.scope, topic)]

    @cached_property
    def _hashes(self) -> set[int]:
        return {topic_hash(topic) for topic in (*(self.scope or ()), *self._topics) if covers(self.scope, topic)}


class ScheduleQueries:
    """What is scheduled, asked at any time by any thread."""

    def __init__(self, context: ScheduleContext, horizon: DueSoon) -> None:
        self._context = context
        self._horizon = horizon

    def find(self, message_id: str, scope: Scope = None) -> ScheduledListing | None:
        """Returns the scheduled message with this id on the topics of a scope, the first to be due if there are
        several; None if there is none, or it was dispatched or canceled.
        """
        with self._context.lock:
            state, covered = self._context.state, CoveredTopics(scope, self._context.state.topics)
            near = [known for known in state.known.of_id(message_id) if known.seq in state.pending]
            found = [(known.due_ms, known.topic) for known in near if covers(scope, known.topic)]
            if not found or covered.may_wait([known.topic for known in near]):
                found += (
                    (location.due_ms, location.topic)
                    for location in self._standing(message_id)[0]
                    if covers(scope, location.topic) and not location.run.is_gone(location.index)
                )
        due_ms, topic = min(found, default=(0, ""))
        return ScheduledListing(message_id, topic, due_ms) if found else None

    def read(self, message_id: str, scope: Scope = None) -> TimedMessage | None:
        """Returns the message that find() finds, with its payload."""
        listing = self.find(message_id, scope)
        if listing is None:
            return None
        with self._context.lock:
            for near in self._context.state.known.of_id(message_id):
                entry = self._context.state.pending.get(near.seq)
                if entry is not None and entry.topic == listing.topic:
                    return TimedMessage(entry.due_ms, entry.id, entry.topic, entry.payload)
            for location in self._standing(message_id)[0]:
                if location.topic == listing.topic and not location.run.is_gone(location.index):
                    payload = self._context.reader.messages(location.run).payloads[location.index]
                    return TimedMessage(location.due_ms, message_id, location.topic, payload)
        return None

    def ids_of(self, topic: str, *, before_seq: int) -> Iterator[list[str]]:
        """Yields the ids of a topic's scheduled messages with arrival numbers below `before_seq`, in pages.

        The caller may cancel the ids of a page before it requests the next. Messages moved to another bucket meanwhile
        may be missed.
        """
        with self._context.lock:
            entries = [
                entry.id
                for entry in self._context.state.pending.values()
                if entry.topic == topic and entry.seq < before_seq
            ]
            runs = [
                run.id
                for bucket in self._context.state.buckets.values()
                for run in bucket.runs.values()
                if run.taken < run.count and run.topic in {None, topic}
            ]
        pages = [entries[start : start + _PAGE] for start in range(0, len(entries), _PAGE)]
        for page in chain(pages, (self._ids_in(run_id, topic, before_seq=before_seq) for run_id in runs)):
            if page:
                yield page

    def _ids_in(self, run_id: int, topic: str, *, before_seq: int) -> list[str]:
        """Returns the ids of a topic's waiting messages in a run; empty if the run is gone."""
        with self._context.lock:
            if run_id not in self._context.state.bucket_of:
                return []
            run = self._context.state.run(run_id)[1]
            try:
                columns = self._columns_of(run)
                number = None if columns is None else topic_number(columns, topic)
                if columns is None or number is None:
                    return []
                found = [
                    index
                    for index in range(run.taken, run.count)
                    if columns.topic[index] == number and columns.seq[index] < before_seq and not run.is_gone(index)
                ]
                ids = self._context.reader.messages(run).ids if found else []
            except RunDamaged as damage:
                self._horizon.set_aside(damage)
                return self._ids_in(run_id, topic, before_seq=before_seq)
            return [ids[index] for index in found]

    # -- counts --------------------------------------------------------------------------------------------------------

    def count(self, topic: str | None = None) -> int:
        """Returns how many messages are scheduled, of a topic or in all."""
        with self._context.lock:
            return self._context.state.topics.total() if topic is None else self._context.state.topics[topic]

    def topics(self) -> dict[str, int]:
        """Returns how many messages are scheduled, by topic."""
        with self._context.lock:
            return {topic: count for topic, count in sorted(self._context.state.topics.items()) if count}

    def histogram(self, *, topic: str | None, from_ms: int, to_ms: int, bucket_ms: int) -> list[tuple[int, int]]:
        """Returns (start, number of messages due) for each non-empty `bucket_ms` of [from_ms, to_ms).

        Reads columns only, and blocks nothing: messages dispatched during the read may be counted or not.
        """
        counts: Counter[int] = Counter()
        with self._context.lock:
            for entry in self._context.state.pending.values():
                if from_ms <= entry.due_ms < to_ms and topic in {None, entry.topic}:
                    counts[entry.due_ms // bucket_ms] += 1
            runs = [
                run
                for bucket in self._context.state.buckets.values()
                for run in bucket.runs.values()
                if run.taken < run.count and run.first_due_ms < to_ms and run.last_due_ms >= from_ms
            ]
        for run in runs:
            counts.update(due_ms // bucket_ms for due_ms in self._dues(run, topic) if from_ms <= due_ms < to_ms)
        return [(bucket_number * bucket_ms, count) for bucket_number, count in sorted(counts.items())]

    def due_within(self, spans_ms: Sequence[int], *, now_ms: int) -> list[int]:
        """Returns how many messages are due within each ascending span from now; and last, the total.

        Only runs that cross the end of a span are read.
        """
        ends_ms = [now_ms + span_ms for span_ms in spans_ms]
        counts = [0] * (len(ends_ms) + 1)
        crossing: list[SortedRun] = []
        with self._context.lock:
            dues_ms = [entry.due_ms for entry in self._context.state.pending.values()]
            for bucket in self._context.state.buckets.values():
                for run in bucket.runs.values():
                    place = bisect_left(ends_ms, run.first_due_ms)
                    if place == bisect_left(ends_ms, run.last_due_ms):
                        counts[place] += run.waiting()
                    else:
                        crossing.append(run)
        in_runs = (self._dues(run, None) for run in crossing)
        for due_ms in chain(dues_ms, chain.from_iterable(in_runs)):
            counts[bisect_left(ends_ms, due_ms)] += 1
        return list(accumulate(counts))

    def next_due_ms(self) -> int | None:
        """Returns a time before which nothing is due; None if nothing is scheduled."""
        with self._context.lock:
            return self._horizon.next_due_ms()

    def figures(self) -> dict[str, int]:
        """Returns sizes, for operators."""
        with self._context.lock:
            runs = [run for bucket in self._context.state.buckets.values() for run in bucket.runs.values()]
            return {
                "scheduled": self._context.state.topics.total(),
                "buckets": len(self._context.state.buckets),
                "runs": len(runs),
                "in_memory": len(self._context.state.pending),
                "in_memory_bytes": self._context.state.pending_bytes,
                "handed_out": len(self._context.state.hand_outs),
                "id_index_pieces": len(self._context.state.index),
                "topic_names": len(self._context.state.topics),
                "cancels_remembered": len(self._context.state.canceled),
                "quarantined_runs": sum(len(bucket.quarantined) for bucket in self._context.state.buckets.values()),
                "quarantined_messages": sum(run.lost_count() for run in runs),
                "log_bytes": self._context.log.size_bytes,
            }

    def _dues(self, run: SortedRun, topic: str | None) -> Iterator[int]:
        try:
            columns = self._context.reader.read_columns(run)
        except StorageFailed:  # its bucket was dropped meanwhile
            return
        except RunDamaged as damage:
            self._horizon.set_aside(damage)
            return
        number = None if topic is None else topic_number(columns, topic)
        if topic is not None and number is None:
            return
        for index in range(run.taken, run.count):
            if (number is None or columns.topic[index] == number) and not run.is_gone(index):
                yield columns.due[index]

    # -- for cancels -------------------------------------------------------------------------------------------------

    def locations(
        self, message_id: str, covered: CoveredTopics, *, canceled: set[str]
    ) -> tuple[dict[str, list[BucketLocation | None]], set[int]]:
        """Returns the current or former locations of messages of this id on topics of a scope, by topic (None: in
        memory); and the topic hashes of dispatched ones, perhaps outside the scope. `canceled`: topics on which the
        cancel is known.
        """
        state, scope = self._context.state, covered.scope
        locations: dict[str, list[BucketLocation | None]] = {}
        fired: set[int] = set()
        for near in state.known.of_id(message_id):
            if not covers(scope, near.topic):
                continue
            if near.seq in state.pending:
                locations[near.topic] = [None]
            elif near.seq in state.passed:
                fired.add(topic_hash(near.topic))
        known = canceled.union(locations)
        is_found = (known or fired) and not covered.may_wait(known) and not (locations and self._may_be_repeated())
        if state.canceled.awaits(message_id, scope) or is_found:
            return locations, fired
        standing, fired_long_ago = self._standing(message_id)
        for location in standing:
            if covers(scope, location.topic):
                locations.setdefault(location.topic, []).append(location)
        return locations, fired | fired_long_ago

    def _may_be_repeated(self) -> bool:
        """Returns whether a message in memory may be in a bucket too: an id is taken for new after so many others."""
        return self._context.index.count() > self._context.options.dedup_messages

    def _standing(self, message_id: str) -> tuple[list[BucketLocation], set[int]]:
        """Returns the locations of messages of this id in buckets; and the topic hashes of dispatched ones.

        The index maps a hash to due times; only the message itself proves a match. A damaged message is in neither
        result: nobody can tell what it was.
        """
        found: list[BucketLocation] = []
        fired: set[int] = set()
        for due_ms, seq, topic in self._context.index.find(id_hashes([message_id])[0]):
            try:
                standing = self._look_up(message_id, (due_ms, seq))
            except RunDamaged as damage:
                self._horizon.set_aside(damage)
                return self._standing(message_id)
            if standing is None:
                fired.add(topic)
            elif standing.run.id:
                found.append(standing)
        return found, fired

    def _look_up(self, message_id: str, key: tuple[int, int]) -> BucketLocation | None:
        """Returns the message of this (due, seq); None if it was dispatched. Searches the coarsest bucket first."""
        is_lost = False
        for bucket_id in candidates(key[0]):
            bucket = self._context.state.buckets.get(bucket_id)
            for run in bucket.runs.values() if bucket else ():
                if not run.may_hold(key) or (run.taken == run.count and run.lost is None):
                    continue
                columns = self._columns_of(run)
                index = None if columns is None else columns.index_of(*key)
                is_lost = is_lost or columns is None or (index is not None and run.is_lost(index))
                if columns is not None and index is not None and index >= run.taken and not run.is_lost(index):
                    topic = columns.topics[columns.topic[index]]
                    is_it = self._context.reader.messages(run).ids[index] == message_id
                    return BucketLocation(run, index, topic, key[0]) if is_it else _NOT_IT
        return _NOT_IT if is_lost else None

    def _columns_of(self, run: SortedRun) -> Columns | None:
        """Returns a run's columns; None if they are damaged and the run is already quarantined."""
        try:
            return self._context.reader.columns(run)
        except RunDamaged:
            if not run.is_unreadable:
                raise
            return None


_NOT_IT: Final = BucketLocation(
    SortedRun(
        id=0, position=0, columns_bytes=0, messages_position=0, messages_bytes=0, count=0, first_due_ms=0,
        first_seq=0, last_due_ms=0, last_seq=0,
    ), 0, "", 0,
)  # fmt: skip
"""Marks a hash collision, or a damaged message: it was not dispatched, and it cannot be canceled."""
