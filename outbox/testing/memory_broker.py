"""A broker in this process's memory, for tests: `memory://name`. It keeps every promise but durability. Not for work.

Time is its clock's alone: with a ManualClock or an AdvancingClock, what is scheduled falls due when the test says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from outbox.testing.memory_admin import MemoryAdmin
from outbox.testing.memory_group import MemoryGroup, Slot
from outbox.testing.memory_store import MemoryStore, store_named
from outbox.testing.memory_topics import MemoryLimits, MemoryTopics
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError, BrokerUnavailable, ConfigurationError, InvalidMessage
from outbox_core.messages.broadcast_port import Start, TopicRead, check_start
from outbox_core.messages.broker_port import BrokerAdmin
from outbox_core.messages.limits import (
    DELAY_MAX_MS,
    INVISIBLE_MS_DEFAULT,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    PULL_MESSAGES_MAX,
    PULL_WAIT_MS_MAX,
    REASON_CHARS_MAX,
)
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    Delivery,
    ExtendStatus,
    Message,
    NackStatus,
    PublishResult,
    check_group,
    check_topic,
)

SCHEME: Final = "memory"
WAIT_SLICE_MS: Final = 1_000
"""A long poll reads the wall clock anew at least so often: it may have been stepped."""

_RECEIPT = re.compile(r"([A-Za-z0-9._-]{1,255})/([A-Za-z0-9._-]{1,255})/(\d{1,18})\.(\d{1,18})", re.ASCII)
T = TypeVar("T")


class MemoryBroker:
    """The Broker port in memory. Thread-safe, bounded by MemoryLimits; it does no I/O and starts no thread.

    `MemoryBroker()` is one of its own. `memory://shop` is shared by all in this process that name it, for as long as
    one of them lives: the Outbox of a test and its consumers meet there. A forked child has a copy of its own.
    """

    def __init__(
        self, url: str = "memory://", *, clock: Clock | None = None, limits: MemoryLimits | None = None
    ) -> None:
        """`clock` and `limits` are those of whoever names a shared broker first."""
        self._store = store_named(_name_in(url), clock=clock, limits=limits)
        self._closed = False

    # -- the port ----------------------------------------------------------------------------------------------------

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch. StorageFailed where it is full: what came before is stored, and a duplicate next time."""
        with self._open() as store:
            now_ms = store.clock.now_ms()
            store.topics.fire_due(now_ms=now_ms)
            try:
                return [store.topics.publish(_own_copy(message, now_ms=now_ms), now_ms=now_ms) for message in batch]
            finally:
                store.changed.notify_all()

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = INVISIBLE_MS_DEFAULT,
    ) -> list[Delivery]:
        """Take what is ready, waiting up to `wait_ms` for the first; an unknown group starts at the earliest."""
        check_topic(topic)
        check_group(group)
        _check_within("max_messages", max_messages, 1, PULL_MESSAGES_MAX)
        _check_within("wait_ms", wait_ms, 0, PULL_WAIT_MS_MAX)
        _check_within("invisible_ms", invisible_ms, INVISIBLE_MS_MIN, INVISIBLE_MS_MAX)
        with self._open() as store:
            deadline_ms = store.clock.monotonic_ms() + wait_ms
            while True:
                found = self._take(store, topic, group, count_max=max_messages, invisible_ms=invisible_ms)
                left_ms = deadline_ms - store.clock.monotonic_ms()
                if found or left_ms <= 0 or self._closed:
                    return found
                store.clock.wait(
                    store.changed, min(left_ms, self._next_look_ms(store, store.topics.group(topic, group)))
                )
                store.raise_outage()

    def read(
        self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int = 100,
        wait_ms: int = 0,
    ) -> TopicRead:  # fmt: skip
        """Read a topic on, without a group, waiting up to `wait_ms` for the first message."""
        check_topic(topic)
        check_start(start)
        _check_within("max_messages", max_messages, 1, PULL_MESSAGES_MAX)
        _check_within("wait_ms", wait_ms, 0, PULL_WAIT_MS_MAX)
        with self._open() as store:
            place = offset
            if place is None:
                place = store.topics.read(topic, 1 << 62, count_max=1).next_offset if start == "latest" else 0
            deadline_ms = store.clock.monotonic_ms() + wait_ms
            while True:
                store.topics.fire_due(now_ms=store.clock.now_ms())
                found = store.topics.read(topic, place, count_max=max_messages)
                left_ms = deadline_ms - store.clock.monotonic_ms()
                if found.next_offset != place or left_ms <= 0 or self._closed:
                    return found
                store.clock.wait(store.changed, min(left_ms, self._next_look_ms(store)))
                store.raise_outage()

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries."""

        def ack(group: MemoryGroup, sequence: int, number: int) -> AckStatus:
            return group.ack(sequence, number)

        return self._settle(receipts, ack, otherwise=AckStatus.UNKNOWN)

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back."""
        _check_within("delay_ms", delay_ms or 0, 0, DELAY_MAX_MS)
        now_ms = self._store.clock.now_ms()

        def nack(group: MemoryGroup, sequence: int, number: int) -> NackStatus:
            said = (reason or "")[:REASON_CHARS_MAX]
            return group.nack(sequence, number, now_ms=now_ms, delay_ms=delay_ms, reason=said, counts=counts)

        return self._settle(receipts, nack, otherwise=NackStatus.STALE)

    def extend(self, receipts: Sequence[str], *, invisible_ms: int) -> list[ExtendStatus]:
        """Keep deliveries invisible."""
        _check_within("invisible_ms", invisible_ms, INVISIBLE_MS_MIN, INVISIBLE_MS_MAX)
        until_ms = self._store.clock.now_ms() + invisible_ms

        def extend(group: MemoryGroup, sequence: int, number: int) -> ExtendStatus:
            return ExtendStatus.EXTENDED if group.extend(sequence, number, until_ms=until_ms) else ExtendStatus.STALE

        return self._settle(receipts, extend, otherwise=ExtendStatus.STALE)

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel scheduled messages."""
        with self._open() as store:
            store.topics.fire_due(now_ms=store.clock.now_ms())
            return [store.topics.cancel(message_id) for message_id in message_ids]

    @property
    def admin(self) -> BrokerAdmin:
        """The operator's half."""
        return MemoryAdmin(self._open)

    def close(self) -> None:
        """Use it no more; what it holds stays with those who share its name. Idempotent."""
        with self._store.changed:
            self._closed = True
            self._store.changed.notify_all()

    # -- for tests ---------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """What it asks for the time."""
        return self._store.clock

    def clear(self) -> None:
        """Forget all messages, topics and groups."""
        with self._open() as store:
            store.topics.clear()
            store.changed.notify_all()

    @contextmanager
    def out_of_service(self, error: BrokerError | None = None) -> Iterator[None]:
        """Inside the block every call raises this error, BrokerUnavailable by default, as in an outage."""
        with self._store.changed:
            self._store.outage = error or BrokerUnavailable("the in-memory broker is out of service, as the test asked")
            self._store.changed.notify_all()
        try:
            yield
        finally:
            with self._store.changed:
                self._store.outage = None

    # -- helpers -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[MemoryStore]:
        """The store, locked."""
        with self._store.changed:
            if self._closed:
                raise ConfigurationError("this broker was closed; connect again")
            self._store.raise_outage()
            yield self._store

    def _take(self, store: MemoryStore, topic: str, group: str, *, count_max: int, invisible_ms: int) -> list[Delivery]:
        now_ms = store.clock.now_ms()
        store.topics.fire_due(now_ms=now_ms)
        taker = store.topics.group(topic, group)
        messages = store.topics.topic(topic).messages
        slots = taker.take(
            end=len(messages), count_max=count_max, now_ms=now_ms, invisible_ms=invisible_ms,
            key_of=lambda sequence: messages[sequence].message.key,
        )  # fmt: skip
        return [_delivery(messages[slot.sequence].message, group, slot) for slot in slots]

    @staticmethod
    def _next_look_ms(store: MemoryStore, group: MemoryGroup | None = None) -> int:
        """How long nothing will come by itself; a publish wakes earlier."""
        moments = (store.topics.next_due_ms(), None if group is None else group.next_visible_ms())
        now_ms = store.clock.now_ms()
        return min([max(1, one - now_ms) for one in moments if one is not None] + [WAIT_SLICE_MS])

    def _settle(
        self, receipts: Sequence[str], settle: Callable[[MemoryGroup, int, int], T], *, otherwise: T
    ) -> list[T]:
        with self._open() as store:
            statuses = []
            for receipt in receipts:
                found = _place_of(receipt, store.topics)
                statuses.append(otherwise if found is None else settle(*found))
            store.changed.notify_all()
            return statuses


def _name_in(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != SCHEME or parts.query or parts.path.strip("/"):
        raise ConfigurationError(f"an in-memory broker's URL is memory://NAME, not {url!r}")
    return unquote(parts.netloc)


def _own_copy(message: Message, *, now_ms: int) -> Message:
    """The message as a network would have carried it: what its sender changes later does not reach consumers."""
    return Message(
        id=message.id, topic=message.topic, body=bytes(message.body), key=message.key, headers=dict(message.headers),
        created_at_ms=message.created_at_ms or now_ms, deliver_at_ms=message.deliver_at_ms,
    )  # fmt: skip


def _delivery(message: Message, group: str, slot: Slot) -> Delivery:
    return Delivery(
        receipt=f"{message.topic}/{group}/{slot.sequence}.{slot.number}", id=message.id, topic=message.topic,
        body=message.body, key=message.key, headers=dict(message.headers), attempt=slot.attempts,
        created_at_ms=message.created_at_ms, deliver_at_ms=message.deliver_at_ms,
    )  # fmt: skip


def _place_of(receipt: str, topics: MemoryTopics) -> tuple[MemoryGroup, int, int] | None:
    """Group, sequence and number of a receipt; None for one that nobody was given."""
    match = _RECEIPT.fullmatch(receipt)
    topic = topics.topics.get(match[1]) if match is not None else None
    if match is None or topic is None or match[2] not in topic.groups:
        return None
    return topic.groups[match[2]], int(match[3]), int(match[4])


def _check_within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidMessage(f"{name} must be from {low:,} to {high:,}, not {value:,}")
