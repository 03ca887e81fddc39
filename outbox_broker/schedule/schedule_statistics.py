"""Counts what is scheduled, by topic and by due time. Changes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.sorted_run import SortedRun, topic_number
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_core.common.errors import StorageFailed


class ScheduleStatistics:
    """Counts, available at any time."""

    def __init__(self, context: ScheduleContext, horizon: DueSoon) -> None:
        self._context = context
        self._horizon = horizon

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
        return [(number * bucket_ms, count) for number, count in sorted(counts.items())]

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
