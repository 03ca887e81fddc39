"""BroadcastReader: reads a topic for a broadcast consumer, tracks its offset, and retries failed messages. No threads.

No other consumer gets a message that this process fails to handle, so it is retried in place and blocks later ones:
none is handled before this one has been handled or given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Final

import msgspec

from outbox.consumers.handler import Consumer, Outcome, RetryLater
from outbox.telemetry import Telemetry
from outbox_core.common.backoff import Backoff
from outbox_core.messages.broadcast_port import Broadcaster, Start, TopicRead
from outbox_core.messages.limits import ATTEMPTS_MAX_DEFAULT
from outbox_core.messages.message import Delivery
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

RETRIES: Final = Backoff(initial_ms=200, multiplier=2, max_ms=30_000, jitter=0.5)
"""The backoff between the attempts at one message."""
_NO_RECEIPT: Final = ""
"""What is read without a group has nothing to settle."""


class BroadcastReader:
    """The position of one consumer in one topic. For one thread."""

    def __init__(
        self,
        consumer: Consumer,
        topic: str,
        *,
        start: Start,
        broker: Broadcaster,
        call: Callable[[Consumer, Delivery], Outcome],
        failed: Callable[[Consumer, Delivery, BaseException], None],
        count: Callable[[str], None],
        pause: Callable[[float], bool],
        telemetry: Telemetry,
        random: Random,
        retries: Backoff = RETRIES,
    ) -> None:
        """`call` handles a delivery, `failed` logs its error, `count` counts an outcome, `pause` waits for seconds and
        returns whether the consumer stops. `retries`: the backoff between the attempts at one message.
        """
        self._consumer, self._topic, self._start = consumer, topic, start
        self._broker, self._call, self._failed, self._count, self._pause = broker, call, failed, count, pause
        self._telemetry, self._random, self._retries = telemetry, random, retries
        self._offset: int | None = None

    def round(self, *, wait_ms: int) -> None:
        """Read once, and handle the messages. The first read does not wait: it determines where this consumer begins.

        Raises the broker's errors; messages that were read and not handled are read again.
        """
        started_at_ns = time.time_ns()
        topic_read = self._broker.read(
            self._topic, offset=self._offset, start=self._start, max_messages=self._consumer.prefetch,
            wait_ms=0 if self._offset is None else wait_ms,
        )  # fmt: skip
        self._log_gaps(topic_read)
        if self._offset is not None and topic_read.next_offset < self._offset:
            self._offset = None  # start again, as at first
            return
        deliveries = [Delivery(receipt=_NO_RECEIPT, attempt=1, message=message) for message in topic_read.messages]
        if deliveries:
            self._telemetry.received(
                self._topic, self._consumer.group, deliveries=deliveries, started_at_ns=started_at_ns
            )
        for delivery in deliveries:
            if self._pause(0) or not self._settled(delivery):  # it stops between messages, not after the batch
                return
        self._offset = topic_read.next_offset

    def _settled(self, delivery: Delivery) -> bool:
        """Retry until the message is handled or given up; returns False if the consumer stops before."""
        for attempt in range(1, ATTEMPTS_MAX_DEFAULT + 1):
            failure = self._try(msgspec.structs.replace(delivery, attempt=attempt))
            if failure is None:
                return True
            if attempt == ATTEMPTS_MAX_DEFAULT:
                break
            requested_ms = failure.delay_ms if isinstance(failure, RetryLater) else None
            pause_ms = self._retries.delay_ms(attempt, self._random) if requested_ms is None else requested_ms
            if self._pause(pause_ms / 1000):
                return False
        self._count("given_up")
        self._telemetry.counted("broadcast_given_up", self._topic, self._consumer.group)
        logger.error(
            "broadcast_given_up",
            extra={"message_id": delivery.id, "topic": self._topic, "group": self._consumer.group,
                   "attempts": ATTEMPTS_MAX_DEFAULT},
        )  # fmt: skip
        return True

    def _try(self, delivery: Delivery) -> BaseException | None:
        """Returns the error that the handler raised."""
        group = self._consumer.group
        with self._telemetry.handling(delivery, group=group) as handling:
            try:
                outcome = self._call(self._consumer, delivery)
            except BaseException as error:  # noqa: BLE001 - the boundary to the user's code: "not handled"
                handling.outcome = "retry_later" if isinstance(error, RetryLater) else "failed"
                handling.error = None if isinstance(error, RetryLater) else error
                failure = error
            else:
                handling.outcome = str(outcome)
                self._count(outcome)
                return None
        self._count("failed")
        self._failed(self._consumer, delivery, failure)
        return failure

    def _log_gaps(self, topic_read: TopicRead) -> None:
        """Log gaps: retention may have dropped messages before this consumer read them, or the broker may have lost its
        data and started again.
        """
        if self._offset is None:
            return
        group = self._consumer.group
        if topic_read.offset > self._offset:
            missed = topic_read.offset - self._offset
            self._telemetry.counted("broadcast_missed", self._topic, group, by=missed)
            logger.error("broadcast_missed", extra={"topic": self._topic, "group": group, "messages": missed})
        if topic_read.next_offset < self._offset:
            self._telemetry.counted("broadcast_begun_anew", self._topic, group)
            logger.error(
                "broadcast_begun_anew",
                extra={
                    "topic": self._topic,
                    "group": group,
                    "place": self._offset,
                    "topic_ends_at": topic_read.next_offset,
                },
            )
