"""Appends messages to the stream of their topic, by append.lua."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from broker_adapter.publishing.message_headers import content_type
from broker_adapter.redis.redis_options import RedisOptions
from broker_adapter.redis.script_sender import Argument, Script, ScriptCall
from outbox_core.messages.capabilities import Capability
from outbox_core.messages.message import CONTENT_TYPE, Message

HEADER_FIELD_PREFIX: Final = "h:"
APPEND: Final = Script(Path(__file__).with_name("append.lua").read_text(encoding="utf-8"))


class StreamStore:
    """Messages as entries of streams, for consumers with a client of their own."""

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
