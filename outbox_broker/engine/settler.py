"""Settles deliveries: acknowledge, nack, extend. The group decides (consumer_group), this records the result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_writer import DeadLetterWriter
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.puller import Puller, check_within
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.group.consumer_group import Death, Group, Requeue
from outbox_broker.group.receipt import ReceiptRun, runs_of
from outbox_core.journal import journal
from outbox_core.messages.limits import (
    DELAY_MAX_MS,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    REASON_CHARS_MAX,
)
from outbox_core.messages.message import AckStatus, ExtendStatus, NackStatus

Status = TypeVar("Status", AckStatus, NackStatus, ExtendStatus)


class Settler:
    """The consumer's operations on deliveries."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, dead_letters: DeadLetterWriter,
        puller: Puller,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._lock = context.lock
        self._state = context.state
        self._writer = writer
        self._wakeups = wakeups
        self._dead_letters = dead_letters
        self._puller = puller

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Acknowledge deliveries, durably."""
        statuses = [AckStatus.UNKNOWN] * len(receipts)
        with self._lock:
            self._context.refuse_if_closed()
            for (topic, name), runs in self._by_group(receipts, statuses, stale=AckStatus.STALE).items():
                group = self._state.group(topic, name)
                if group is not None:
                    self._settle(topic, group, _decide_acks(group, runs, statuses))
            end = self._context.actions.end
        self._context.actions.commit(end)
        return statuses

    def _settle(self, topic: str, group: Group, ranges: Sequence[tuple[int, int]]) -> None:
        if ranges:
            runs: list[tuple[int, int]] = [(first, end - first) for first, end in ranges]
            self._writer.act(journal.Settled(topic=topic, group=group.name, at_ms=self._clock.now_ms(), runs=runs))
            self._state.counters["acknowledged", topic, group.name] += sum(end - first for first, end in ranges)
            self._wakeups.wake_next(topic, group)

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Return deliveries, durably; after the last counted attempt they become dead letters in the same write."""
        check_within("delay_ms", delay_ms or 0, 0, DELAY_MAX_MS)
        statuses = [NackStatus.STALE] * len(receipts)
        reason = reason[:REASON_CHARS_MAX] if reason else None
        with self._lock:
            self._context.refuse_if_closed()
            now_ms = self._clock.now_ms()
            for (topic, name), runs in self._by_group(receipts, statuses, stale=NackStatus.STALE).items():
                group = self._state.group(topic, name)
                if group is None:
                    continue
                decisions: list[Requeue | Death] = []
                for index, first, end in _in_flight_runs(group, runs):
                    decision = group.decide_nack(
                        first, end - first, now_ms=now_ms, delay_ms=delay_ms, reason=reason, counts=counts
                    )
                    decisions.append(decision)
                    status = NackStatus.DEAD if isinstance(decision, Death) else NackStatus.REQUEUED
                    statuses[index : index + end - first] = [status] * (end - first)
                self._puller.requeue(topic, name, decisions, at_ms=now_ms, reason=reason)
                deaths = [decision for decision in decisions if isinstance(decision, Death)]
                self._dead_letters.bury(topic, group, deaths, at_ms=now_ms)
                if decisions:
                    self._wakeups.wake_short()
            end = self._context.actions.end
            self._wakeups.changed.notify_all()
        self._context.actions.commit(end)
        return statuses

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Keep deliveries invisible for `invisible_ms` from now; written, like a delivery, but not synced. `begun`: the
        consumer begins to handle them, so an invisible time that runs out is an attempt.
        """
        check_within("invisible_ms", invisible_ms, INVISIBLE_MS_MIN, INVISIBLE_MS_MAX)
        statuses = [ExtendStatus.STALE] * len(receipts)
        with self._lock:
            self._context.refuse_if_closed()
            now_ms = self._clock.now_ms()
            for (topic, name), runs in self._by_group(receipts, statuses, stale=ExtendStatus.STALE).items():
                group = self._state.group(topic, name)
                if group is None:
                    continue
                entries: list[tuple[int, int]] = []
                for index, first, end in _in_flight_runs(group, runs, repeats=True):
                    statuses[index : index + end - first] = [ExtendStatus.EXTENDED] * (end - first)
                    entries.append((first, end - first))
                if entries:
                    self._writer.act(
                        journal.Extended(
                            topic=topic,
                            group=name,
                            at_ms=now_ms,
                            visible_at_ms=now_ms + invisible_ms,
                            entries=entries,
                            begun=begun,
                        )
                    )
        return statuses

    def _by_group(
        self, receipts: Sequence[str], statuses: list[Status], *, stale: Status
    ) -> dict[tuple[str, str], list[ReceiptRun]]:
        """Groups valid receipts into runs, by (topic, group). Those of before a restore are stale: the broker that was
        backed up may have given the same ones in its later life, for other messages.
        """
        runs_by_group: defaultdict[tuple[str, str], list[ReceiptRun]] = defaultdict(list)
        for run in runs_of(receipts):
            if run.delivery < self._context.receipts_from:
                statuses[run.index : run.index + run.count] = [stale] * run.count
            else:
                runs_by_group[run.topic, run.group].append(run)
        return runs_by_group


def _in_flight_runs(
    group: Group, runs: Sequence[ReceiptRun], *, repeats: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yields the deliveries that these receipts hold, as runs with equal attributes: (index in the request, first,
    end).

    Each message once, unless `repeats` is set.
    """
    seen: set[int] = set()
    for run in runs:
        for first, end in group.in_flight_of(run.first, run.end, delivery=run.delivery, generation=run.generation):
            index = run.index + first - run.first
            sequences = range(first, end)
            if repeats or seen.isdisjoint(sequences):
                yield index, first, end
            else:
                yield from (
                    (index + sequence - first, sequence, sequence + 1) for sequence in sequences if sequence not in seen
                )
            if len(runs) > 1:
                seen.update(sequences)


def _decide_acks(group: Group, runs: Sequence[ReceiptRun], statuses: list[AckStatus]) -> list[tuple[int, int]]:
    """Set each receipt's status; returns the ranges of sequences to settle. A range takes one lookup if possible."""
    ranges: list[tuple[int, int]] = []
    seen: set[int] = set()
    for run in runs:
        sequences = range(run.first, run.end)
        if seen.isdisjoint(sequences) and group.unsettled.covers(
            run.first, run.end, delivery=run.delivery, generation=run.generation
        ):
            statuses[run.index : run.index + run.count] = [AckStatus.ACKED] * run.count
            _add(ranges, run.first, run.end)
            if len(runs) > 1:
                seen.update(sequences)
            continue
        for index, sequence in enumerate(sequences, run.index):
            status = group.ack_status(sequence, delivery=run.delivery, generation=run.generation)
            if status is AckStatus.ACKED and sequence in seen:
                status = AckStatus.ALREADY_ACKED
            elif status is AckStatus.ACKED:
                seen.add(sequence)
                _add(ranges, sequence, sequence + 1)
            statuses[index] = status
    return ranges


def _add(ranges: list[tuple[int, int]], first: int, end: int) -> None:
    """Append a range, merging it with the last one if they are contiguous."""
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((first, end))
