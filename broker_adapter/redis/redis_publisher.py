"""Publishes messages to Redis by one script for each batch and destination, and a WAIT for the replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

from redis.exceptions import ResponseError

from broker_adapter.publishing.message_headers import content_type
from broker_adapter.publishing.treatment import Treatment
from broker_adapter.redis.durability_inspection import MasterSettings
from broker_adapter.redis.errors import description_of, exception_for, treatment_of
from broker_adapter.redis.redis_options import RedisOptions
from broker_adapter.redis.script_sender import Argument, Deadline, Script, ScriptCall, ScriptSender
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import BrokerError, NotAuthorized
from outbox_core.messages.broker_port import Capability, Inspection, Weakness
from outbox_core.messages.message import CONTENT_TYPE, Message, PublishResult, PublishStatus
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.log_interval import LogInterval

logger: EventLogger = EventLogger(__name__)

HEADER_FIELD_PREFIX: Final = "h:"


class RedisStore(Protocol):
    """A layout of messages in Redis, and the script that stores them."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities beyond a durable publish."""

    def place_of(self, message: Message) -> str:
        """Returns the name that determines the message's keys."""

    def value_bytes(self, message: Message) -> int:
        """Returns the bytes of the value that has the message's body, at most."""

    def call(self, destination: str, messages: Sequence[Message]) -> ScriptCall:
        """The call that stores messages of one destination: 1 (stored) or 0 (repeat) for each in order; where one
        fails, the error's text in its position and nothing for those behind it. A list behind them: what was trimmed
        (append.lua).
        """


@dataclass(frozen=True, slots=True)
class _Part:
    """The messages of one destination, and the call that stores them."""

    destination: str
    messages: list[Message]
    call: ScriptCall

    @property
    def error(self) -> Exception | None:
        """The error of the whole, or that which the script ended with."""
        outcome = self.call.outcome
        if isinstance(outcome, Exception):
            return outcome
        last = outcome[-1] if outcome else b"ERR the script answered nothing"
        return ResponseError(last.decode(errors="replace")) if isinstance(last, bytes) else None


class RedisPublisher:
    """A Publisher to Redis 7.0 or later, one server or a cluster. Thread-safe; a forked child connects anew."""

    def __init__(
        self,
        sender: ScriptSender,
        store: RedisStore,
        masters: MasterSettings,
        options: RedisOptions,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._sender = sender
        self._store = store
        self._masters = masters
        self._options = options
        self._clock = clock or SystemClock()
        self._trimmed_topics = LogInterval(self._clock)

    @property
    def product(self) -> str:
        """The engine's name."""
        return "Redis"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Those of the store."""
        return self._store.capabilities

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """Store a batch; one result a message, in order, once master and replicas have it."""
        deadline = Deadline(self._clock, timeout_ms)
        if self._options.has_timers:
            self._masters.refuse_eviction(deadline)
        replicas = self._masters.replicas_to_wait_for(deadline)
        value_bytes_max = self._masters.bulk_bytes_max
        results: dict[int, PublishResult] = {}
        fitting: list[int] = []
        for index, message in enumerate(batch):
            value_bytes = self._store.value_bytes(message)
            if value_bytes <= value_bytes_max:
                fitting.append(index)
            else:
                results[index] = _too_large(message, value_bytes=value_bytes, value_bytes_max=value_bytes_max)
        unsent = iter(fitting)
        for part in parts([batch[index] for index in fitting], self._options):
            part_indexes = list(islice(unsent, len(part)))
            try:
                stored = self._publish_part(part, deadline, replicas=replicas)
            except BrokerError as error:
                error.with_answered({**results, **{part_indexes[at]: result for at, result in error.answered.items()}})
                raise
            results.update(zip(part_indexes, stored, strict=True))
        return [results[index] for index in range(len(batch))]

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:  # noqa: ARG002 - topics have no settings
        """Ask each master about its settings; topics have none of their own."""
        reports = self._masters.ask(Deadline(self._clock, timeout_ms))
        of_url = () if self._options.maxlen is None else (_trimming(self._options.maxlen),)
        return Inspection(
            product=self.product,
            version=min(report.version for report in reports),
            weaknesses=(*of_url, *(weakness for report in reports for weakness in report.weaknesses)),
        )

    def close(self) -> None:
        """Close the connections of this process; idempotent."""
        self._sender.close()

    def _publish_part(self, part: Sequence[Message], deadline: Deadline, *, replicas: int) -> list[PublishResult]:
        by_destination: defaultdict[str, list[Message]] = defaultdict(list)
        destinations = [self._store.place_of(message) for message in part]
        for destination, message in zip(destinations, part, strict=True):
            by_destination[destination].append(message)
        stored = [
            _Part(destination, messages, self._store.call(destination, messages))
            for destination, messages in by_destination.items()
        ]
        self._sender.send([sent.call for sent in stored], deadline, replicas=replicas)
        for sent in stored:
            self._tell_trimmed(sent)
        failures = {sent.destination: error for sent in stored if (error := self._failure_of(sent)) is not None}
        results = {sent.destination: _results(sent) for sent in stored if sent.destination not in failures}
        answered = {
            index: next(results[destination])
            for index, destination in enumerate(destinations)
            if destination in results
        }
        if failures:  # an outage is raised rather than a forbidden topic: then the topics are not tried one by one
            raise min(failures.values(), key=lambda error: isinstance(error, NotAuthorized)).with_answered(answered)
        return list(answered.values())

    def _tell_trimmed(self, part: _Part) -> None:
        """Log what ?maxlen= deleted, a line a topic and minute: a warning where a group had not settled all of it."""
        topic = part.destination
        for answer in part.call.outcome if isinstance(part.call.outcome, list) else ():
            if not isinstance(answer, list) or not self._trimmed_topics.is_time(topic):
                continue
            entries, groups = answer[0], [name.decode(errors="replace") for name in answer[1::3]]
            fields = {
                "topic": topic, "entries": entries,
                "unread": {name: count for name, count in zip(groups, answer[2::3], strict=True) if count},
                "unacknowledged": {name: count for name, count in zip(groups, answer[3::3], strict=True) if count},
            }  # fmt: skip
            (logger.warning if groups else logger.info)("stream_trimmed", extra=fields)

    def _failure_of(self, part: _Part) -> BrokerError | None:
        """Returns the exception to raise; None if each message has a result."""
        error = part.error
        if error is None or isinstance(error, BrokerError):
            return error
        if treatment_of(error) is Treatment.DEFERRED:
            return None
        return exception_for(error, addresses=self._sender.addresses)


def _trimming(maxlen: int) -> Weakness:
    return Weakness(
        subject=f"maxlen={maxlen} in the broker's URL",
        problem="entries beyond it are deleted, also those that a group has not read or not acknowledged",
        cure="leave it out, and trim with XTRIM MINID behind the slowest group",
    )


def _too_large(message: Message, *, value_bytes: int, value_bytes_max: int) -> PublishResult:
    text = (
        f"the message is too large: a value of {value_bytes:,} bytes with its body of {len(message.body):,}; "
        f"proto-max-bulk-len of the server is {value_bytes_max:,}"
    )
    return PublishResult(message.id, PublishStatus.REJECTED, text)


def _results(part: _Part) -> Iterator[PublishResult]:
    """A result a message: what the script did before it ended with an error is done."""
    error, outcome = part.error, part.call.outcome
    text = None if error is None else f"{part.messages[0].topic}: {description_of(error)}"
    done = [answer for answer in outcome if isinstance(answer, int)] if isinstance(outcome, list) else []
    for index, message in enumerate(part.messages):
        if index < len(done):
            yield PublishResult(message.id, PublishStatus.STORED if done[index] else PublishStatus.DUPLICATE)
        else:
            yield PublishResult(message.id, PublishStatus.DEFERRED, text)


APPEND: Final = Script(Path(__file__).with_name("append.lua").read_text(encoding="utf-8"))


class StreamStore:
    """Appends messages to the stream of their topic, by append.lua, for consumers with a client of their own."""

    capabilities: frozenset[Capability] = frozenset({Capability.DEDUPLICATION})
    """Repeats are dropped within the window of the URL."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options

    def place_of(self, message: Message) -> str:
        """Its topic."""
        return message.topic

    def value_bytes(self, message: Message) -> int:
        """The body is a value by itself."""
        return len(message.body)

    def call(self, destination: str, messages: Sequence[Message]) -> ScriptCall:
        """The call that appends these messages to the topic's stream."""
        options = self._options
        of_stream = _stream_options(options)
        arguments: list[Argument] = [options.window_ms, options.maxlen or 0]
        for message in messages:
            fields = entry_fields(message)
            arguments += (message.id, len(of_stream) + len(fields), *of_stream, *fields)
        keys = (options.stream_key(destination), options.ids_key(destination))
        return ScriptCall(script=APPEND, keys=keys, arguments=arguments)


def entry_fields(message: Message) -> list[str | bytes]:
    """A stream entry's fields and values in turn: id, key, body, content-type, created-at-ms, and `h:` + each header;
    what a message does not have is left out.
    """
    fields: list[str | bytes] = ["id", message.id]
    if message.key is not None:
        fields += ("key", message.key)
    fields += ("body", message.body)
    kind = content_type(message.headers)
    if kind is not None:
        fields += ("content-type", kind)
    if message.created_at_ms:
        fields += ("created-at-ms", str(message.created_at_ms))
    for name, value in message.headers.items():
        if name.lower() != CONTENT_TYPE:
            fields += (HEADER_FIELD_PREFIX + name, value)
    return fields


def parts(batch: Sequence[Message], options: RedisOptions) -> Iterator[list[Message]]:
    """The batch, in order, in parts of at most so many messages and bytes; one that is larger goes alone."""
    part: list[Message] = []
    part_bytes = 0
    for message in batch:
        too_much = part_bytes + len(message.body) > options.part_bytes_max or len(part) == options.part_messages_max
        if part and too_much:
            yield part
            part, part_bytes = [], 0
        part.append(message)
        part_bytes += len(message.body)
    if part:
        yield part


def _stream_options(options: RedisOptions) -> list[str]:
    arguments = [] if options.creates_streams else ["NOMKSTREAM"]
    if options.maxlen is not None:
        arguments += ["MAXLEN", "~", str(options.maxlen)]
    return [*arguments, "*"]
