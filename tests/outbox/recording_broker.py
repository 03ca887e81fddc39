"""A Broker in memory that records, and fails when told to. Not a stand-in for delivery: it hands nothing out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from outbox_core import (
    AckStatus,
    BrokerAdmin,
    CancelStatus,
    Delivery,
    ExtendStatus,
    Message,
    NackStatus,
    PublishResult,
    PublishStatus,
)
from outbox_core.common.errors import NotSupported
from outbox_core.messages.broker_port import Capability

WAIT_SECONDS = 300.0

Rule = Callable[[Sequence[Message]], None]


class RecordingBroker:
    """Stores each id once, like a broker with a dedup window. `rule`, if set, sees a batch first and may raise."""

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = rule
        self.batches: list[list[Message]] = []
        self.stored: list[Message] = []
        self.duplicates: list[str] = []
        self.canceled: list[str] = []
        self.rejects: dict[str, str] = {}
        self.defers: dict[str, str] = {}
        self._changed = threading.Condition()

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Ask the rule, then store."""
        with self._changed:
            self.batches.append(list(batch))
            self._changed.notify_all()
        if self.rule is not None:
            self.rule(batch)
        with self._changed:
            results = [self._store(message) for message in batch]
            self._changed.notify_all()
        return results

    def pull(
        self, topic: str, group: str, *, max_messages: int = 100, wait_ms: int = 0, invisible_ms: int = 30_000
    ) -> list[Delivery]:
        """It has no consumers."""
        raise NotSupported("this broker only records")

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """It has no consumers."""
        raise NotSupported("this broker only records")

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """It has no consumers."""
        raise NotSupported("this broker only records")

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """It has no consumers."""
        raise NotSupported("this broker only records")

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Canceled where the message is here, unknown otherwise."""
        with self._changed:
            self.canceled += message_ids
            known = {message.id for message in self.stored}
            self._changed.notify_all()
        return [CancelStatus.CANCELED if one in known else CancelStatus.UNKNOWN for one in message_ids]

    @property
    def admin(self) -> BrokerAdmin:
        """It has none."""
        raise NotSupported("this broker only records")

    def close(self) -> None:
        """Nothing to let go of."""

    @property
    def topics(self) -> list[str]:
        """The topics of what was stored, in order."""
        with self._changed:
            return [message.topic for message in self.stored]

    @property
    def ids(self) -> list[str]:
        """The ids of what was stored, in order."""
        with self._changed:
            return [message.id for message in self.stored]

    def wait_for(self, condition: Callable[[RecordingBroker], bool]) -> None:
        """Wait until the condition holds; it is asked again after each call that this broker gets."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), WAIT_SECONDS):
                raise TimeoutError(f"the broker stored {len(self.stored)} message(s) and then no more came")

    def _store(self, message: Message) -> PublishResult:
        if message.id in self.rejects:
            return PublishResult(message.id, PublishStatus.REJECTED, self.rejects[message.id])
        if message.id in self.defers:
            return PublishResult(message.id, PublishStatus.DEFERRED, self.defers[message.id])
        if any(message.id == one.id for one in self.stored):
            self.duplicates.append(message.id)
            return PublishResult(message.id, PublishStatus.DUPLICATE)
        self.stored.append(message)
        return PublishResult(message.id, PublishStatus.STORED)


class PromptBroker(RecordingBroker):
    """One that cannot delay, nor cancel."""

    capabilities: frozenset[Capability] = frozenset()
