"""Publishes batches to JetStream: each stream acknowledges its messages; elections of leaders are waited out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Final
from urllib.parse import quote

import msgspec

from broker_adapter.nats.connection import NatsFrame, NoAnswerReason
from broker_adapter.nats.durability_inspection import StreamApi, unseen, weaknesses_of
from broker_adapter.nats.errors import CURES, ApiError, treatment_of
from broker_adapter.nats.process_session import FailoverConnection, NatsServers, ProcessSession
from broker_adapter.publishing.message_headers import CLOUDEVENTS_HEADER_PREFIX, headers_with_type
from broker_adapter.publishing.treatment import Treatment
from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthorized, StorageFailed
from outbox_core.messages.broker_port import Capability, Inspection
from outbox_core.messages.message import CONTENT_TYPE, Message, PublishResult, PublishStatus

REPEAT_S_MIN: Final = 0.05
REPEAT_S_MAX: Final = 1.0
MESSAGE_ID_HEADER: Final = "Nats-Msg-Id"
"""By which a stream drops repeats within its duplicate window."""
RESERVED_PREFIX: Final = "nats-"
"""Of headers that JetStream obeys: Nats-Rollup would delete all that is stored."""
_SPEC_VERSION: Final = f"{CLOUDEVENTS_HEADER_PREFIX}specversion"
_DATA_CONTENT_TYPE: Final = f"{CLOUDEVENTS_HEADER_PREFIX}datacontenttype"
_PRINTABLE: Final = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""What the CloudEvents NATS binding leaves as it is in an attribute, besides letters and digits."""
_VERSION_LINE: Final = len("NATS/1.0\r\n")
_LINE_EXTRA: Final = len(": \r\n")
_END: Final = len("\r\n")


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
            raise BrokerUnavailable(f"NATS at {self._servers.shown_addresses}, until the time-out: {problem}")
        await asyncio.sleep(pause_s)


class PubAck(msgspec.Struct, frozen=True, gc=False):
    """JetStream's answer to a publish."""

    stream: str = ""
    duplicate: bool = False
    error: ApiError | None = None

    def __post_init__(self) -> None:
        if not self.stream and self.error is None:
            raise ValueError("the answer of a subscriber, and not of a stream")


class NatsBatchResults:
    """A batch that is published to JetStream: its messages, the results that are known, and the frames that have none
    yet, in order. Sends nothing.
    """

    def __init__(self, messages: Sequence[Message], *, prefix: str) -> None:
        self.frames: dict[int, NatsFrame] = {}
        """By the message's index in the batch."""
        self.problem = ""
        """Why a message has no result yet."""
        self._messages = messages
        self._results: dict[int, PublishResult] = {}
        self._repeated: set[int] = set()
        for index, message in enumerate(messages):
            refusal = refusal_of(message)
            if refusal is None:
                self.frames[index] = frame_of(message, prefix=prefix)
            else:
                self._settle(index, PublishStatus.REJECTED, refusal)

    def reject_larger(self, max_payload: int) -> None:
        """Reject what is larger: a server ends the connection of a client that sends it more."""
        for index, frame in list(self.frames.items()):
            size = wire_bytes(frame)
            if size > max_payload:
                text = f"headers and body are too large: {size:,} bytes of max_payload {max_payload:,}"
                self._settle(index, PublishStatus.REJECTED, f"{text}; {CURES[Treatment.REJECTED]}")

    def settle_answered(self, answers: Sequence[PubAck | NoAnswerReason]) -> dict[str, NoAnswerReason]:
        """Take an answer for each frame, in order; returns why subjects have none.

        Raises StorageFailed where the server can store nothing, once all answers are taken.
        """
        unanswered: dict[str, NoAnswerReason] = {}
        full = ""
        for index, answer in zip(list(self.frames), answers, strict=True):
            if isinstance(answer, PubAck):
                full = self._settle_answered(index, answer) or full
            else:
                self._repeated.add(index)
                unanswered[self.frames[index].subject] = answer
                self.problem = f"{len(self.frames)} of {len(self._messages)} messages: {answer.value}"
        if full:
            raise StorageFailed(full)
        return unanswered

    def defer(self, subject: str, error: str) -> None:
        """Defer what has no result on a subject."""
        for index in [index for index, frame in self.frames.items() if frame.subject == subject]:
            self._settle(index, PublishStatus.DEFERRED, error)

    def answered(self) -> dict[int, PublishResult]:
        """The results that are known, by index."""
        return dict(self._results)

    def in_order(self) -> list[PublishResult]:
        """All results, once no frame is left."""
        return [self._results[index] for index in range(len(self._messages))]

    def _settle_answered(self, index: int, answer: PubAck) -> str | None:
        """Settle a message; returns why the server can store nothing, if that is the answer."""
        if answer.error is None:
            # What is sent twice here is mostly its own duplicate, and says nothing of an earlier call.
            is_duplicate = answer.duplicate and index not in self._repeated
            self._settle(index, PublishStatus.DUPLICATE if is_duplicate else PublishStatus.STORED)
            return None
        treatment = treatment_of(answer.error)
        origin = f"stream {answer.stream}" if answer.stream else "JetStream"
        error = f"{origin}: {answer.error.description} (error {answer.error.err_code}); {CURES[treatment]}"
        match treatment:
            case Treatment.REJECTED:
                self._settle(index, PublishStatus.REJECTED, error)
            case Treatment.DEFERRED:
                self._settle(index, PublishStatus.DEFERRED, error)
            case Treatment.STORAGE:
                return error
            case _:  # not now: it is published again
                self._repeated.add(index)
                self.problem = error
        return None

    def _settle(self, index: int, status: PublishStatus, error: str | None = None) -> None:
        self._results[index] = PublishResult(self._messages[index].id, status, error)
        self.frames.pop(index, None)


def subject_of(topic: str, *, prefix: str) -> str:
    """The subject that a topic is: itself, behind the prefix and a dot where there is a prefix."""
    return f"{prefix}.{topic}" if prefix else topic


def refusal_of(message: Message) -> str | None:
    """Why NATS can never carry a message; None where it can."""
    topic = message.topic
    if topic.startswith(".") or topic.endswith(".") or ".." in topic:
        return f"the topic {topic!r} is no subject of NATS: no dot may begin or end it, or follow another; rename it"
    if message.key is not None and ("\r" in message.key or "\n" in message.key):
        return "the key has a line break, which NATS cannot carry: choose keys without"
    for name, value in message.headers.items():
        if name.lower().startswith(RESERVED_PREFIX):
            return f"the header {name} is JetStream's own; rename it"
        if "\r" in value or "\n" in value:
            return f"the header {name} has a line break, which NATS cannot carry; encode it"
    return None


def frame_of(message: Message, *, prefix: str) -> NatsFrame:
    """The message as it goes over the wire. CloudEvents attributes stand as the NATS binding (version 1.0.3) has them:
    under `ce-`, percent-encoded, with the content type as `ce-datacontenttype`, too.
    """
    headers = headers_with_type(message, attribute_prefix=None)
    kind = headers.get(CONTENT_TYPE)
    if kind is not None and _SPEC_VERSION in headers:
        headers.setdefault(_DATA_CONTENT_TYPE, quote(kind, safe=_PRINTABLE))
    headers[MESSAGE_ID_HEADER] = f"{message.topic}:{message.id}"
    return NatsFrame(subject=subject_of(message.topic, prefix=prefix), body=message.body, headers=headers)


def wire_bytes(frame: NatsFrame) -> int:
    """Bytes of headers and body together: what a server's max_payload bounds."""
    lines = (frame.headers or {}).items()
    return (
        _VERSION_LINE
        + sum(len(name) + len(value.encode()) + _LINE_EXTRA for name, value in lines)
        + _END
        + len(frame.body)
    )


async def defer_unserved(batch: NatsBatchResults, unanswered: Mapping[str, NoAnswerReason], api: StreamApi) -> None:
    """Defer the messages of subjects that no stream confirms: no stream covers it, its stream confirms nothing, or this
    user may not publish. Others have one whose leader is being elected.
    """
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
