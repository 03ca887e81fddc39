"""The delay proxy in front of a broker: implements the HTTP server's ports in place of an engine. Stores no topics.

A published message is durable in the schedule, and goes to the target broker when it is due, or at once without a due
time: that goes through the schedule too, so that there is one way in, with one promise. Consumers pull from the target
itself. The target is any Broker; it need not support delays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Final, Protocol

from outbox_broker.backup.snapshot import FolderSnapshots
from outbox_broker.common.cancel_topic_patterns import Scope, covers, scope_of
from outbox_broker.delay_service.target_publisher import TargetPublisher, timed
from outbox_broker.engine.publisher import BUCKETS_MS, OTHERS
from outbox_broker.http.service_ports import ServicePorts
from outbox_broker.log.cordon import Cordon
from outbox_broker.log.disk_reserve import DiskSpace, is_refused
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.schedule.lateness import Lateness
from outbox_broker.schedule.schedule_runner import ScheduleRunner
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_core.common.clock import Clock
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.broker_port import topic_figures
from outbox_core.messages.limits import DELAY_ACCEPTED_MS_MAX
from outbox_core.messages.message import CancelStatus, PublishResult, PublishStatus, Record, refusal_of_delay
from outbox_core.messages.publish_guard import PublishTarget
from outbox_core.protocol.wire import RefusedMessage, RetryOutcome, TopicRemainder

CLAIM_AHEAD_MS: Final = 50
"""How long before it is due a message is claimed, at most: from then on it cannot be canceled any more."""
COUNTERS_MAX: Final = 40_000
"""Beyond so many, messages of further topics are counted together: clients can invent names."""


class PublishRoom(Protocol):
    """Whether there is room for new messages, beside what is kept for dispatch and cancels."""

    def require(self) -> None:
        """Raise StorageFailed, naming the cure, if publishes are refused. Called for each batch."""

    def check_room(self) -> None:
        """Raise StorageFailed if publishes are refused, or are about to be. Called by probes."""

    def disk_space(self) -> DiskSpace | None:
        """Returns the space of this process's own disk; None if it stores elsewhere."""


def has_room(room: PublishRoom | None) -> bool:
    """Returns whether publishes are accepted as far as room is concerned."""
    return room is None or not is_refused(room.check_room)


class DelayProxy:
    """Publishes, probes and metrics over a schedule and its service; consumers and operators use the target.

    Thread-safe.
    """

    def __init__(
        self,
        schedule: DelayStore,
        target: PublishTarget,
        *,
        clock: Clock,
        syncs: TimedStorage,
        room: PublishRoom | None = None,
        cordon: Cordon | None = None,
        snapshots: FolderSnapshots | None = None,
        claim_ahead_ms: int = 0,
    ) -> None:
        """`syncs`: the storage of the schedule's segments, which measures sync times. `room`: as the reserve of a disk,
        or the bookies of a cluster. `cordon`, `snapshots`: None for a shard of a cluster. `claim_ahead_ms`: see
        ScheduleRunner.
        """
        self._schedule = schedule
        self._clock = clock
        self.syncs = syncs
        self._room = room
        self._cordon = cordon
        self._snapshots = snapshots
        self._counters: Counter[tuple[str, str, str]] = Counter()
        self._publisher = TargetPublisher(target, clock=clock, count=self._count)
        deliver = self._publisher.deliver
        self.service = ScheduleRunner(schedule, deliver=deliver, clock=clock, claim_ahead_ms=claim_ahead_ms)

    def served(self) -> ServicePorts:
        """Returns the ports for an HTTP server."""
        return ServicePorts(
            producers=self, catalog=self, measured=self, refusals=self,
            operations=None if self._cordon is None else DelayOperations(self._schedule, self._cordon),
            snapshots=self._snapshots,
            refusal="a delay service only publishes: consume from its target broker, and operate on it",
        )  # fmt: skip

    def start(self) -> None:
        """Start delivering."""
        self.service.start()

    def close(self, *, timeout_ms: int = 10_000) -> None:
        """Stop delivering, and refuse further calls. The owner closes the target and the segments."""
        self.service.stop(timeout_ms=timeout_ms)
        self._schedule.close()

    # -- what producers ask ------------------------------------------------------------------------------------------

    def publish(self, batch: Sequence[Record], *, quota: ClientTopicQuota | None = None) -> list[PublishResult]:
        """Store a batch durably; returns one result per message, in order. Quotas do not apply: it has no topics."""
        del quota
        return self.begin_publish(batch)()

    def begin_publish(self, batch: Sequence[Record]) -> Callable[[], list[PublishResult]]:
        """Send a batch to the storage; returns what waits until it is durable, and returns the results."""
        if self._room is not None:
            self._room.require()
        now_ms = self._clock.now_ms()
        self._schedule.housekeeping.make_room(now_ms)
        with nullcontext() if self._cordon is None else self._cordon.lock:
            if self._cordon is not None:
                self._cordon.refuse()
            statuses, place = self._schedule.put([timed(message, now_ms) for message in batch], now_ms=now_ms)

        def finish() -> list[PublishResult]:
            self._schedule.commit_arrivals(place)
            self.service.wake()
            results = [
                PublishResult(message.id, status)
                if status is not PublishStatus.REJECTED
                else refusal_of_delay(message, now_ms=now_ms) or PublishResult(message.id, status)
                for message, status in zip(batch, statuses, strict=True)
            ]
            self._count_published(batch, results)
            return results

        return finish

    def _count_published(self, batch: Sequence[Record], results: Sequence[PublishResult]) -> None:
        for message, result in zip(batch, results, strict=True):
            what, topic = f"published_{result.status}", message.topic
            if not result.status.is_success and ("published_stored", topic, "") not in self._counters:
                topic = OTHERS  # a topic may only have been named
            self._count(what + ("_delay" if result.status is PublishStatus.REJECTED else ""), topic)

    def _count(self, what: str, topic: str, messages: int = 1) -> None:
        place = (what, topic, "")
        if place not in self._counters and len(self._counters) >= COUNTERS_MAX:
            place = (what, OTHERS, "")
        self._counters[place] += messages

    def cancel(self, message_ids: Sequence[str], *, topics: Sequence[str] | None = None) -> list[CancelStatus]:
        """Cancel scheduled messages on the topics that a pattern of `topics` matches (None: on all), durably."""
        return self.begin_cancel(message_ids, topics=topics)()

    def begin_cancel(
        self, message_ids: Sequence[str], *, topics: Sequence[str] | None
    ) -> Callable[[], list[CancelStatus]]:
        """Send cancels to the storage; returns what waits until they are durable, and returns the statuses."""
        stopped = self._schedule.stop(message_ids, now_ms=self._clock.now_ms(), scope=scope_of(topics))

        def finish() -> list[CancelStatus]:
            self._schedule.commit(stopped.place)
            return stopped.statuses

        return finish

    def refused(self, *, topics: Sequence[str] | None = None) -> list[RefusedMessage]:
        """Returns the messages that the target refused for good, on the topics that a pattern of `topics` matches
        (None: on all), the oldest first: at most REFUSALS_MAX, and after a restart those that an hour has brought.
        """
        scope = scope_of(topics)
        return [
            RefusedMessage(id=message_id, topic=topic, reason=reason)
            for (topic, message_id), reason in list(self._publisher.refusals.items())
            if covers(scope, topic) and self._schedule.queries.find(message_id, (topic,)) is not None
        ]

    def retry_refused(self, message_ids: Sequence[str], *, topics: Sequence[str] | None = None) -> list[RetryOutcome]:
        """Publish messages that were refused for good once more; what the target takes is scheduled no more. Raises
        BrokerError in an outage: what was not answered stays. A crash in between may send a message twice.
        """
        return [self._retry(message_id, scope_of(topics)) for message_id in message_ids]

    def _retry(self, message_id: str, scope: Scope) -> RetryOutcome:
        found = self._schedule.queries.read(message_id, scope)
        result = None if found is None else self._publisher.retry(found)
        if found is None or result is None:
            return RetryOutcome(id=message_id, status="unknown")
        match result.status:
            case PublishStatus.REJECTED:
                return RetryOutcome(id=message_id, status="refused", error=f"rejected by the broker: {result.error}")
            case PublishStatus.DEFERRED:
                return RetryOutcome(id=message_id, status="deferred", error=result.error)
            case _:
                stopped = self._schedule.stop([message_id], now_ms=self._clock.now_ms(), scope=(found.topic,))
                self._schedule.commit(stopped.place)
                if stopped.statuses != [CancelStatus.CANCELED]:  # it was dispatched while the target took it
                    self._publisher.drop(found.topic, message_id)
                return RetryOutcome(id=message_id, status="sent")

    def scheduled(
        self, topic: str | None = None, *, from_ms: int | None = None, to_ms: int | None = None, bucket: str = "minute"
    ) -> list[tuple[int, int]]:
        """Returns (start of the minute, hour or day, number of messages due)."""
        if bucket not in BUCKETS_MS:
            raise InvalidMessage(f"bucket is one of {', '.join(BUCKETS_MS)}")
        end_ms = self._clock.now_ms() + DELAY_ACCEPTED_MS_MAX + 1
        return self._schedule.queries.histogram(
            topic=topic, from_ms=from_ms or 0, to_ms=end_ms if to_ms is None else to_ms, bucket_ms=BUCKETS_MS[bucket]
        )

    def due_within(self, spans_ms: Sequence[int]) -> list[int]:
        """Returns how many messages are due within each ascending span from now; and last, the total."""
        return self._schedule.queries.due_within(spans_ms, now_ms=self._clock.now_ms())

    def scheduled_message(
        self, message_id: str, *, topics: Sequence[str] | None = None
    ) -> Mapping[str, object] | None:  # fmt: skip
        """Returns id, topic and due time of the scheduled message with this id on the topics that a pattern of `topics`
        matches (None: on any); of one that the target refused for good, why, and when it is tried again.
        """
        found = self._schedule.queries.find(message_id, scope_of(topics))
        if found is None:
            return None
        refused = self._publisher.refusals.get((found.topic, found.id))
        return {
            "id": found.id,
            "topic": found.topic,
            "deliver_at_ms": found.due_ms,
            **({} if refused is None else {"refused": refused}),
        }

    def knows(self, topic: str, message_id: str) -> bool:
        """Returns whether a message is scheduled, was dispatched lately, or is canceled, also ahead of its arrival."""
        return (
            self._schedule.recent.knows(topic, message_id)
            or self._schedule.queries.find(message_id, (topic,)) is not None
        )

    @property
    def lateness(self) -> Lateness:
        """The histogram of how late messages reached the target."""
        return self.service.lateness

    # -- what operators ask ------------------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raise StorageFailed if nothing can be accepted, including for lack of disk space: existing messages are still
        dispatched then, and can be canceled; or if the schedule's storage allows no dispatch. An unavailable target
        does not matter here.
        """
        self._schedule.check_ready()
        self.service.check_ready()
        if self._room is not None:
            self._room.check_room()

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Returns totals since the start, by (what, topic, status)."""
        return dict(self._counters)

    def log_figures(self) -> Mapping[str, int]:
        """Returns the schedule's figures; of the process its syncs, its disk's space, whether publishes are refused."""
        disk = None if self._room is None else self._room.disk_space()
        space = {} if disk is None else {"disk_free_bytes": disk.free_bytes, "disk_size_bytes": disk.total_bytes}
        return {
            **self.schedule_figures(),
            **space,
            "syncs": sum(count for _, count in self.syncs.counts()),
            "publishes_refused": 0 if has_room(self._room) else 1,
        }

    def schedule_figures(self) -> Mapping[str, int]:
        """Returns bytes in memory and in the log, the number of scheduled messages and of damaged ones, and how long
        the longest due message has waited for the target.
        """
        figures = self._schedule.queries.figures()
        return {
            "overdue_ms": self.service.overdue_ms(),
            "messages_bytes": figures["in_memory_bytes"],
            "actions_bytes": figures["log_bytes"],
            "scheduled": figures["scheduled"],
            "quarantined_runs": figures["quarantined_runs"],
            "quarantined_scheduled": figures["quarantined_messages"],
        }

    def topics(self) -> list[str]:
        """Returns the topics with scheduled messages."""
        return list(self._schedule.queries.topics())

    def topic_counts(self) -> Mapping[str, int]:
        """Returns how many messages are scheduled, by topic."""
        return self._schedule.queries.topics()

    def topic_figures(self, topic: str) -> Mapping[str, int]:
        """Returns what is scheduled; nothing else is stored here."""
        return topic_figures(stored=0, scheduled=self._schedule.count_undelivered(topic), groups=())

    def groups(self, _topic: str) -> list[str]:
        """Returns none: consumers pull from the target."""
        return []


class DelayOperations:
    """A delay service as a whole; see ForOperators. What its target refused for good is scheduled, and left."""

    def __init__(self, schedule: DelayStore, cordon: Cordon) -> None:
        self._schedule = schedule
        self.cordon = cordon

    def remainder(self) -> Iterator[TopicRemainder]:
        """Yields each topic with scheduled messages."""
        for topic in sorted(self._schedule.queries.topics()):
            scheduled = self._schedule.count_undelivered(topic)
            if scheduled:
                yield TopicRemainder(topic=topic, scheduled=scheduled, groups=[])

    def is_dispatching(self) -> bool:
        """Returns whether messages were claimed that the target does not have yet."""
        return bool(self._schedule.queries.figures()["handed_out"])
