"""Reads streams' settings by the JetStream API, and finds those by which a confirmed message could be lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from broker_adapter.nats.connection import NatsConnection, NatsFrame, NoAnswerReason
from broker_adapter.nats.errors import ApiError
from outbox_core.common.errors import BrokerUnavailable, NotAuthorized
from outbox_core.messages.broker_port import Weakness

T = TypeVar("T", bound="_ApiAnswer")

DUPLICATE_WINDOW_S_MIN: Final = 120
"""JetStream's default. A compensator's resend comes later than a sender's lease, 20 s by default."""
CONSUMER_PAGES_MAX: Final = 100
_STREAM_NOT_FOUND: Final = 10059
_API: Final = "$JS.API"


class _ApiAnswer(msgspec.Struct, kw_only=True):
    error: ApiError | None = None


class _StreamNames(_ApiAnswer):
    streams: list[str] | None = None


class StreamConfig(msgspec.Struct, kw_only=True):
    """The settings of a stream on which its durability depends."""

    retention: str = "limits"
    storage: str = "file"
    num_replicas: int = 1
    duplicate_window: int = 0
    """Nanoseconds."""
    no_ack: bool = False
    persist_mode: str = "default"


class _Cluster(msgspec.Struct, kw_only=True):
    name: str | None = None


class _StreamInfo(_ApiAnswer):
    config: StreamConfig | None = None
    cluster: _Cluster | None = None


class _ConsumerConfig(msgspec.Struct, kw_only=True):
    filter_subject: str | None = None
    filter_subjects: list[str] | None = None


class _Consumer(msgspec.Struct, kw_only=True):
    config: _ConsumerConfig


class _Consumers(_ApiAnswer):
    total: int = 0
    consumers: list[_Consumer] | None = None


class Stream(msgspec.Struct, kw_only=True):
    """A stream that covers a subject."""

    name: str
    config: StreamConfig
    is_clustered: bool


class StreamApi:
    """Asks over one connection. Errors: BrokerUnavailable, and NotAuthorized where this user may not ask."""

    def __init__(self, connection: NatsConnection, *, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    async def stream_of(self, subject: str) -> Stream | None:
        """The stream that stores what is published to this subject."""
        names = await self._ask("STREAM.NAMES", _StreamNames, {"subject": subject})
        if not names.streams:
            return None
        name = names.streams[0]
        info = await self._ask(f"STREAM.INFO.{name}", _StreamInfo)
        if info.config is None:
            return None  # deleted since
        return Stream(name=name, config=info.config, is_clustered=bool(info.cluster and info.cluster.name))

    async def has_consumer(self, stream: str, subject: str) -> bool:
        """Whether a consumer of the stream wants messages of this subject."""
        offset = 0
        for _ in range(CONSUMER_PAGES_MAX):
            page = await self._ask(f"CONSUMER.LIST.{stream}", _Consumers, {"offset": offset})
            if any(_wants(consumer.config, subject) for consumer in page.consumers or ()):
                return True
            offset += len(page.consumers or ())
            if not page.consumers or offset >= page.total:
                return False
        return True  # too many to look at: some consumer there is

    async def _ask(self, operation: str, shape: type[T], request: object = None) -> T:
        body = b"" if request is None else msgspec.json.encode(request)
        frame = NatsFrame(subject=f"{_API}.{operation}", body=body)
        [answer] = await self._connection.exchange([frame], shape, deadline=self._deadline)
        if answer is NoAnswerReason.FORBIDDEN:
            raise NotAuthorized(
                f"this user may not publish to {frame.subject}: allow {_API}.STREAM.> and {_API}.CONSUMER.>"
            )
        if isinstance(answer, NoAnswerReason):
            raise BrokerUnavailable(f"the JetStream API: {answer.value}; is `jetstream` in the server's configuration?")
        if answer.error is not None and answer.error.err_code != _STREAM_NOT_FOUND:
            raise BrokerUnavailable(f"the JetStream API: {answer.error.description}")
        return answer


async def weaknesses_of(subjects: Sequence[str], *, api: StreamApi) -> list[Weakness]:
    """Returns how a confirmed message on these subjects could be lost, or stored twice. Subjects without a stream are
    left out: nothing is confirmed there.
    """
    weaknesses: dict[str, Weakness] = {}
    for subject in subjects:
        stream = await api.stream_of(subject)
        if stream is None:
            continue
        weaknesses.update({str(weakness): weakness for weakness in _of_settings(stream)})
        if stream.config.retention == "interest" and not await api.has_consumer(stream.name, subject):
            weakness = _nobody_interested(stream.name, subject)
            weaknesses[str(weakness)] = weakness
    return list(weaknesses.values())


def unseen(error: NotAuthorized) -> Weakness:
    """Returns the weakness of a server whose settings this user may not see."""
    return Weakness(
        subject="JetStream API", problem=f"streams cannot be inspected: {error}", cure="extend its permissions"
    )


def _of_settings(stream: Stream) -> Iterator[Weakness]:
    subject, config = f"stream {stream.name}", stream.config
    edit = f"nats stream edit {stream.name}"
    if config.storage == "memory":
        problem = "its messages are in memory and end with the server"
        yield Weakness(subject=subject, problem=problem, cure="make it anew with `storage: file`")
    if stream.is_clustered and config.num_replicas == 1:
        problem = "a cluster keeps one copy of it, which is lost with that server's disk"
        yield Weakness(subject=subject, problem=problem, cure=f"`{edit} --replicas 3`")
    if config.persist_mode == "async":
        problem = "messages are confirmed before they are written"
        yield Weakness(subject=subject, problem=problem, cure="make it anew with `persist_mode: default`")
    if config.no_ack:
        problem = "it confirms nothing, so every publish is in doubt"
        yield Weakness(subject=subject, problem=problem, cure=f"`{edit} --ack`")
    if config.duplicate_window < DUPLICATE_WINDOW_S_MIN * 1_000_000_000:
        problem = f"a message that is sent again after {config.duplicate_window / 1e9:g} s is stored twice"
        yield Weakness(subject=subject, problem=problem, cure=f"`{edit} --dupe-window {DUPLICATE_WINDOW_S_MIN}s`")


def _nobody_interested(stream: str, subject: str) -> Weakness:
    return Weakness(
        subject=f"stream {stream}",
        problem=f"no consumer wants {subject}, so with `retention: interest` its messages vanish once confirmed",
        cure="`nats consumer add` a durable consumer first, or make the stream with `retention: limits`",
    )


def _wants(consumer: _ConsumerConfig, subject: str) -> bool:
    filters = consumer.filter_subjects or ([consumer.filter_subject] if consumer.filter_subject else [])
    return not filters or any(_matches(pattern, subject) for pattern in filters)


def _matches(pattern: str, subject: str) -> bool:
    """Returns whether a subject matches, by the rules of NATS: `*` is one token, `>` is one or more at the end."""
    pattern_tokens, tokens = pattern.split("."), subject.split(".")
    if pattern_tokens[-1] == ">":
        if len(tokens) < len(pattern_tokens):
            return False
        pattern_tokens, tokens = pattern_tokens[:-1], tokens[: len(pattern_tokens) - 1]
    return len(pattern_tokens) == len(tokens) and all(
        expected in ("*", token) for expected, token in zip(pattern_tokens, tokens, strict=True)
    )
