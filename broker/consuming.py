"""Consuming: messages out to groups, and what becomes of each hand-out. What is decided is consume.group's."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from broker.consume.group import Death, Group, Requeue
from broker.consume.receipt import Receipt
from broker.consume.topic import HOLE
from broker.state import Topic
from broker.timing import Timing
from messaging import journal
from messaging.errors import InvalidMessage, StorageFailed
from messaging.limits import (
    DELAY_MAX_MS,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    PULL_MESSAGES_MAX,
    PULL_WAIT_MS_MAX,
    REASON_CHARS_MAX,
)
from messaging.message import AckStatus, Delivery, ExtendStatus, NackStatus, check_group, check_topic

logger = logging.getLogger(__name__)

_PASSES_MAX: Final = 1_000
DAMAGED: Final = "its record in the message log is damaged"


class Consuming(Timing):
    """The consumer's half of the engine."""

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = 30_000,
        consumer: str | None = None,
    ) -> list[Delivery]:
        """Hand out what is ready, waiting up to `wait_ms` for the first message.

        An unknown group starts at the earliest.
        """
        check_topic(topic)
        check_group(group)
        _check_within("max_messages", max_messages, 1, PULL_MESSAGES_MAX)
        _check_within("wait_ms", wait_ms, 0, PULL_WAIT_MS_MAX)
        _check_within("invisible_ms", invisible_ms, INVISIBLE_MS_MIN, INVISIBLE_MS_MAX)
        deadline_ms = self._clock.monotonic_ms() + wait_ms
        arrived = threading.Condition()
        woken = False

        def wake() -> None:
            nonlocal woken
            with arrived:
                woken = True
                arrived.notify_all()

        unsubscribe = self.subscribe(topic, group, wake) if wait_ms else None
        try:
            while True:
                woken = False
                found = self._take(
                    topic, group, max_messages=max_messages, invisible_ms=invisible_ms, consumer=consumer
                )
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if found or left_ms <= 0 or self._closed:
                    return found
                with arrived:
                    if not woken:
                        self._clock.wait(arrived, left_ms)
        finally:
            if unsubscribe is not None:
                unsubscribe()

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries, durably."""
        statuses = [AckStatus.UNKNOWN] * len(receipts)
        with self._lock:
            self._refuse_if_closed()
            for (topic, name), places in _by_group(receipts).items():
                group = self._state.group(topic, name)
                if group is None:
                    continue
                entries: dict[int, str] = {}
                for number, receipt in places:
                    status = group.ack_status(receipt.sequence, delivery=receipt.delivery, life=receipt.life)
                    if status is AckStatus.ACKED:
                        if receipt.sequence in entries:
                            status = AckStatus.ALREADY_ACKED
                        entries[receipt.sequence] = group.unsettled[receipt.sequence].message_id
                    statuses[number] = status
                if entries:
                    self._act(
                        journal.Acked(
                            topic=topic, group=name, at_ms=self._clock.now_ms(), entries=list(entries.items())
                        )
                    )
                    self._state.counters["acknowledged", topic, name] += len(entries)
            end = self._actions.end
        self._actions.commit(end)
        return statuses

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back, durably; after the last attempt that counts, into the dead letters in the same
        write.
        """
        _check_within("delay_ms", delay_ms or 0, 0, DELAY_MAX_MS)
        statuses = [NackStatus.STALE] * len(receipts)
        reason = reason[:REASON_CHARS_MAX] if reason else None
        with self._lock:
            self._refuse_if_closed()
            now_ms = self._clock.now_ms()
            for (topic, name), places in _by_group(receipts).items():
                group = self._state.group(topic, name)
                if group is None:
                    continue
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
            end = self._actions.end
            self._changed.notify_all()
        self._actions.commit(end)
        return statuses

    def extend(self, receipts: Sequence[str], *, invisible_ms: int) -> list[ExtendStatus]:
        """Keep deliveries invisible for `invisible_ms` from now; written, like a hand-out, but not synced."""
        _check_within("invisible_ms", invisible_ms, INVISIBLE_MS_MIN, INVISIBLE_MS_MAX)
        statuses = [ExtendStatus.STALE] * len(receipts)
        with self._lock:
            self._refuse_if_closed()
            now_ms = self._clock.now_ms()
            for (topic, name), places in _by_group(receipts).items():
                group = self._state.group(topic, name)
                if group is None:
                    continue
                held = [(number, receipt) for number, receipt in places if _holds(group, receipt)]
                for number, _ in held:
                    statuses[number] = ExtendStatus.EXTENDED
                entries = [(one.sequence, group.unsettled[one.sequence].message_id) for _, one in held]
                if entries:
                    self._act(
                        journal.Extended(
                            topic=topic, group=name, at_ms=now_ms, visible_at_ms=now_ms + invisible_ms, entries=entries
                        )
                    )
        return statuses

    def _take(
        self, topic: str, group: str, *, max_messages: int, invisible_ms: int, consumer: str | None
    ) -> list[Delivery]:
        with self._lock:
            self._refuse_if_closed()
            self._fire_due()
            now_ms = self._clock.now_ms()
            found_topic, found = self._open_group(topic, group)
            if found.paused:
                return []
            records = self._choose(found_topic, found, now_ms=now_ms, count_max=max_messages)
            if not records:
                return []
            visible_at_ms = now_ms + invisible_ms
            handed = found.hand_out(
                [(sequence, record.id) for sequence, record in records], visible_at_ms=visible_at_ms
            )
            entries = [
                (one.sequence, record.id, one.delivery, one.attempt)
                for one, (_, record) in zip(handed, records, strict=True)
            ]
            self._write_hand_out(
                found,
                journal.Delivered(
                    topic=topic, group=group, at_ms=now_ms, visible_at_ms=visible_at_ms, entries=entries,
                    consumer=consumer,
                ),
            )  # fmt: skip
            self._state.counters["delivered", topic, group] += len(handed)
            self._state.counters["redelivered", topic, group] += sum(one.delivery > 1 for one in handed)
        return [
            Delivery(
                receipt=str(Receipt(topic, group, one.sequence, one.delivery, one.life)), id=record.id, topic=topic,
                body=record.body, key=record.key, headers=record.headers, attempt=one.attempt,
                created_at_ms=record.created_at_ms, deliver_at_ms=record.deliver_at_ms,
            )
            for one, (_, record) in zip(handed, records, strict=True)
        ]  # fmt: skip

    def _choose(
        self, topic: Topic, group: Group, *, now_ms: int, count_max: int
    ) -> list[tuple[int, journal.MessageRecord]]:
        """What to hand out now. A pass that finds nothing but dead, damaged or early messages is followed by another:
        nobody would wake a consumer for what lies behind them.
        """
        for _ in range(_PASSES_MAX):
            sequences, deaths = group.visible_again(now_ms=now_ms, count_max=count_max)
            if deaths:
                self._bury(topic.index.name, group, deaths, at_ms=now_ms)
                continue
            sequences += self._fresh(topic, group, count_max=count_max - len(sequences))
            records = self._read(topic, group, sequences, now_ms=now_ms, count_max=count_max)
            if records or not sequences:
                return records
            if group.accepts is not None:
                self._wake(topic.index.name, group.name)  # to look on, once others have had the lock
                return []
        return []

    def _fresh(self, topic: Topic, group: Group, *, count_max: int) -> list[int]:
        if group.accepts is not None and count_max:
            count_max = max(count_max, self._options.filter_scan_max)
        end = topic.index.visible_end(group.position, count_max=count_max, durable_end=self._messages.durable_end)
        return list(range(group.position, end))

    def _read(
        self, topic: Topic, group: Group, sequences: Iterable[int], *, now_ms: int, count_max: int
    ) -> list[tuple[int, journal.MessageRecord]]:
        """The records, up to the first that is not to be handed out; such ones at the head are put aside.

        What the filter does not take is passed over: at the head by moving the position, behind a record by that
        record's hand-out or, if it is the last, by the next pull. Putting aside moves the group's position in the
        action log, so never before what precedes has been written.
        """
        records: list[tuple[int, journal.MessageRecord]] = []
        read_bytes = 0
        for sequence in sequences:
            if read_bytes > self._options.pull_bytes_max or len(records) == count_max:
                break
            offset = topic.index.offset(sequence)
            record = None if offset == HOLE else self._record_at(offset)
            if record is not None and not _is_wanted(group, sequence, record):
                read_bytes += len(record.body)
                if not records:
                    group.skip(sequence)
            elif record is not None and (record.deliver_at_ms or 0) <= now_ms:
                records.append((sequence, record))
                read_bytes += len(record.body)
            elif records:
                break
            elif offset == HOLE:
                group.skip(sequence)
            else:
                self._put_aside(topic.index.name, group, sequence, record, at_ms=now_ms)
        return records

    def _record_at(self, offset: int) -> journal.MessageRecord | None:
        try:
            return journal.decode_message(self._messages.read(offset))
        except (journal.SegmentDamaged, ValueError):
            return None

    def _put_aside(
        self, topic: str, group: Group, sequence: int, record: journal.MessageRecord | None, *, at_ms: int
    ) -> None:
        """A damaged record becomes a dead letter rather than stop its group; one that is early, because the wall clock
        stepped back after it fell due, waits for its time.
        """
        known = group.unsettled.get(sequence)
        if record is None:
            logger.error("record_quarantined", extra={"topic": topic, "sequence": sequence})
            death = Death(sequence, known.message_id if known else "", 0, DAMAGED)
            self._bury(topic, group, [death], at_ms=at_ms)
        else:
            hold = group.decide_hold(sequence, record.id, until_ms=record.deliver_at_ms or 0)
            self._requeue(topic, group.name, [hold], at_ms=at_ms, reason=known.reason if known else None)

    def _write_hand_out(self, group: Group, delivered: journal.Delivered) -> None:
        try:
            self._actions.append([journal.encode_record(delivered)])
        except StorageFailed:
            for sequence, message_id, _, attempt in delivered.entries:
                group.requeue(Requeue(sequence, message_id, delivered.at_ms, attempt - 1), reason=None)
            raise

    def _requeue(
        self, topic: str, group: str, decisions: Iterable[Requeue | Death], *, at_ms: int, reason: str | None
    ) -> None:
        entries = [
            (one.sequence, one.message_id, one.visible_at_ms, one.attempts_used)
            for one in decisions
            if isinstance(one, Requeue)
        ]
        if entries:
            self._act(journal.Requeued(topic=topic, group=group, at_ms=at_ms, entries=entries, reason=reason))


def _by_group(receipts: Sequence[str]) -> dict[tuple[str, str], list[tuple[int, Receipt]]]:
    """The receipts that are ours, with their places in the request, by (topic, group)."""
    found: defaultdict[tuple[str, str], list[tuple[int, Receipt]]] = defaultdict(list)
    for number, text in enumerate(receipts):
        receipt = Receipt.parse(text)
        if receipt is not None:
            found[receipt.topic, receipt.group].append((number, receipt))
    return found


def _check_within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidMessage(f"{name} must be from {low:,} to {high:,}, not {value:,}")


def _is_wanted(group: Group, sequence: int, record: journal.MessageRecord) -> bool:
    """Whether the group's filter takes a message; what was handed out before is the group's, whatever its filter."""
    return group.accepts is None or sequence in group.unsettled or group.accepts(record.headers)


def _holds(group: Group, receipt: Receipt) -> bool:
    return group.holds(receipt.sequence, delivery=receipt.delivery, life=receipt.life)
