"""ConsumerRun: runs consumers in the test's thread until no message is due: no broker process, threads or waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from outbox.consumers.group_declaration import GroupDeclarer
from outbox.consumers.handler import (
    ENDED_BY_HANDLER,
    Consumer,
    Outcome,
    RetryLater,
    await_handler,
    call_handler,
    reason_for,
)
from outbox.store.schema import RowKind
from outbox.testing.capture import Capture
from outbox.testing.memory_broker_port import MemoryBroker
from outbox_core.common.errors import ConfigurationError, NoTransaction
from outbox_core.messages.message import Delivery

DELIVERIES_MAX: Final = 10_000
_SAVEPOINT: Final = "create_savepoint"
_GROUP_CHARS: Final = 200


@dataclass(slots=True)
class RunReport:
    """Counts of a run's deliveries. `put_off`: those whose handler raised RetryLater."""

    handled: int = 0
    deduplicated: int = 0
    put_off: int = 0


class ConsumerRun:
    """Delivers the messages of the test and those of its consumers to its consumers, until no message is due.

        outbox_run([issue_ticket])                 in a plain test
        await outbox_run.awaited([issue_ticket])   in an async one

    A handler's error is raised in the test; its message is due again, and the next run redelivers it.
    """

    def __init__(self, *, capture: Capture, broker: MemoryBroker, deliveries_max: int = DELIVERIES_MAX) -> None:
        """A run that goes on for `deliveries_max` rounds of its consumers fails."""
        self._capture = capture
        self._broker = broker
        self._deliveries_max = deliveries_max
        self._forwarding = threading.Lock()
        self._groups = GroupDeclarer(broker)
        capture.deliver = self.forward  # immediately, or a timely cancel would be too late

    def __call__(self, consumers: Sequence[Consumer], *, connection: Connection | None = None) -> RunReport:
        """Run until no message is due. `connection`: handlers with an inbox work in savepoints of its open
        transaction, as the code under test does if the test rolls everything back.
        """
        if any(consumer.is_async for consumer in consumers):
            return self._in_a_loop_of_its_own(consumers, connection)
        report = RunReport()
        for consumer, delivery in self._due(consumers):
            with self._settled(delivery, report):
                _count(report, _handle(consumer, delivery, connection))
        return report

    async def awaited(self, consumers: Sequence[Consumer], *, connection: AsyncConnection | None = None) -> RunReport:
        """The same in the running event loop, for `async def` handlers and plain ones."""
        report = RunReport()
        for consumer, delivery in self._due(consumers):
            with self._settled(delivery, report):
                if consumer.is_async:
                    _count(report, await _handle_async(consumer, delivery, connection))
                else:
                    _count(report, consumer.handle(delivery))
        return report

    def forward(self) -> None:
        """Publish the captured messages to the in-memory broker, which drops those that a sender has published."""
        rows = self._capture.undelivered
        with self._forwarding:
            while rows:
                if rows[0].kind is RowKind.CANCEL:
                    self._broker.cancel([rows[0].cancels])
                else:
                    self._broker.publish([rows[0].message()])
                rows.popleft()

    def _due(self, consumers: Sequence[Consumer]) -> Iterator[tuple[Consumer, Delivery]]:
        """Yields deliveries of each consumer and topic in turn, until a whole round has none."""
        subscriptions = [(consumer, topic) for consumer in consumers for topic in consumer.topics]
        empty_pulls = 0
        for step in range(self._deliveries_max * max(1, len(subscriptions))):
            if empty_pulls >= len(subscriptions):
                return
            consumer, topic = subscriptions[step % len(subscriptions)]
            self.forward()
            if consumer.broadcast is None:
                self._groups.declare(topic, consumer.group, consumer.options)
            deliveries = self._broker.pull(topic, _group(consumer), max_messages=1, invisible_ms=consumer.invisible_ms)
            empty_pulls = 0 if deliveries else empty_pulls + 1
            for delivery in deliveries:
                yield consumer, delivery
        raise AssertionError(
            f"still messages after {self._deliveries_max:,} rounds: does a handler publish to its own topic?"
        )

    @contextmanager
    def _settled(self, delivery: Delivery, report: RunReport) -> Iterator[None]:
        """Settle the delivery at the block's end: after an error it is nacked and the error re-raised."""
        try:
            yield
        except RetryLater as retry:
            report.put_off += 1
            self._broker.nack([delivery.receipt], delay_ms=retry.delay_ms, reason=str(retry))
        except BaseException as error:
            self._broker.nack([delivery.receipt], delay_ms=0, reason=reason_for(error))
            raise
        else:
            self._broker.ack([delivery.receipt])

    def _in_a_loop_of_its_own(self, consumers: Sequence[Consumer], connection: Connection | None) -> RunReport:
        if connection is not None or _in_a_loop():
            raise ConfigurationError("write `await outbox_run.awaited(...)`, with an AsyncConnection if with any")
        return asyncio.run(self._awaited_and_disposed(consumers))

    async def _awaited_and_disposed(self, consumers: Sequence[Consumer]) -> RunReport:
        try:
            return await self.awaited(consumers)
        finally:
            for engine in {consumer.async_engine for consumer in consumers if consumer.async_engine is not None}:
                await engine.dispose()  # its connections belong to this loop, which ends


def _group(consumer: Consumer) -> str:
    """Returns the consumer's group; for a broadcast consumer, whose group is only a name, one of its own."""
    if consumer.broadcast is None:
        return consumer.group
    return f"{consumer.group[:_GROUP_CHARS]}-broadcast-{id(consumer.handler)}"


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _handle(consumer: Consumer, delivery: Delivery, connection: Connection | None) -> Outcome:
    if connection is None or consumer.store is None:
        return consumer.handle(delivery)
    with Session(connection, join_transaction_mode=_SAVEPOINT) as session, session.begin():
        if not _mark(consumer, delivery, session.connection()):
            return Outcome.DEDUPLICATED
        call_handler(consumer.handler, session, delivery)
    _refuse_unmarked(connection, consumer, delivery)
    return Outcome.HANDLED


async def _handle_async(consumer: Consumer, delivery: Delivery, connection: AsyncConnection | None) -> Outcome:
    if connection is None or consumer.store is None:
        return await consumer.handle_async(delivery)
    async with AsyncSession(connection, join_transaction_mode=_SAVEPOINT) as session, session.begin():
        inner = await session.connection()
        if not await inner.run_sync(lambda sync_connection: _mark(consumer, delivery, sync_connection)):
            return Outcome.DEDUPLICATED
        await await_handler(consumer.handler, session, delivery)
    await connection.run_sync(_refuse_unmarked, consumer, delivery)
    return Outcome.HANDLED


def _mark(consumer: Consumer, delivery: Delivery, connection: Connection) -> bool:
    return consumer.store is None or consumer.store.mark(
        connection, group=consumer.group, message_id=delivery.id, topic=delivery.topic
    )


def _refuse_unmarked(connection: Connection, consumer: Consumer, delivery: Delivery) -> None:
    """Raise the error that a handler gets in production which has rolled back or closed its session and returned."""
    if consumer.store is not None and not consumer.store.handled(
        connection, group=consumer.group, message_id=delivery.id, topic=delivery.topic
    ):
        raise NoTransaction(ENDED_BY_HANDLER)


def _count(report: RunReport, outcome: Outcome) -> None:
    if outcome is Outcome.HANDLED:
        report.handled += 1
    else:
        report.deduplicated += 1
