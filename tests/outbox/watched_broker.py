"""The embedded broker, watched: tests wait for what consumers did to it. Not a fake: it delivers for real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broker_adapter.embedded import EmbeddedAdmin, EmbeddedBroker
from outbox.testing import AdvancingClock
from outbox_core import AckStatus, Clock, Delivery, ExtendStatus, GroupConfig, Message, NackStatus
from outbox_core.common.errors import BrokerError, BrokerUnavailable
from outbox_core.messages.broadcast_port import TopicRead

WAIT_SECONDS = 300
WAKE_EVERY_SECONDS = 0.05
HOUR_MS = 3_600_000


class WatchedBroker(EmbeddedBroker):
    """The embedded broker; it never waits long for a message, and tells a test what consumers did.

    `ack_fails` has the errors of the next acks: with `ack_arrives` the broker has taken the ack all the same.
    """

    def __init__(self, folder: Path, *, clock: Clock | None = None) -> None:
        super().__init__(f"embedded:{folder}", clock=clock)
        self._told = threading.Condition()
        self.pulled = 0
        self.acked = 0
        self.acks: list[list[AckStatus]] = []
        self.nacks: list[dict[str, Any]] = []
        self.extended = 0
        self.extends: list[list[ExtendStatus]] = []
        self.nack_fails = False
        self.extend_fails = False
        self.ack_fails: list[BrokerError] = []
        self.ack_arrives = True
        self.closed = False
        self.begun = 0
        self.read_fails: list[BrokerError] = []
        self.pull_fails: list[Exception] = []
        self.settings_fail = 0

    @property
    def admin(self) -> EmbeddedAdmin:
        if self.settings_fail:
            self.settings_fail -= 1
            raise BrokerUnavailable("down")
        return super().admin

    def pull(self, topic: str, group: str, *, wait_ms: int = 0, **options: Any) -> list[Delivery]:
        if self.pull_fails:
            error = self.pull_fails.pop()
            self._tell(lambda: None)
            raise error
        found = super().pull(topic, group, wait_ms=min(wait_ms, 20), **options)
        self._tell(lambda: setattr(self, "pulled", self.pulled + len(found)))
        return found

    def read(self, topic: str, *, wait_ms: int = 0, **options: Any) -> TopicRead:
        if self.read_fails:
            raise self.read_fails.pop()
        found = super().read(topic, wait_ms=min(wait_ms, 20), **options)
        if options.get("offset") is None:  # the first one of its reader: what is published from here on is for it
            self._tell(lambda: setattr(self, "begun", self.begun + 1))
        return found

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        if self.ack_fails:
            if self.ack_arrives:
                super().ack(receipts)
            error = self.ack_fails.pop()
            self._tell(lambda: None)
            raise error
        statuses = super().ack(receipts)
        self._tell(lambda: (self.acks.append(statuses), setattr(self, "acked", self.acked + len(receipts))))
        return statuses

    def nack(self, receipts: Sequence[str], **options: Any) -> list[NackStatus]:
        if self.nack_fails:
            self._tell(lambda: self.nacks.append(options))
            raise BrokerUnavailable("down")
        statuses = super().nack(receipts, **options)
        self._tell(lambda: self.nacks.append(options))  # not before: a test then asks the broker what became of it
        return statuses

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        if self.extend_fails:
            self._tell(lambda: self.extends.append([]))
            raise BrokerUnavailable("down")
        statuses = super().extend(receipts, invisible_ms=invisible_ms, begun=begun)
        extended = statuses.count(ExtendStatus.EXTENDED)
        self._tell(lambda: (self.extends.append(statuses), setattr(self, "extended", self.extended + extended)))
        return statuses

    def close(self) -> None:
        self.closed = True
        super().close()

    def repeat_nothing(self) -> None:
        """Let what fails in the group g of `orders` wait for an hour, so that a test sees it fail once."""
        self.admin.declare_group("orders", "g", GroupConfig(backoff_initial_ms=HOUR_MS, backoff_max_ms=HOUR_MS))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until what consumers did makes the condition true."""
        with self._told:
            assert self._told.wait_for(condition, WAIT_SECONDS)

    def wait_at_most(self, seconds: float, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true, or go on without it: for random programs alone."""
        with self._told:
            self._told.wait_for(condition, seconds)

    def wait_while_time_passes(self, condition: Callable[[], bool], clock: AdvancingClock, ms: int) -> None:
        """Let the time pass, and wait until what consumers did makes the condition true.

        They are woken again and again: one that was just about to wait has missed the clock's call.
        """
        clock.advance(ms)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            with self._told:
                if self._told.wait_for(condition, WAKE_EVERY_SECONDS):
                    return
            assert time.monotonic() < deadline
            clock.advance(0)

    def wait_until_extended(self, clock: AdvancingClock, *, invisible_ms: int, deliveries: int = 1) -> None:
        """Let half an invisible time pass, and wait until a consumer has extended what it has in hand: all of that, as
        it takes a request for those that are begun and one for the others.
        """
        extended = self.extended + deliveries
        self.wait_while_time_passes(lambda: self.extended >= extended, clock, invisible_ms // 2)

    def tell(self) -> None:
        """Something else happened: have whoever waits look again."""
        self._tell(lambda: None)

    def _tell(self, note: Callable[[], object]) -> None:
        with self._told:
            note()
            self._told.notify_all()


def message(number: int = 1, *, topic: str = "orders", body: bytes | None = None) -> Message:
    """A message that asks for a payment."""
    return Message(id=f"m-{number}", topic=topic, body=str(number).encode() if body is None else body)


def delivery(number: int = 1, *, attempt: int = 1) -> Delivery:
    """A hand-out of such a message."""
    return Delivery(receipt=f"r-{number}", attempt=attempt, message=message(number))
