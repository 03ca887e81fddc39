"""The broker's engine: messages in, deliveries out, everything durable in one data folder. It knows nothing of HTTP.

A publish: checked -> appended to the message log -> synced (callers share a sync) -> answered. A pull: chosen by the
group -> written to the action log -> read from the message log -> handed out. A settlement: decided by the group ->
appended to the action log -> synced -> answered. Whatever is in memory is rebuilt from the two logs on opening.

A hand-out is written but not synced: after a power cut it may be forgotten, and its messages are handed out again; its
receipts then name a delivery that is not the newest one, or has not been made, and settle nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from broker.consume.group import Death, Group, Requeue
from broker.consume.receipt import Receipt
from broker.consume.topic import HOLE
from broker.log.folder_lock import FolderLock
from broker.log.segmented_log import SegmentedLog
from broker.log.storage import DiskStorage, Storage
from broker.options import EngineOptions
from broker.state import BrokerState, Topic, settings_of
from messaging import journal
from messaging.clock import Clock, SystemClock
from messaging.errors import InvalidMessage, NotSupported, OutboxError, StorageFailed
from messaging.limits import (
    DELAY_MAX_MS,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    PULL_MESSAGES_MAX,
    PULL_WAIT_MS_MAX,
    REASON_CHARS_MAX,
)
from messaging.message import (
    AckStatus,
    CancelStatus,
    DeadLetter,
    Delivery,
    ExtendStatus,
    GroupConfig,
    Message,
    NackStatus,
    PublishResult,
    PublishStatus,
    check_group,
    check_topic,
)

logger = logging.getLogger(__name__)

BUCKETS_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_DAMAGED: Final = "its record in the message log is damaged"


class Engine:
    """One broker on one data folder. All methods may be called from any thread.

    Errors: InvalidMessage (a name or value out of bounds), NotSupported, StorageFailed (nothing was acknowledged).
    """

    def __init__(self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage) -> None:
        """For open(), which is how an engine is made."""
        self._clock = clock
        self._options = options
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiters: defaultdict[tuple[str, str], set[Callable[[], None]]] = defaultdict(set)
        self._state = BrokerState(options)
        self._folder_lock = FolderLock(folder)
        self._closed = False
        self._messages, self._actions = (
            SegmentedLog(
                folder / name, kind=kind, segment_bytes=options.segment_bytes, durability=options.durability,
                storage=storage, now_ms=clock.now_ms,
            )
            for name, kind in (("messages", journal.SegmentKind.MESSAGES), ("actions", journal.SegmentKind.ACTIONS))
        )  # fmt: skip
        self._timer = threading.Thread(target=self._run_timer, name="broker-timer", daemon=True)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        clock: Clock | None = None,
        options: EngineOptions | None = None,
        storage: Storage | None = None,
    ) -> Self:
        """Open a data folder, made where it is missing: take its lock, replay its logs, start the timer.

        Raises ConfigurationError when another process has the folder, StorageFailed, or SegmentDamaged.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageFailed(f"cannot make the data folder {folder}: {error.strerror}") from error
        engine = cls(
            folder, clock=clock or SystemClock(), options=options or EngineOptions(), storage=storage or DiskStorage()
        )
        engine._folder_lock.acquire()
        try:
            engine._recover()
        except BaseException:
            engine._folder_lock.release()
            raise
        engine._timer.start()
        return engine

    def close(self, *, timeout_ms: int = 10_000) -> None:
        """Stop the timer, sync, let go of the folder; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            wakes = [wake for group in self._waiters.values() for wake in group]
        for wake in wakes:
            wake()
        self._timer.join(timeout_ms / 1000)
        with self._lock:
            try:
                self._messages.close()
                self._actions.close()
            finally:
                self._folder_lock.release()

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch; one result a message, in order, once all that is stored is durable."""
        with self._lock:
            self._refuse_if_closed()
            results, topics = self._append(batch)
            end = self._messages.end
        self._messages.commit(end)
        for topic in topics:
            self._wake_topic(topic)
        with self._changed:
            self._changed.notify_all()
        return results

    def _append(self, batch: Sequence[Message]) -> tuple[list[PublishResult], set[str]]:
        now_ms = self._clock.now_ms()
        results: list[PublishResult] = []
        records: list[journal.MessageRecord] = []
        fresh: defaultdict[str, int] = defaultdict(int)
        seen: set[str] = set()
        for message in batch:
            problem = self._problem(message, now_ms=now_ms)
            if problem is not None:
                results.append(PublishResult(message.id, PublishStatus.REJECTED, problem))
            elif message.id in self._state.recent or message.id in seen:
                results.append(PublishResult(message.id, PublishStatus.DUPLICATE))
            else:
                seen.add(message.id)
                results.append(PublishResult(message.id, PublishStatus.STORED))
                records.append(self._record(message, now_ms=now_ms, fresh=fresh))
        if records:
            offsets = self._messages.append([journal.encode_record(record) for record in records])
            for record, offset in zip(records, offsets, strict=True):
                self._state.replay_message(record, offset)
                if record.id in self._state.canceled:
                    self._state.schedule.remove(record.id)
        self._count_published(results, batch)
        return results, set(fresh)

    def _record(self, message: Message, *, now_ms: int, fresh: defaultdict[str, int]) -> journal.MessageRecord:
        """The record of a message; one that was canceled before it came is stored, but takes no place in its topic."""
        later = message.deliver_at_ms is not None and message.deliver_at_ms > now_ms
        sequence = None
        if not later and message.id not in self._state.canceled:
            sequence = len(self._state.topic(message.topic).index) + fresh[message.topic]
            fresh[message.topic] += 1
        return journal.MessageRecord(
            sequence=sequence, id=message.id, topic=message.topic, key=message.key, headers=dict(message.headers),
            body=message.body, created_at_ms=message.created_at_ms or now_ms, stored_at_ms=now_ms,
            deliver_at_ms=message.deliver_at_ms,
        )  # fmt: skip

    def _problem(self, message: Message, *, now_ms: int) -> str | None:
        if message.deliver_at_ms is not None and message.deliver_at_ms - now_ms > DELAY_MAX_MS:
            return "a delay may be at most 731 days"
        if message.topic not in self._state.topics and len(self._state.topics) >= self._options.topics_max:
            return self._too_many_topics
        return None

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel scheduled messages, durably.

        An unknown id is remembered: should its publish come, it is not delivered.
        """
        with self._lock:
            self._refuse_if_closed()
            self._fire_due()
            statuses = [self._cancel_status(message_id) for message_id in message_ids]
            gone = [
                message_id
                for message_id, status in zip(message_ids, statuses, strict=True)
                if status is not CancelStatus.TOO_LATE and message_id not in self._state.canceled
            ]
            if gone:
                self._act(journal.Canceled(at_ms=self._clock.now_ms(), ids=gone))
            end = self._actions.end
        self._actions.commit(end)
        return statuses

    def _cancel_status(self, message_id: str) -> CancelStatus:
        if message_id in self._state.canceled:
            known = message_id in self._state.recent
            return CancelStatus.CANCELED if known else CancelStatus.UNKNOWN
        if self._state.schedule.find(message_id) is not None:
            return CancelStatus.CANCELED
        return CancelStatus.TOO_LATE if message_id in self._state.recent else CancelStatus.UNKNOWN

    # -- consuming ---------------------------------------------------------------------------------------------------

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

    def subscribe(self, topic: str, group: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called, from any thread, whenever something may have become ready for a group; returns the
        undo.
        """
        place = (topic, group)
        with self._changed:
            self._waiters[place].add(wake)
            self._changed.notify_all()

        def unsubscribe() -> None:
            with self._lock:
                self._waiters[place].discard(wake)
                if not self._waiters[place]:
                    del self._waiters[place]

        return unsubscribe

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
            sequences, deaths = found.visible_again(now_ms=now_ms, count_max=max_messages)
            self._bury(topic, found, deaths, at_ms=now_ms)
            sequences += self._fresh(found_topic, found, count_max=max_messages - len(sequences))
            records = self._read(found_topic, found, sequences)
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

    def _fresh(self, topic: Topic, group: Group, *, count_max: int) -> list[int]:
        end = topic.index.visible_end(group.position, count_max=count_max, durable_end=self._messages.durable_end)
        return list(range(group.position, end))

    def _read(self, topic: Topic, group: Group, sequences: Iterable[int]) -> list[tuple[int, journal.MessageRecord]]:
        """The records; a damaged one becomes a dead letter rather than stop its group, a hole is passed over."""
        records: list[tuple[int, journal.MessageRecord]] = []
        read_bytes = 0
        for sequence in sequences:
            if read_bytes > self._options.pull_bytes_max:
                break
            offset = topic.index.offset(sequence)
            if offset == HOLE:
                group.skip(sequence)
                continue
            try:
                payload = self._messages.read(offset)
                records.append((sequence, journal.decode_message(payload)))
                read_bytes += len(payload)
            except (journal.SegmentDamaged, ValueError):
                logger.exception("record_quarantined", extra={"topic": topic.index.name, "sequence": sequence})
                death = Death(sequence, "", 0, _DAMAGED)
                self._bury(topic.index.name, group, [death], at_ms=self._clock.now_ms())
        return records

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

    # -- groups ------------------------------------------------------------------------------------------------------

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Make a group, or change its settings; a group that is there keeps its position."""
        check_topic(topic)
        check_group(group)
        if config.filter is not None:
            raise NotSupported("this broker does not filter yet; declare the group without a filter")
        if config.ordered:
            raise NotSupported("this broker does not order by key yet; declare the group without ordered")
        with self._lock:
            self._refuse_if_closed()
            self._declare(topic, group, config)
            end = self._actions.end
        self._actions.commit(end)

    def topics(self) -> list[str]:
        """All topics, sorted."""
        with self._lock:
            return sorted(self._state.topics)

    def groups(self, topic: str) -> list[str]:
        """All groups of a topic, sorted."""
        with self._lock:
            return sorted(self._known_topic(topic).groups)

    def group_config(self, topic: str, group: str) -> GroupConfig:
        """A group's settings."""
        with self._lock:
            return self._known_group(topic, group).config

    def topic_figures(self, topic: str) -> Mapping[str, int]:
        """stored (handed to the topic), scheduled."""
        with self._lock:
            known = self._known_topic(topic)
            return {"stored": len(known.index), "scheduled": self._state.schedule.count(topic)}

    def group_figures(self, topic: str, group: str) -> Mapping[str, int]:
        """stored, backlog (not handed out, or waiting again), in_flight, scheduled, dead, position,
        oldest_unacked_age_ms.
        """
        with self._lock:
            index, known = self._known_topic(topic).index, self._known_group(topic, group)
            in_flight = known.in_flight()
            oldest = min(known.unsettled, default=known.position)
            age_ms = self._clock.now_ms() - index.ready_at_ms(oldest) if oldest < len(index) else 0
            return {
                "stored": len(index),
                "backlog": len(index) - min(known.position, len(index)) + len(known.unsettled) - in_flight,
                "in_flight": in_flight,
                "scheduled": self._state.schedule.count(topic),
                "dead": len(known.dead),
                "position": known.position,
                "oldest_unacked_age_ms": max(0, age_ms),
            }

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move a group to a time or to an offset (a sequence of the topic); receipts handed out before are stale."""
        if (to_ms is None) == (to_offset is None) or (to_offset is not None and to_offset < 0):
            raise InvalidMessage("seek to a time (to_ms) or to an offset (to_offset >= 0), one of them")
        with self._lock:
            index, known = self._known_topic(topic).index, self._known_group(topic, group)
            wanted = index.sequence_at(to_ms) if to_ms is not None else to_offset or 0
            position = min(wanted, len(index))
            self._act(
                journal.Sought(
                    topic=topic, group=group, at_ms=self._clock.now_ms(), position=position, life=known.life + 1
                )
            )
            end = self._actions.end
        self._actions.commit(end)
        self._wake(topic, group)

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Stop or resume hand-outs to a group; what is in flight may still be settled."""
        with self._lock:
            self._known_group(topic, group)
            self._act(journal.Paused(topic=topic, group=group, at_ms=self._clock.now_ms(), paused=paused))
            end = self._actions.end
        self._actions.commit(end)
        self._wake(topic, group)

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """One page of dead letters by sequence, and the cursor of the next one."""
        if after is not None and not after.isdigit():
            raise InvalidMessage("after must be the `next` of an earlier page")
        with self._lock:
            known_topic, known = self._known_topic(topic), self._known_group(topic, group)
            self._bury_expired(topic, known)
            behind = -1 if after is None else int(after)
            sequences = sorted(sequence for sequence in known.dead if sequence > behind)
            page = [(sequence, known.dead[sequence]) for sequence in sequences[:limit]]
            letters = []
            for sequence, dead in page:
                record = self._read_or_none(known_topic.index.offset(sequence))
                letters.append(
                    DeadLetter(
                        id=dead.message_id, topic=topic, group=group, attempts=dead.attempts, reason=dead.reason,
                        dead_at_ms=dead.dead_at_ms, key=record.key if record else None,
                        headers=record.headers if record else {}, body=record.body if record else b"",
                    )
                )  # fmt: skip
        return letters, str(page[-1][0]) if len(sequences) > limit else None

    def redrive(self, topic: str, group: str, *, ids: Sequence[str] | None = None) -> int:
        """Give dead letters a new life; returns how many. An id that is not dead (any more) is passed over."""
        with self._lock:
            known = self._known_group(topic, group)
            wanted = None if ids is None else set(ids)
            entries = [
                (sequence, dead.message_id)
                for sequence, dead in known.dead.items()
                if dead.reason != _DAMAGED and (wanted is None or dead.message_id in wanted)
            ]
            if entries:
                self._act(
                    journal.Redriven(topic=topic, group=group, at_ms=self._clock.now_ms(), entries=sorted(entries))
                )
            end = self._actions.end
        self._actions.commit(end)
        self._wake(topic, group)
        return len(entries)

    # -- the schedule, and health ------------------------------------------------------------------------------------

    def scheduled(
        self, topic: str | None = None, *, from_ms: int | None = None, to_ms: int | None = None, bucket: str = "minute"
    ) -> list[tuple[int, int]]:
        """How many are due when: (start of the minute, hour or day, count), within the next 731 days by default."""
        if bucket not in BUCKETS_MS:
            raise InvalidMessage(f"bucket is one of {', '.join(BUCKETS_MS)}")
        now_ms = self._clock.now_ms()
        with self._lock:
            return self._state.schedule.histogram(
                topic=topic,
                from_ms=0 if from_ms is None else from_ms,
                to_ms=now_ms + DELAY_MAX_MS + 1 if to_ms is None else to_ms,
                bucket_ms=BUCKETS_MS[bucket],
            )

    def scheduled_message(self, message_id: str) -> Mapping[str, object] | None:
        """Id, topic and due time of one scheduled message; None where none is scheduled under this id."""
        with self._lock:
            found = self._state.schedule.find(message_id)
            if found is None:
                return None
            return {"id": found.id, "topic": found.topic, "deliver_at_ms": found.deliver_at_ms}

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Totals since the start, by (what, topic, group or status)."""
        with self._lock:
            return dict(self._state.counters)

    def log_figures(self) -> Mapping[str, int]:
        """Bytes and syncs of both logs since the start, and what is scheduled."""
        with self._lock:
            return {
                "messages_bytes": self._messages.end,
                "actions_bytes": self._actions.end,
                "syncs": self._messages.syncs + self._actions.syncs,
                "scheduled": self._state.schedule.count(),
            }

    def check_ready(self) -> None:
        """Raise StorageFailed where the engine can take nothing: closed, or a disk that failed."""
        with self._lock:
            self._refuse_if_closed()
            self._messages.refuse_if_failed()
            self._actions.refuse_if_failed()

    # -- inside, under the lock --------------------------------------------------------------------------------------

    def _recover(self) -> None:
        for one in self._messages.recover():
            self._state.replay_message(journal.decode_message(one.payload), one.offset)
        for one in self._actions.recover():
            self._state.replay_action(journal.decode_action(one.payload))

    def _act(self, action: journal.Action) -> None:
        """Write an action down, then do it, by the very code that replays it."""
        self._actions.append([journal.encode_record(action)])
        self._state.replay_action(action)

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

    def _bury(self, topic: str, group: Group, deaths: Sequence[Death], *, at_ms: int) -> None:
        by_reason: defaultdict[str, list[tuple[int, str, int]]] = defaultdict(list)
        for death in deaths:
            by_reason[death.reason].append((death.sequence, death.message_id, death.attempts))
        for reason, entries in by_reason.items():
            self._act(journal.Died(topic=topic, group=group.name, at_ms=at_ms, entries=entries, reason=reason))
        self._state.counters["dead_lettered", topic, group.name] += len(deaths)

    def _bury_expired(self, topic: str, group: Group) -> None:
        now_ms = self._clock.now_ms()
        _, deaths = group.visible_again(now_ms=now_ms, count_max=len(group.unsettled))
        self._bury(topic, group, deaths, at_ms=now_ms)

    def _declare(self, topic: str, name: str, config: GroupConfig) -> None:
        if topic not in self._state.topics:
            self._check_topics_max()
        known = self._state.topic(topic)
        if name not in known.groups and len(known.groups) >= self._options.groups_per_topic_max:
            raise InvalidMessage(f"topic {topic} has {len(known.groups)} groups already (groups_per_topic_max)")
        match config.start:
            case "latest":
                position = len(known.index)
            case "at":
                position = known.index.sequence_at(config.start_at_ms or 0)
            case _:
                position = 0
        self._act(
            journal.Declared(
                topic=topic, group=name, at_ms=self._clock.now_ms(), position=position, settings=settings_of(config)
            )
        )

    def _check_topics_max(self) -> None:
        if len(self._state.topics) >= self._options.topics_max:
            raise InvalidMessage(self._too_many_topics)

    @property
    def _too_many_topics(self) -> str:
        return f"there are {self._options.topics_max} topics already, and no more are allowed (topics_max)"

    def _open_group(self, topic: str, name: str) -> tuple[Topic, Group]:
        found = self._state.group(topic, name)
        if found is None:
            self._declare(topic, name, GroupConfig())
            found = self._known_group(topic, name)
        return self._state.topic(topic), found

    def _known_topic(self, topic: str) -> Topic:
        check_topic(topic)
        found = self._state.topics.get(topic)
        if found is None:
            raise KeyError(f"there is no topic {topic}")
        return found

    def _known_group(self, topic: str, group: str) -> Group:
        check_group(group)
        found = self._known_topic(topic).groups.get(group)
        if found is None:
            raise KeyError(f"topic {topic} has no consumer group {group}")
        return found

    def _read_or_none(self, offset: int) -> journal.MessageRecord | None:
        try:
            return None if offset == HOLE else journal.decode_message(self._messages.read(offset))
        except (journal.SegmentDamaged, ValueError):
            return None

    def _count_published(self, results: Sequence[PublishResult], batch: Sequence[Message]) -> None:
        for result, message in zip(results, batch, strict=True):
            self._state.counters[f"published_{result.status}", message.topic, ""] += 1

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the broker is closed")

    # -- time --------------------------------------------------------------------------------------------------------

    def _fire_due(self) -> None:
        """Give what has fallen due its place in its topic.

        Never early: the wall clock is asked here, at the last moment.
        """
        while True:
            now_ms = self._clock.now_ms()
            due = self._state.schedule.due(
                now_ms, count_max=self._options.fire_batch_max, durable_end=self._messages.durable_end
            )
            by_topic: defaultdict[str, list[str]] = defaultdict(list)
            for message in due:
                self._state.schedule.add(message)  # replaying the action below takes it out again
                by_topic[message.topic].append(message.id)
            for topic, ids in by_topic.items():
                start = len(self._state.topic(topic).index)
                self._act(journal.Fired(topic=topic, at_ms=now_ms, entries=list(enumerate(ids, start))))
                self._state.counters["fired", topic, ""] += len(ids)
                self._wake_topic(topic)
            if len(due) < self._options.fire_batch_max:
                return

    def _run_timer(self) -> None:
        with self._changed:
            while not self._closed:
                try:
                    self._fire_due()
                    self._wake_visible()
                except OutboxError as error:
                    logger.warning("timer_failed", extra={"error": str(error)})
                except Exception:  # the thread boundary: a timer that ends silently would hold every scheduled message
                    logger.exception("timer_failed")
                self._clock.wait(self._changed, self._next_wake_ms())

    def _next_wake_ms(self) -> int:
        """How long to sleep: to the next due or visible time, but at most one slice, after which the wall clock
        is read anew.
        """
        times = [self._state.schedule.next_due_ms()]
        for topic, name in self._waiters:
            group = self._state.group(topic, name)
            times.append(group.next_visible_ms() if group is not None else None)
        now_ms = self._clock.now_ms()
        waits = [time_ms - now_ms for time_ms in times if time_ms is not None]
        return min(max(1, min(waits, default=self._options.clock_slice_ms)), self._options.clock_slice_ms)

    def _wake_visible(self) -> None:
        now_ms = self._clock.now_ms()
        for topic, name in list(self._waiters):
            group = self._state.group(topic, name)
            next_ms = group.next_visible_ms() if group is not None else None
            if next_ms is not None and next_ms <= now_ms:
                self._wake(topic, name)

    def _wake(self, topic: str, group: str) -> None:
        with self._lock:
            wakes = list(self._waiters.get((topic, group), ()))
            self._changed.notify_all()
        for wake in wakes:
            wake()

    def _wake_topic(self, topic: str) -> None:
        with self._lock:
            groups = [name for on_topic, name in self._waiters if on_topic == topic]
        for name in groups:
            self._wake(topic, name)


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


def _holds(group: Group, receipt: Receipt) -> bool:
    return group.holds(receipt.sequence, delivery=receipt.delivery, life=receipt.life)
