"""Publishes batches to JetStream: each stream acknowledges its messages; elections of leaders are waited out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final

from broker_adapter.nats.batch_results import NatsBatchResults, PubAck
from broker_adapter.nats.durability_inspection import StreamApi, unseen, weaknesses_of
from broker_adapter.nats.failover_connection import FailoverConnection, NatsServers
from broker_adapter.nats.message_conversion import subject_of
from broker_adapter.nats.outstanding_publishes import NoAnswerReason
from broker_adapter.nats.process_session import ProcessSession
from broker_adapter.nats.unserved_subject_diagnosis import defer_unserved
from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthorized
from outbox_core.messages.capabilities import Capability
from outbox_core.messages.durability_inspection import Inspection
from outbox_core.messages.message import Message, PublishResult

REPEAT_S_MIN: Final = 0.05
REPEAT_S_MAX: Final = 1.0


class NatsPublisher:
    """A Publisher. Thread-safe; a forked child gets a connection of its own."""

    def __init__(self, servers: NatsServers, *, prefix: str = "", random: Random | None = None) -> None:
        """`prefix` stands before each topic, with a dot between."""
        self._servers = servers
        self._prefix = prefix
        self._session = ProcessSession(servers, random=random)

    @property
    def product(self) -> str:
        """The engine's name."""
        return "NATS JetStream"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """A stream drops repeats within its duplicate window."""
        return frozenset({Capability.DEDUPLICATION})

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """Publish in order, many at a time. What gets no answer is published again until the time-out: a stream whose
        leader is being elected answers nobody.
        """
        return self._session.call(partial(self._publish, batch), timeout_s=timeout_ms / 1000)

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """Ask about the streams of these topics. How often a server syncs its files cannot be asked as a user."""
        return self._session.call(partial(self._inspect, topics), timeout_s=timeout_ms / 1000)

    def close(self) -> None:
        """End the connection and the thread; idempotent."""
        self._session.close()

    async def _publish(
        self, messages: Sequence[Message], connector: FailoverConnection, deadline: float
    ) -> list[PublishResult]:
        batch = NatsBatchResults(messages, prefix=self._prefix)
        try:
            await self._publish_all(batch, connector, deadline)
        except BrokerError as error:
            error.with_answered(batch.answered())
            raise
        return batch.in_order()

    async def _publish_all(self, batch: NatsBatchResults, connector: FailoverConnection, deadline: float) -> None:
        pause_s = REPEAT_S_MIN
        while batch.frames:
            connection = await connector.connected(deadline=deadline)
            batch.reject_larger(connection.max_payload)
            answers = await connection.exchange(list(batch.frames.values()), PubAck, deadline=deadline)
            unanswered = batch.settle_answered(answers)
            if NoAnswerReason.SILENT in unanswered.values() and not await connection.is_alive(deadline=deadline):
                await connector.drop(connection)
            else:
                await defer_unserved(batch, unanswered, StreamApi(connection, deadline=deadline))
            if batch.frames:
                try:
                    await self._pause(pause_s, deadline=deadline, problem=batch.problem)
                except BrokerUnavailable:
                    # A server that is cut off from its cluster answers pings: the next publish goes to another one.
                    await connector.drop(connection)
                    raise
                pause_s = min(2 * pause_s, REPEAT_S_MAX)

    async def _inspect(self, topics: Sequence[str], connector: FailoverConnection, deadline: float) -> Inspection:
        subjects = [subject_of(topic, prefix=self._prefix) for topic in topics]
        pause_s = REPEAT_S_MIN
        while True:
            connection = await connector.connected(deadline=deadline)
            try:
                weaknesses = await weaknesses_of(subjects, api=StreamApi(connection, deadline=deadline))
            except NotAuthorized as error:
                weaknesses = [unseen(error)]
            except BrokerUnavailable as error:
                if not await connection.is_alive(deadline=deadline):
                    await connector.drop(connection)
                await self._pause(pause_s, deadline=deadline, problem=str(error))
                pause_s = min(2 * pause_s, REPEAT_S_MAX)
                continue
            return Inspection(product=self.product, version=connection.version, weaknesses=tuple(weaknesses))

    async def _pause(self, pause_s: float, *, deadline: float, problem: str) -> None:
        """Wait before the next try, where there is time for one."""
        if asyncio.get_running_loop().time() + pause_s >= deadline:
            raise BrokerUnavailable(f"NATS at {self._servers.place}, until the time-out: {problem}")
        await asyncio.sleep(pause_s)
