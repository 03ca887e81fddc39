"""Looking into the schedule: one message by its id, how many are due when. It changes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Final

from outbox_broker.common.cancel_scope import Scope, covers
from outbox_broker.schedule.levels import candidates
from outbox_broker.schedule.schedule_context import DelayCore
from outbox_broker.schedule.sorted_run import UNKNOWN_TOPIC, Columns, SortedRun, id_hashes, topic_hash
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_core.common.errors import StorageFailed

_PAGE: Final = 1_000
"""So many ids at a time are told of what is in memory; of what is in buckets, those of a run."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A scheduled message, without its payload."""

    id: str
    topic: str
    due_ms: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a message stands in a bucket, or stood."""

    run: SortedRun
    index: int
    topic: str
    due_ms: int

    @property
    def has_fired(self) -> bool:
        """Whether it fired before it stood here."""
        return self.run.has_fired(self.index)


class Covered:
    """What a scope has of the topics of a schedule, as they are now."""

    def __init__(self, scope: Scope, topics: Mapping[str, int]) -> None:
        self.scope = scope
        self._topics = topics

    def may_wait(self, but: Container[str]) -> bool:
        """Whether anything waits on topics of the scope, but for these."""
        return any(topic not in but for topic in self._waiting)

    def has_any(self, hashes: AbstractSet[int]) -> bool:
        """Whether one of these hashes is of a topic of the scope, as far as its name is known; that of a topic which
        nobody knows counts for the scope of all topics alone.
        """
        return bool(hashes) and (self.scope is None or not self._hashes.isdisjoint(hashes))

    @cached_property
    def _waiting(self) -> list[str]:
        return [topic for topic, count in self._topics.items() if count > 0 and covers(self.scope, topic)]

    @cached_property
    def _hashes(self) -> set[int]:
        return {topic_hash(topic) for topic in (*(self.scope or ()), *self._topics) if covers(self.scope, topic)}


class Searching(DelayCore):
    """Questions, which may be asked at any time."""

    def find(self, message_id: str, scope: Scope = None) -> Listed | None:
        """The scheduled message of this id on the topics of a scope, the first to be due where there are several; None
        where there is none, or it has fired or was canceled.
        """
        with self._lock:
            state, covered = self._state, Covered(scope, self._state.topics)
            near = [one for one in state.known.of_id(message_id) if one.seq in state.pending]
            found = [(one.due_ms, one.topic) for one in near if covers(scope, one.topic)]
            if not found or covered.may_wait([one.topic for one in near]):
                found += (
                    (one.due_ms, one.topic)
                    for one in self._standing(message_id)[0]
                    if covers(scope, one.topic) and not one.run.is_gone(one.index)
                )
        due_ms, topic = min(found, default=(0, ""))
        return Listed(message_id, topic, due_ms) if found else None

    def count(self, topic: str | None = None) -> int:
        """How many are scheduled, of a topic or in all."""
        with self._lock:
            return self._state.topics.total() if topic is None else self._state.topics[topic]

    def topics(self) -> dict[str, int]:
        """How many are scheduled, by topic."""
        with self._lock:
            return {topic: count for topic, count in sorted(self._state.topics.items()) if count}

    def next_seq(self) -> int:
        """The number that the next message gets which comes."""
        with self._lock:
            return self._state.next_seq

    def ids_of(self, topic: str, *, before_seq: int) -> Iterator[list[str]]:
        """The ids of a topic's scheduled messages whose numbers are lower, some at a time.

        Whoever takes some may cancel them before asking for more. What moves to another bucket meanwhile may be passed
        over.
        """
        with self._lock:
            entries = [one.id for one in self._state.pending.values() if one.topic == topic and one.seq < before_seq]
            runs = [
                run.id
                for bucket in self._state.buckets.values()
                for run in bucket.runs.values()
                if run.taken < run.count and run.topic in {None, topic}
            ]
        pages = [entries[start : start + _PAGE] for start in range(0, len(entries), _PAGE)]
        for page in chain(pages, (self._ids_in(run_id, topic, before_seq=before_seq) for run_id in runs)):
            if page:
                yield page

    def _ids_in(self, run_id: int, topic: str, *, before_seq: int) -> list[str]:
        """The ids of a topic's messages that wait in a run; none of one that is gone."""
        with self._lock:
            if run_id not in self._state.bucket_of:
                return []
            run = self._state.run(run_id)[1]
            try:
                columns = self._columns_of(run)
                number = None if columns is None else _number(columns, topic)
                if columns is None or number is None:
                    return []
                found = [
                    index
                    for index in range(run.taken, run.count)
                    if columns.topic[index] == number and columns.seq[index] < before_seq and not run.is_gone(index)
                ]
                ids = self._reader.messages(run).ids if found else []
            except RunDamaged as damage:
                self._set_aside(damage)
                return self._ids_in(run_id, topic, before_seq=before_seq)
            return [ids[index] for index in found]

    def histogram(self, *, topic: str | None, from_ms: int, to_ms: int, bucket_ms: int) -> list[tuple[int, int]]:
        """(start, how many are due in it) for each `bucket_ms` of [from_ms, to_ms) in which any are.

        Reads columns, no messages, and holds up nothing meanwhile: what fires while it reads may be counted or not.
        """
        counts: Counter[int] = Counter()
        with self._lock:
            for entry in self._state.pending.values():
                if from_ms <= entry.due_ms < to_ms and topic in {None, entry.topic}:
                    counts[entry.due_ms // bucket_ms] += 1
            places = [
                (bucket.segment, run)
                for bucket in self._state.buckets.values()
                for run in bucket.runs.values()
                if run.taken < run.count and run.first_due_ms < to_ms and run.last_due_ms >= from_ms
            ]
        for segment, run in places:
            counts.update(
                due_ms // bucket_ms for due_ms in self._dues(segment, run, topic) if from_ms <= due_ms < to_ms
            )
        return [(number * bucket_ms, count) for number, count in sorted(counts.items())]

    def due_within(self, spans_ms: Sequence[int], *, now_ms: int) -> list[int]:
        """How many are due within each span from now, which ascend; and last, how many there are.

        Of the runs only those are read that go across the end of a span.
        """
        ends_ms = [now_ms + span_ms for span_ms in spans_ms]
        counts = [0] * (len(ends_ms) + 1)
        crossing: list[tuple[str, SortedRun]] = []
        with self._lock:
            dues_ms = [entry.due_ms for entry in self._state.pending.values()]
            for bucket in self._state.buckets.values():
                for run in bucket.runs.values():
                    place = bisect_left(ends_ms, run.first_due_ms)
                    if place == bisect_left(ends_ms, run.last_due_ms):
                        counts[place] += run.waiting()
                    else:
                        crossing.append((bucket.segment, run))
        in_runs = (self._dues(segment, run, None) for segment, run in crossing)
        for due_ms in chain(dues_ms, chain.from_iterable(in_runs)):
            counts[bisect_left(ends_ms, due_ms)] += 1
        return list(accumulate(counts))

    def next_due_ms(self) -> int | None:
        """A time before which nothing is due; None where nothing is scheduled."""
        with self._lock:
            times = [self._wheel.next_due_ms(), self._far_first_ms]
            times += [one.first_due_ms() for one in self._state.buckets.values() if one.id not in self._opened]
            return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def figures(self) -> dict[str, int]:
        """Sizes, for operators."""
        with self._lock:
            runs = [run for bucket in self._state.buckets.values() for run in bucket.runs.values()]
            return {
                "scheduled": self._state.topics.total(),
                "buckets": len(self._state.buckets),
                "runs": len(runs),
                "in_memory": len(self._state.pending),
                "in_memory_bytes": self._state.pending_bytes,
                "handed_out": len(self._state.hand_outs),
                "id_index_pieces": len(self._state.index),
                "cancels_remembered": len(self._state.canceled),
                "quarantined_runs": sum(len(bucket.quarantined) for bucket in self._state.buckets.values()),
                "quarantined_messages": sum(run.lost_count() for run in runs),
                "log_bytes": self._log.place[1],
            }

    def _dues(self, segment: str, run: SortedRun, topic: str | None) -> Iterator[int]:
        try:
            columns = self._reader.read_columns(segment, run)
        except StorageFailed:  # its bucket was dropped meanwhile
            return
        except RunDamaged as damage:
            self._set_aside(damage)
            return
        number = None if topic is None else _number(columns, topic)
        if topic is not None and number is None:
            return
        for index in range(run.taken, run.count):
            if (number is None or columns.topic[index] == number) and not run.is_gone(index):
                yield columns.due[index]

    def _places(
        self, message_id: str, covered: Covered, *, canceled: set[str]
    ) -> tuple[dict[str, list[Standing | None]], set[int]]:
        """Where messages of this id are on topics of a scope, or were, by topic (None: in memory); and the hashes of
        the topics of those that have fired, perhaps on others. `canceled`: topics on which it is known to be.
        """
        state, scope = self._state, covered.scope
        places: dict[str, list[Standing | None]] = {}
        fired: set[int] = set()
        for near in state.known.of_id(message_id):
            if not covers(scope, near.topic):
                continue
            if near.seq in state.pending:
                places[near.topic] = [None]
            elif near.seq in state.passed:
                fired.add(topic_hash(near.topic) if near.topic else UNKNOWN_TOPIC)
        known = canceled.union(places)
        if state.canceled.awaits(message_id, scope) or ((known or fired) and not covered.may_wait(known)):
            return places, fired
        standing, fired_long_ago = self._standing(message_id)
        for one in standing:
            if covers(scope, one.topic):
                places.setdefault(one.topic, []).append(one)
        return places, fired | fired_long_ago

    def _standing(self, message_id: str) -> tuple[list[Standing], set[int]]:
        """Where messages of this id stand in buckets; and the hashes of the topics of those that have fired.

        The index tells a hash's due times; the message itself proves that it is the one. One that is damaged is
        neither: nobody can tell what it was.
        """
        found: list[Standing] = []
        fired: set[int] = set()
        for due_ms, seq, topic in self._index.find(id_hashes([message_id])[0]):
            try:
                standing = self._look_up(message_id, (due_ms, seq))
            except RunDamaged as damage:
                self._set_aside(damage)
                return self._standing(message_id)
            if standing is None:
                fired.add(topic)
            elif standing.run.id:
                found.append(standing)
        return found, fired

    def _look_up(self, message_id: str, key: tuple[int, int]) -> Standing | None:
        """The message of this (due, seq), where it waits; None where it has fired. Coarsest bucket first."""
        is_lost = False
        for bucket_id in candidates(key[0]):
            bucket = self._state.buckets.get(bucket_id)
            for run in bucket.runs.values() if bucket else ():
                if not run.may_hold(key) or (run.taken == run.count and run.lost is None):
                    continue
                columns = self._columns_of(run)
                index = None if columns is None else columns.index_of(*key)
                is_lost = is_lost or columns is None or (index is not None and run.is_lost(index))
                if columns is not None and index is not None and index >= run.taken and not run.is_lost(index):
                    topic = columns.topics[columns.topic[index]]
                    is_it = self._reader.messages(run).ids[index] == message_id
                    return Standing(run, index, topic, key[0]) if is_it else _NOT_IT
        return _NOT_IT if is_lost else None

    def _columns_of(self, run: SortedRun) -> Columns | None:
        """A run's columns; None where they are damaged, and it is set aside already."""
        try:
            return self._reader.columns(run)
        except RunDamaged:
            if not run.is_unreadable:
                raise
            return None


_NOT_IT: Final = Standing(
    SortedRun(
        id=0, position=0, columns_bytes=0, messages_position=0, messages_bytes=0, count=0, first_due_ms=0,
        first_seq=0, last_due_ms=0, last_seq=0,
    ), 0, "", 0,
)  # fmt: skip
"""Says that another id has the same hash, or that the message is damaged: it neither fired nor can it be canceled."""


def _number(columns: Columns, topic: str) -> int | None:
    return columns.topics.index(topic) if topic in columns.topics else None
