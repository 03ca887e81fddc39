"""Publishing and canceling: messages in, durably, once each; scheduled ones out again before they are due."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from broker.timing import Timing
from messaging import journal
from messaging.errors import InvalidMessage
from messaging.limits import DELAY_MAX_MS
from messaging.message import CancelStatus, Message, PublishResult, PublishStatus

BUCKETS_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


class Publishable(Protocol):
    """What is needed of a message that is stored for now."""

    @property
    def id(self) -> str:
        """The message id."""

    @property
    def key(self) -> str | None:
        """The key."""

    @property
    def headers(self) -> Mapping[str, str] | None:
        """The headers."""

    @property
    def body(self) -> bytes:
        """The body."""

    @property
    def created_at_ms(self) -> int | None:
        """When its producer made it; None or 0: now."""


class Publishing(Timing):
    """The producer's half of the engine."""

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch; one result a message, in order, once all that is stored is durable."""
        with self._lock:
            self._refuse_if_closed()
            self._refuse_if_disk_is_full()
            results, topics = self._append(batch)
            end = self._messages.end
        self._messages.commit(end)
        for topic in topics:
            self._wake_topic(topic)
        with self._changed:
            self._changed.notify_all()  # something may be due sooner than the timer thinks
        return results

    def publish_plain(self, topic: str, batch: Sequence[Publishable], ids: list[str]) -> bool:
        """Store a batch for now as publish() does, in the form in which it came off the wire, checked by its caller,
        who has its ids at hand.

        False, with nothing stored, where the topic or not every id is new: publish() tells what becomes of each.
        """
        with self._lock:
            self._refuse_if_closed()
            self._refuse_if_disk_is_full()
            if topic not in self._state.topics or not self._are_new(ids):
                return False
            self._append_plain(topic, batch, ids, now_ms=self._clock.now_ms())
            end = self._messages.end
        self._messages.commit(end)
        self._wake_topic(topic)
        return True

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
                self._act(journal.Canceled(at_ms=self._clock.now_ms(), ids=gone, messages_end=self._messages.end))
            end = self._actions.end
        self._actions.commit(end)
        return statuses

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

    def _append(self, batch: Sequence[Message]) -> tuple[list[PublishResult], set[str]]:
        now_ms = self._clock.now_ms()
        if self._is_plain(batch):
            ids = [one.id for one in batch]
            self._append_plain(batch[0].topic, batch, ids, now_ms=now_ms)
            return [PublishResult(one, PublishStatus.STORED) for one in ids], {batch[0].topic}
        results: list[PublishResult] = []
        records: list[journal.MessageRecord] = []
        fresh: defaultdict[str, int] = defaultdict(int)
        seen: set[str] = set()
        topics_new: set[str] = set()
        for message in batch:
            problem = self._problem(message, now_ms=now_ms, topics_new=topics_new)
            if problem is not None:
                results.append(PublishResult(message.id, PublishStatus.REJECTED, problem))
            elif message.id in seen or self._is_known(message.id):
                results.append(PublishResult(message.id, PublishStatus.DUPLICATE))
            else:
                seen.add(message.id)
                if message.topic not in self._state.topics:
                    topics_new.add(message.topic)
                results.append(PublishResult(message.id, PublishStatus.STORED))
                records.append(self._record(message, now_ms=now_ms, fresh=fresh))
        if records:
            self._store(records)
        self._count_published(results, batch)
        return results, set(fresh)

    def _is_plain(self, batch: Sequence[Message]) -> bool:
        """Whether all of a batch is new, of one topic that is there, and for now: the usual case."""
        if not batch or batch[0].topic not in self._state.topics:
            return False
        topic = batch[0].topic
        return all(one.deliver_at_ms is None and one.topic == topic for one in batch) and self._are_new(
            [one.id for one in batch]
        )

    def _are_new(self, ids: list[str]) -> bool:
        state = self._state
        return (
            len(set(ids)) == len(ids)
            and not state.recent.has_any(ids)
            and not (len(state.canceled) and state.canceled.has_any(ids))
            and not (state.schedule.count() and any(state.schedule.find(one) for one in ids))
        )

    def _append_plain(self, topic: str, batch: Sequence[Publishable], ids: list[str], *, now_ms: int) -> None:
        """Store a batch of which nothing is to be decided one by one."""
        start = self._state.topic(topic).index.end
        records = [
            journal.MessageRecord(
                sequence=sequence, id=one.id, topic=topic, key=one.key,
                headers=dict(one.headers) if one.headers else {}, body=one.body,
                created_at_ms=one.created_at_ms or now_ms, stored_at_ms=now_ms,
            )
            for sequence, one in enumerate(batch, start)
        ]  # fmt: skip
        self._write_messages_of(topic, records, ready_at_ms=now_ms)
        self._state.recent.add_new(ids)
        self._state.counters["published_stored", topic, ""] += len(ids)

    def _store(self, records: Sequence[journal.MessageRecord]) -> None:
        offsets = self._write_messages(records)
        state = self._state
        state.recent.add_new([record.id for record in records])
        for record, offset in zip(records, offsets, strict=True):
            if record.sequence is None:
                state.written_special.append(offset)
                state.replay_special(record, offset=offset)

    def _record(self, message: Message, *, now_ms: int, fresh: defaultdict[str, int]) -> journal.MessageRecord:
        """The record of a message; one that was canceled before it came is stored, but takes no place in its topic."""
        dead = message.id in self._state.canceled
        sequence = None
        if not dead and (message.deliver_at_ms is None or message.deliver_at_ms <= now_ms):
            topic = self._state.topics.get(message.topic)
            sequence = (0 if topic is None else topic.index.end) + fresh[message.topic]
            fresh[message.topic] += 1
        return journal.MessageRecord(
            sequence=sequence, id=message.id, topic=message.topic, key=message.key, headers=dict(message.headers),
            body=message.body, created_at_ms=message.created_at_ms or now_ms, stored_at_ms=now_ms,
            deliver_at_ms=message.deliver_at_ms, copy=journal.DEAD_ON_ARRIVAL if dead else journal.PUBLISHED,
        )  # fmt: skip

    def _is_known(self, message_id: str) -> bool:
        """Whether a message came lately, or waits for its due time, however long ago it came."""
        return message_id in self._state.recent or self._state.schedule.find(message_id) is not None

    def _problem(self, message: Message, *, now_ms: int, topics_new: set[str]) -> str | None:
        if message.deliver_at_ms is not None and message.deliver_at_ms - now_ms > DELAY_MAX_MS:
            return "a delay may be at most 731 days"
        if message.topic in self._state.topics or message.topic in topics_new:
            return None
        if len(self._state.topics) + len(topics_new) >= self._options.topics_max:
            return self._too_many_topics
        return None

    def _count_published(self, results: Sequence[PublishResult], batch: Sequence[Message]) -> None:
        for result, message in zip(results, batch, strict=True):
            self._state.counters[f"published_{result.status}", message.topic, ""] += 1

    def _cancel_status(self, message_id: str) -> CancelStatus:
        if message_id in self._state.canceled:
            return CancelStatus.CANCELED if message_id in self._state.stopped else CancelStatus.UNKNOWN
        if self._state.schedule.find(message_id) is not None:
            return CancelStatus.CANCELED
        return CancelStatus.TOO_LATE if message_id in self._state.recent else CancelStatus.UNKNOWN
