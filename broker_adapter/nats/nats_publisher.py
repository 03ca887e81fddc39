"""Publishes batches to JetStream: each stream acknowledges its messages; elections of leaders are waited out."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

from broker_adapter.nats.batch_results import NatsPublishBatch, PubAck
from broker_adapter.nats.durability_inspection import StreamApi, unseen, weaknesses_of
from broker_adapter.nats.event_loop import LoopThread
from broker_adapter.nats.failover_connection import Connector, NatsServers
from broker_adapter.nats.message_conversion import subject_of
from broker_adapter.nats.outstanding_publishes import NoAnswerReason
from outbox_core.common.errors import BrokerUnavailable, NotAuthorized
from outbox_core.messages.capabilities import Capability
from outbox_core.messages.durability_inspection import Inspection
from outbox_core.messages.message import Message, PublishResult

T = TypeVar("T")

GRACE_S: Final = 1.0
"""How much longer than the time-out a caller waits for the event loop to keep it."""
REPEAT_S_MIN: Final = 0.05
REPEAT_S_MAX: Final = 1.0


@dataclass(slots=True)
class _Session:
    """The session of one process: a thread with an event loop, and the connection on it."""

    thread: LoopThread
    connector: Connector


class NatsPublisher:
    """A Publisher. Thread-safe; a forked child gets a connection of its own."""

    def __init__(self, servers: NatsServers, *, prefix: str = "", random: Random | None = None) -> None:
        """`prefix` stands before each topic, with a dot between."""
        self._servers = servers
        self._prefix = prefix
        self._random = random or Random()
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._left: list[_Session] = []
        self._is_closed = False
        os.register_at_fork(after_in_child=partial(_reset_after_fork, weakref.ref(self)))

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
        return self._call(partial(self._publish, batch), timeout_s=timeout_ms / 1000)

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """Ask about the streams of these topics. How often a server syncs its files cannot be asked as a user."""
        return self._call(partial(self._inspect, topics), timeout_s=timeout_ms / 1000)

    def close(self) -> None:
        """End the connection and the thread; idempotent."""
        with self._lock:
            self._is_closed = True
            session, self._session = self._session, None
        if session is not None:
            session.thread.close()

    def reset_after_fork(self) -> None:
        """Forget the session in a forked child: thread and connection stay the parent's."""
        self._lock = threading.Lock()
        if self._session is not None:
            self._session.thread.leave_to_parent()
            self._left.append(self._session)
            self._session = None

    def _call(self, work: Callable[[Connector, float], Coroutine[Any, Any, T]], *, timeout_s: float) -> T:
        with self._lock:
            if self._is_closed:
                raise BrokerUnavailable(f"the broker for NATS at {self._servers.place} is closed; open a new one")
            if self._session is None:
                thread = LoopThread()
                self._session = _Session(thread, Connector(self._servers, loop=thread.loop, random=self._random))
            session = self._session
        deadline = session.thread.loop.time() + timeout_s
        return session.thread.call(partial(work, session.connector, deadline), timeout_s=timeout_s + GRACE_S)

    async def _publish(self, messages: Sequence[Message], connector: Connector, deadline: float) -> list[PublishResult]:
        batch = NatsPublishBatch(messages, prefix=self._prefix)
        pause_s = REPEAT_S_MIN
        while batch.frames:
            connection = await connector.connected(deadline=deadline)
            batch.reject_larger(connection.max_payload)
            answers = await connection.exchange(list(batch.frames.values()), PubAck, deadline=deadline)
            unanswered = batch.settle_answered(answers)
            if NoAnswerReason.SILENT in unanswered.values() and not await connection.is_alive(deadline=deadline):
                await connector.drop(connection)
            else:
                await _defer_homeless(batch, unanswered, StreamApi(connection, deadline=deadline))
            if batch.frames:
                try:
                    await self._pause(pause_s, deadline=deadline, problem=batch.problem)
                except BrokerUnavailable:
                    # A server that is cut off from its cluster answers pings: the next publish goes to another one.
                    await connector.drop(connection)
                    raise
                pause_s = min(2 * pause_s, REPEAT_S_MAX)
        return batch.in_order()

    async def _inspect(self, topics: Sequence[str], connector: Connector, deadline: float) -> Inspection:
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


async def _defer_homeless(batch: NatsPublishBatch, unanswered: Mapping[str, NoAnswerReason], api: StreamApi) -> None:
    """Defer the messages of subjects that no stream confirms; others have one whose leader is being elected."""
    for subject, answer in unanswered.items():
        deferral = await _deferral(subject, answer, api)
        if deferral is not None:
            batch.defer(subject, deferral)


async def _deferral(subject: str, answer: NoAnswerReason, api: StreamApi) -> str | None:
    """Why an operator must help this subject; None where trying again may do."""
    if answer is NoAnswerReason.FORBIDDEN:
        return f"this user may not publish to {subject}: extend its permissions"
    if answer is NoAnswerReason.LOST:
        return None
    try:
        stream = await api.stream_of(subject)
    except NotAuthorized as error:
        return f"{subject}: {answer.value}, and whether there is one cannot be seen: {error}"
    except BrokerUnavailable:
        return None
    if stream is None:
        return f"no stream covers the subject {subject}: `nats stream add NAME --subjects {subject}`"
    if stream.config.no_ack:
        return f"the stream {stream.name} confirms nothing: `nats stream edit {stream.name} --ack`"
    return None


def _reset_after_fork(publisher: weakref.ref[NatsPublisher]) -> None:
    alive = publisher()
    if alive is not None:
        alive.reset_after_fork()
