"""Publishes and cancels: stores messages durably, once each; cancels scheduled ones before they are due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter
from typing import Final

from outbox_broker.common.cancel_topic_patterns import ANY_TOPIC, Scope, covers, scope_of
from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.timer import EngineTimer
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.journal.stored_record import stored_record
from outbox_broker.log.cordon import Cordon
from outbox_broker.schedule.delay_store import CancelResult, TimedMessage
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_core.common.errors import InvalidMessage
from outbox_core.journal import journal
from outbox_core.journal.block import FRAMES_MAX
from outbox_core.messages.limits import DELAY_ACCEPTED_MS_MAX
from outbox_core.messages.message import (
    DELAY_TOO_LONG,
    CancelStatus,
    PublishResult,
    PublishStatus,
    Record,
    refusal_of_delay,
)

BUCKETS_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}

OTHERS: Final = "~others"
"""Replaces the names of nonexistent topics in statistics; no topic can have this name."""


class Publisher:
    """The producer's operations."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry,
        dispatcher: Dispatcher, timer: EngineTimer, *, cordon: Cordon,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._lock = context.lock
        self._state = context.state
        self._reserve = context.reserve
        self._writer = writer
        self._wakeups = wakeups
        self._groups = groups
        self._dispatcher = dispatcher
        self._timer = timer
        self._cordon = cordon

    def publish(self, batch: Sequence[Record], *, quota: ClientTopicQuota | None = None) -> list[PublishResult]:
        """Store a batch; returns one result per message, in order, once all that is stored is durable.

        `quota`: how many topics its client may have. Raises BrokerCordoned, and InvalidMessage if the batch is larger
        than a block of the log.
        """
        if len(batch) > FRAMES_MAX:
            raise InvalidMessage(
                f"a batch has at most {FRAMES_MAX:,} messages, not {len(batch):,}; publish it in several"
            )
        is_timed = any(message.deliver_at_ms is not None for message in batch)
        if is_timed:
            self._context.schedule.housekeeping.make_room(self._clock.now_ms())
        with self._lock, self._cordon.lock:
            self._context.refuse_if_closed()
            self._cordon.refuse()
            self._reserve.require()
            results, topics, has_later = self._append(batch, quota, is_timed=is_timed)
            end = self._context.messages.end
        self._context.messages.commit(end)
        self._wakeups.wake_wanting(topics)
        if has_later:
            with self._wakeups.changed:
                self._wakeups.changed.notify_all()  # something may be due sooner than the timer expects
            if self._context.schedule.housekeeping.is_full():
                self._timer.wake_keeper()
        return results

    def cancel(self, message_ids: Sequence[str], *, topics: Sequence[str] | None = None) -> list[CancelStatus]:
        """Cancel the scheduled messages with these ids on the topics that a pattern of `topics` matches (None: on all),
        durably.

        An id that is unknown there is remembered: a later publish of it to one of these topics is not delivered.
        """
        scope = scope_of(topics)
        self._dispatcher.dispatch_unless_disk_is_full()
        with self._lock:
            self._context.refuse_if_closed()
            stopped = self._stop(message_ids, scope)
        self._context.schedule.commit(stopped.place)
        self._tell_canceled(_gone(message_ids, stopped), scope)
        return stopped.statuses

    def scheduled(
        self, topic: str | None = None, *, from_ms: int | None = None, to_ms: int | None = None, bucket: str = "minute"
    ) -> list[tuple[int, int]]:
        """Returns (start of the minute, hour or day, number of messages due), within the next 731 days by default."""
        if bucket not in BUCKETS_MS:
            raise InvalidMessage(f"bucket is one of {', '.join(BUCKETS_MS)}")
        now_ms = self._clock.now_ms()
        self._context.refuse_if_closed()
        return self._context.schedule.queries.histogram(
            topic=topic,
            from_ms=0 if from_ms is None else from_ms,
            to_ms=now_ms + DELAY_ACCEPTED_MS_MAX + 1 if to_ms is None else to_ms,
            bucket_ms=BUCKETS_MS[bucket],
        )

    def scheduled_message(
        self, message_id: str, *, topics: Sequence[str] | None = None
    ) -> Mapping[str, object] | None:  # fmt: skip
        """Returns id, topic and due time of the scheduled message with this id on the topics that a pattern of `topics`
        matches (None: on any), the first to be due if there are several; None if there is none.
        """
        message = self._context.schedule.queries.find(message_id, scope_of(topics))
        return None if message is None else {"id": message.id, "topic": message.topic, "deliver_at_ms": message.due_ms}

    # -- storing -----------------------------------------------------------------------------------------------------

    def _append(
        self, batch: Sequence[Record], quota: ClientTopicQuota | None, *, is_timed: bool
    ) -> tuple[list[PublishResult], Collection[str], bool]:
        """Store a batch; returns the results, the topics with new messages, and whether any went to the schedule."""
        now_ms = self._clock.now_ms()
        if batch and not is_timed:
            plain, counts = arranged(batch)
            ids = [message.id for message in plain]
            if self._are_new(ids, counts) and self._has_room_for(counts, quota):
                self._append_plain(counts, plain, ids, now_ms=now_ms)
                return [PublishResult(message.id, PublishStatus.STORED) for message in batch], counts, False
        if self._is_later(batch, now_ms=now_ms):
            results = self._append_later(batch, now_ms=now_ms)
            self._count_published(results, batch)
            return results, set(), True
        sorting = BatchDestinations(
            now_ms=now_ms, is_known=self._context.schedule.recent.knows, is_recent=self._state.recent.has
        )
        for message in batch:
            problem = self._problem(message, now_ms=now_ms, topics_new=sorting.topics_new, quota=quota)
            sorting.sort(message, problem=problem)
            if message.topic not in self._state.topics and sorting.results[-1].status is PublishStatus.STORED:
                sorting.topics_new.add(message.topic)
        if sorting.later:
            later_results = self._append_later([message for _, message in sorting.later], now_ms=now_ms)
            for (index, _), result in zip(sorting.later, later_results, strict=True):
                sorting.results[index] = result
        plain, counts = arranged(sorting.plain)
        if plain:
            self._writer.write_messages(counts, plain, ready_at_ms=now_ms)
            self._state.recent.add_all([message.topic for message in plain], [message.id for message in plain])
        self._count_published(sorting.results, batch)
        return sorting.results, counts, bool(sorting.later)

    def _append_later(self, batch: Sequence[Record], *, now_ms: int) -> list[PublishResult]:
        """Schedule messages for later, and those canceled in advance: the schedule decides on each."""
        statuses, _ = self._context.schedule.put(
            [timed_of(message, now_ms=now_ms) for message in batch], now_ms=now_ms
        )  # fmt: skip
        stored: Sequence[Record] = batch
        if set(statuses) != {PublishStatus.STORED}:
            stored = [
                message for message, status in zip(batch, statuses, strict=True) if status is PublishStatus.STORED
            ]
        for topic in {message.topic for message in stored}:
            self._state.topic(topic)
        for index in self._context.schedule.recent.canceled_among(stored):
            self._state.recent.add(stored[index].topic, stored[index].id)
        return [PublishResult(message.id, status) for message, status in zip(batch, statuses, strict=True)]

    def _is_later(self, batch: Sequence[Record], *, now_ms: int) -> bool:
        """Returns whether all of a batch is for later, on existing topics, with ids that are unknown."""
        dues = [message.deliver_at_ms or 0 for message in batch]
        ids = [message.id for message in batch]
        return (
            bool(dues)
            and now_ms < min(dues)
            and max(dues) <= now_ms + DELAY_ACCEPTED_MS_MAX
            and self._state.topics.keys() >= {message.topic for message in batch}
            and len(set(ids)) == len(ids)
            and not self._state.recent.has_any(ids)
        )

    def _has_room_for(self, counts: Mapping[str, int], quota: ClientTopicQuota | None) -> bool:
        """Returns whether all of these may be topics."""
        topics_new = len([topic for topic in counts if topic not in self._state.topics])
        return not topics_new or self._groups.topics_refused(topics_new, quota) is None

    def _are_new(self, ids: Sequence[str], topics: Iterable[str]) -> bool:
        """Returns whether these ids are distinct and unknown on any topic: the usual case, decided in bulk."""
        return (
            len(set(ids)) == len(ids)
            and not self._state.recent.has_any(ids)
            and not self._context.schedule.recent.may_know(ids, topics)
        )  # fmt: skip

    def _append_plain(
        self, counts: Mapping[str, int], batch: Sequence[Record], ids: Sequence[str], *, now_ms: int
    ) -> None:
        """Store a batch that needs no decision per message; `counts`: its topics, and the messages of each."""
        self._writer.write_messages(counts, batch, ready_at_ms=now_ms)
        topics = list(chain.from_iterable(repeat(topic, count) for topic, count in counts.items()))
        self._state.recent.add_new(topics, ids)
        for topic, count in counts.items():
            self._state.counters["published_stored", topic, ""] += count

    def _problem(
        self, message: Record, *, now_ms: int, topics_new: set[str], quota: ClientTopicQuota | None
    ) -> PublishResult | None:
        if refusal := refusal_of_delay(message, now_ms=now_ms):
            return refusal
        if message.topic in self._state.topics or message.topic in topics_new:
            return None
        error = self._groups.topics_refused(len(topics_new) + 1, quota)
        return None if error is None else PublishResult(message.id, PublishStatus.REJECTED, error)

    def _count_published(self, results: Sequence[PublishResult], batch: Sequence[Record]) -> None:
        if all(result.status is PublishStatus.STORED for result in results):  # mostly
            for topic, count in Counter(message.topic for message in batch).items():
                self._state.counters["published_stored", topic, ""] += count
            return
        counts = Counter(
            (message.topic, result.status, result.error) for result, message in zip(results, batch, strict=True)
        )
        for (name, status, error), count in counts.items():
            counter_name = f"published_{status}"
            if status is PublishStatus.REJECTED:
                counter_name += "_delay" if error == DELAY_TOO_LONG else "_topics_max"
            # A refused topic does not exist: names that clients can invent are not counted one by one.
            self._state.counters[counter_name, name if name in self._state.topics else OTHERS, ""] += count

    def _stop(self, message_ids: Sequence[str], scope: Scope) -> CancelResult:
        """Decide cancels. Recent ids of the message log were delivered, unless canceled before they arrived."""
        recent = self._state.recent
        late = {
            message_id for message_id in message_ids if any(covers(scope, topic) for topic in recent.topics(message_id))
        }
        return self._context.schedule.stop(message_ids, now_ms=self._clock.now_ms(), scope=scope, late=late)

    def _tell_canceled(self, gone: Sequence[tuple[str, str]], scope: Scope) -> None:
        """Record cancels, (id, topic) each, in the action log for its readers, once they are durable."""
        if not gone:
            return
        with self._lock:
            self._context.refuse_if_closed()
            self._writer.act(
                journal.Canceled(
                    at_ms=self._clock.now_ms(), ids=[message_id for message_id, _ in gone],
                    messages_end=self._context.messages.end, topics=[topic for _, topic in gone], scope=scope,
                )
            )  # fmt: skip
            end = self._context.actions.end
        self._context.actions.commit(end)


def _gone(message_ids: Sequence[str], stopped: CancelResult) -> list[tuple[str, str]]:
    """Returns (id, topic) of everything that a cancel stops: any topic if no message with the id has arrived yet."""
    return [
        (message_id, topic)
        for message_id, status in dict(zip(message_ids, stopped.statuses, strict=True)).items()
        if status is not CancelStatus.TOO_LATE
        for topic in sorted(stopped.topics[message_id]) or (ANY_TOPIC,)
    ]


@dataclass(slots=True, kw_only=True)
class BatchDestinations:
    """The messages of a batch by destination: `plain` for the message log, `later` (with their indexes in the batch)
    for the schedule.
    """

    now_ms: int
    is_known: Callable[[str, str], bool]  # to the schedule
    is_recent: Callable[[str, str], bool]
    results: list[PublishResult] = field(default_factory=list)
    plain: list[Record] = field(default_factory=list)
    later: list[tuple[int, Record]] = field(default_factory=list)
    topics_new: set[str] = field(default_factory=set)
    seen: set[tuple[str, str]] = field(default_factory=set)

    def sort(self, message: Record, *, problem: PublishResult | None) -> None:
        """Add the next message; the status of one that goes to the schedule is decided there."""
        status, identity = PublishStatus.STORED, (message.topic, message.id)
        if problem is not None:
            self.results.append(problem)
            return
        if identity in self.seen or self.is_recent(*identity):
            status = PublishStatus.DUPLICATE
        elif (message.deliver_at_ms or 0) > self.now_ms or self.is_known(*identity):
            self.later.append((len(self.results), message))
        else:
            self.plain.append(message)
        self.seen.add(identity)
        self.results.append(PublishResult(message.id, status))


def arranged(batch: Sequence[Record]) -> tuple[Sequence[Record], dict[str, int]]:
    """Returns a batch grouped by topic, in its order; and its topics in order, with the number of messages of each."""
    counts: dict[str, int] = Counter([message.topic for message in batch])
    if 1 < len(counts) < len(batch):
        return sorted(batch, key=attrgetter("topic")), dict(sorted(counts.items()))
    return batch, counts


def timed_of(message: Record, *, now_ms: int) -> TimedMessage:
    """Returns a message in the schedule's form; without a due time it is due now."""
    due_ms = now_ms if message.deliver_at_ms is None else message.deliver_at_ms
    return TimedMessage(due_ms, message.id, message.topic, stored_record(message, now_ms=now_ms))
