"""Consuming: what becomes of each hand-out, by acknowledgement or without. What is decided is consume.group's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from broker.at_hand import AtHand
from broker.consume.group import Death, Group, Requeue
from broker.consume.receipt import Receipt, ReceiptRun, runs_of
from broker.pulling import check_within
from messaging import journal
from messaging.limits import (
    DELAY_MAX_MS,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    REASON_CHARS_MAX,
)
from messaging.message import AckStatus, ExtendStatus, NackStatus


class Consuming(AtHand):
    """The consumer's half of the engine."""

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries, durably."""
        statuses = [AckStatus.UNKNOWN] * len(receipts)
        with self._lock:
            self._refuse_if_closed()
            for (topic, name), runs in _by_group(receipts).items():
                group = self._state.group(topic, name)
                if group is not None:
                    self._settle(topic, group, _decide_acks(group, runs, statuses))
            end = self._actions.end
        self._actions.commit(end)
        return statuses

    def _settle(self, topic: str, group: Group, ranges: Sequence[tuple[int, int]]) -> None:
        if ranges:
            runs = [(first, group.ids(first, end)) for first, end in ranges]
            self._act(journal.Settled(topic=topic, group=group.name, at_ms=self._clock.now_ms(), runs=runs))
            self._state.counters["acknowledged", topic, group.name] += sum(len(ids) for _, ids in runs)
            self._wake_next(topic, group)

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back, durably; after the last attempt that counts, into the dead letters in the same
        write.
        """
        check_within("delay_ms", delay_ms or 0, 0, DELAY_MAX_MS)
        statuses = [NackStatus.STALE] * len(receipts)
        reason = reason[:REASON_CHARS_MAX] if reason else None
        with self._lock:
            self._refuse_if_closed()
            now_ms = self._clock.now_ms()
            for (topic, name), runs in _by_group(receipts).items():
                group = self._state.group(topic, name)
                if group is None:
                    continue
                places = _one_by_one(runs)
                decisions: dict[int, Requeue | Death] = {}
                for number, receipt in places:
                    if receipt.sequence in decisions or not _holds(group, receipt):
                        continue
                    decision = group.decide_nack(
                        receipt.sequence, now_ms=now_ms, delay_ms=delay_ms, reason=reason, counts=counts
                    )
                    decisions[receipt.sequence] = decision
                    statuses[number] = NackStatus.DEAD if isinstance(decision, Death) else NackStatus.REQUEUED
                self._requeue(topic, name, decisions.values(), at_ms=now_ms, reason=reason)
                deaths = [one for one in decisions.values() if isinstance(one, Death)]
                self._bury(topic, group, deaths, at_ms=now_ms)
                if decisions:
                    self._wake_short()
            end = self._actions.end
            self._changed.notify_all()
        self._actions.commit(end)
        return statuses

    def extend(self, receipts: Sequence[str], *, invisible_ms: int) -> list[ExtendStatus]:
        """Keep deliveries invisible for `invisible_ms` from now; written, like a hand-out, but not synced."""
        check_within("invisible_ms", invisible_ms, INVISIBLE_MS_MIN, INVISIBLE_MS_MAX)
        statuses = [ExtendStatus.STALE] * len(receipts)
        with self._lock:
            self._refuse_if_closed()
            now_ms = self._clock.now_ms()
            for (topic, name), runs in _by_group(receipts).items():
                group = self._state.group(topic, name)
                if group is None:
                    continue
                held = [(number, receipt) for number, receipt in _one_by_one(runs) if _holds(group, receipt)]
                for number, _ in held:
                    statuses[number] = ExtendStatus.EXTENDED
                entries = [(one.sequence, group.ids(one.sequence, one.sequence + 1)[0]) for _, one in held]
                if entries:
                    self._act(
                        journal.Extended(
                            topic=topic, group=name, at_ms=now_ms, visible_at_ms=now_ms + invisible_ms, entries=entries
                        )
                    )
        return statuses


def _by_group(receipts: Sequence[str]) -> dict[tuple[str, str], list[ReceiptRun]]:
    """The receipts that are ours, as runs, by (topic, group)."""
    found: defaultdict[tuple[str, str], list[ReceiptRun]] = defaultdict(list)
    for run in runs_of(receipts):
        found[run.topic, run.group].append(run)
    return found


def _one_by_one(runs: Sequence[ReceiptRun]) -> list[tuple[int, Receipt]]:
    """The receipts of runs, with their places in the request."""
    return [
        (run.place + number, Receipt(run.topic, run.group, run.first + number, run.delivery, run.life))
        for run in runs
        for number in range(run.count)
    ]


def _decide_acks(group: Group, runs: Sequence[ReceiptRun], statuses: list[AckStatus]) -> list[tuple[int, int]]:
    """Tell each receipt's status; returns the ranges of sequences to settle. A range is one look-up where it can be."""
    ranges: list[tuple[int, int]] = []
    for run in runs:
        known = any(first < run.end and run.first < end for first, end in ranges)
        if not known and group.unsettled.covers(run.first, run.end, delivery=run.delivery, life=run.life):
            ranges.append((run.first, run.end))
            statuses[run.place : run.place + run.count] = [AckStatus.ACKED] * run.count
            continue
        for place, receipt in _one_by_one([run]):
            status = group.ack_status(receipt.sequence, delivery=receipt.delivery, life=receipt.life)
            if status is AckStatus.ACKED:
                if any(first <= receipt.sequence < end for first, end in ranges):
                    status = AckStatus.ALREADY_ACKED
                else:
                    ranges.append((receipt.sequence, receipt.sequence + 1))
            statuses[place] = status
    return ranges


def _holds(group: Group, receipt: Receipt) -> bool:
    return group.holds(receipt.sequence, delivery=receipt.delivery, life=receipt.life)
