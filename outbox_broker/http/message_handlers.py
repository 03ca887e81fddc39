"""Handlers of messages: publish, cancel, and queries of the schedule. They run in worker threads.

A publish is stored as received where it is common (publish_plain); any other is decoded into checked messages, at once
where it is short, and one by one where it is long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal, NoReturn, TypeVar

import msgspec

from outbox_broker.http.access_control import Role, authorize
from outbox_broker.http.content_negotiation import LONG_BYTES, Codec, encode_uniform_results
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem, of_decoding
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.limits import BATCH_MESSAGES_MAX, HEADERS_BYTES_MAX, HEADERS_MAX
from outbox_core.messages.message import (
    Message,
    PublishStatus,
    check_headers,
    check_key,
    check_message_id,
    check_topic,
)
from outbox_core.protocol.decoder_cache import json_decoder, msgpack_decoder
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    Batch,
    CancelAnswer,
    CancelOutcome,
    CancelRequest,
    Headers,
    NewMessage,
    PackedMessage,
    PublishAnswer,
    PublishOutcome,
    PublishRequest,
    RefusedAnswer,
    Request,
    RetryAnswer,
    RetryRequest,
    ScheduledAnswer,
    ScheduledCount,
    ScheduledMessage,
    ScheduledQuery,
    TimeMs,
)
from outbox_core.protocol.wire_conversion import body_bytes
from outbox_core.protocol.wire_multi_topic_publish import (
    MultiTopicMessage,
    MultiTopicPublishRequest,
    PackedMultiTopicMessage,
)

WHERE: Final = "$.messages"
_BUCKET_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_HeadersDecoder = Callable[[msgspec.Raw], dict[str, str] | None]

ENCODED_HEADERS_BYTES_MAX: Final = LONG_BYTES
"""More than any headers within their bound take, however they are written."""
_NOTHING: Final = msgspec.Raw()
_BIN_HEADS: Final = frozenset({0xC4, 0xC5, 0xC6})
_STR_HEADS: Final = frozenset({*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB})
_decode_bin: Final = msgspec.msgpack.Decoder(bytes).decode
_decode_str: Final = msgspec.msgpack.Decoder(str).decode
_decode_json_headers: Final[_HeadersDecoder] = msgspec.json.Decoder(Headers | None).decode
_decode_packed_headers: Final[_HeadersDecoder] = msgspec.msgpack.Decoder(Headers | None).decode
_IDS: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}(?:\n[A-Za-z0-9._:-]{1,64})*", re.ASCII)
"""Message ids, one per line: a whole batch is validated with one match."""
_WINDOW_BYTES: Final = 256 * 1024
_BLANKS: Final = rb"[ \t\n\r]{0,4096}+"
_BEGIN: Final = re.compile(rb'%b\{%b"messages"%b:%b\[' % ((_BLANKS,) * 4))
_VALUE: Final = re.compile(rb"%b(?![ \t\n\r])" % _BLANKS)
_NEXT: Final = re.compile(rb"%b," % _BLANKS)
_END: Final = re.compile(rb"%b\]%b\}%b\Z" % ((_BLANKS,) * 3))
_MORE: Final = re.compile(r"trailing characters \(byte ([0-9]+)\)$")
"""The decoder's error for a value with something after it: the position of that, counted from 1."""
_BYTE: Final = re.compile(r"\(byte ([0-9]+)\)$")
_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)

Body = bytes | bytearray
Entry = TypeVar("Entry", bound=msgspec.Struct)


def publish(call: Call) -> PublishAnswer | msgspec.Raw:
    """Store a batch; all of it is validated before any of it is stored."""
    stored = None if call.body_codec is Codec.JSON else publish_plain(call)
    if stored is not None:
        return _all_stored(call, stored)
    return _store(call, ((message, call.topic) for message in _published(call)))


def publish_addressed(call: Call) -> PublishAnswer | msgspec.Raw:
    """Store a batch whose messages name their topics, each of which the sender must be allowed to publish to; all of it
    is validated before any of it is stored.
    """
    return _store(call, _allowed(call, _addressed(call)))


def _published(call: Call) -> Iterable[NewMessage]:
    if call.body_codec is Codec.JSON:
        return _sent(call, ReceivedNewMessage, lambda: call.read(PublishRequest).messages)
    return _sent(call, ReceivedPackedMessage, lambda: call.read(ReceivedPackedPublishRequest).messages)


def _addressed(call: Call) -> Iterable[MultiTopicMessage | ReceivedPackedMultiTopicMessage]:
    if call.body_codec is Codec.JSON:
        return _sent(call, ReceivedMultiTopicMessage, lambda: call.read(MultiTopicPublishRequest).messages)
    return _sent(
        call, ReceivedPackedMultiTopicMessage, lambda: call.read(ReceivedPackedMultiTopicPublishRequest).messages
    )


def _sent(call: Call, entry: type[Entry], read_whole: Callable[[], Sequence[Entry]]) -> Iterable[Entry]:
    """Yields the messages of a publish; those of a large one as they are decoded."""
    if len(call.body) > LONG_BYTES:
        return _decoded_one_by_one(call, entry)
    sent = read_whole()
    call.check_batch(sent, where=WHERE)
    return sent


def _decoded_one_by_one(call: Call, entry: type[Entry]) -> Iterator[Entry]:
    """Yields the messages of a publish as they are decoded; `entry` matches the codec. Raises Problem at any."""
    limit, count = call.services.settings.batch_messages_max, 0
    entries = text_messages if call.body_codec is Codec.JSON else packed_messages
    try:
        for count, message in enumerate(entries(call.body, entry), 1):
            if count > limit:
                break
            yield message
    except TooManyMessages:
        count = limit + 1
    if count > limit:
        raise call.too_many(f"{count:,} entries or more", where=WHERE)


def _allowed(
    call: Call, sent: Iterable[MultiTopicMessage | ReceivedPackedMultiTopicMessage]
) -> Iterator[tuple[NewMessage, str]]:
    """Yields messages with their topics. Raises Problem at the first topic to which the sender may not publish."""
    allowed: set[str] = set()
    for index, message in enumerate(sent):
        if message.topic not in allowed:
            _check_topic(message.topic, where=f"{WHERE}[{index}].topic")
            authorize(call.principal, Role.PUBLISH, message.topic)
            allowed.add(message.topic)
        yield message, message.topic


def _store(call: Call, sent: Iterable[tuple[NewMessage, str]]) -> PublishAnswer | msgspec.Raw:
    now_ms = call.services.clock.now_ms()
    batch = [
        _message(call, message, topic=topic, index=index, now_ms=now_ms) for index, (message, topic) in enumerate(sent)
    ]
    results = call.served.producers.publish(batch, quota=call.principal.quota)
    if all(result.status is PublishStatus.STORED for result in results):
        return _all_stored(call, [result.id for result in results])
    return PublishAnswer(
        results=[PublishOutcome(id=result.id, status=result.status, error=result.error) for result in results]
    )


def _all_stored(call: Call, ids: Sequence[str]) -> PublishAnswer | msgspec.Raw:
    packed = (
        encode_uniform_results("id", ids, {"status": PublishStatus.STORED, "error": None}) if call.is_packed else None
    )
    if packed is not None:
        return packed
    return PublishAnswer(results=[PublishOutcome(id=message_id, status=PublishStatus.STORED) for message_id in ids])


def _message(call: Call, sent: NewMessage, *, topic: str, index: int, now_ms: int) -> Message:
    where = f"{WHERE}[{index}]"
    try:
        body = body_bytes(decoded_body(sent.body), sent.encoding)
        limit = call.services.settings.body_bytes_max
        if len(body) > limit:
            raise Problem(
                ProblemKind.MESSAGE_TOO_LARGE,
                f"the body has {len(body):,} bytes, more than the {limit:,} allowed; "
                "store it elsewhere and publish a reference",
                where=f"{where}.body",
                bound=("body_bytes_max", limit),
            )
        return Message(
            id=new_message_id() if sent.id is None else sent.id,
            topic=topic,
            body=body,
            key=sent.key,
            headers=_headers(call, sent, where=where),
            created_at_ms=now_ms if sent.created_at_ms is None else sent.created_at_ms,
            deliver_at_ms=_deliver_at_ms(sent, now_ms=now_ms),
        )
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_MESSAGE, str(error), where=where) from error
    except UnicodeDecodeError as error:
        raise of_decoding(error) from error


def _headers(call: Call, sent: NewMessage, *, where: str) -> Mapping[str, str]:
    try:
        return decoded_headers(sent.headers, call.body_codec)
    except msgspec.ValidationError as error:
        raise of_decoding(error, within=f"{where}.headers") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(ProblemKind.MALFORMED_BODY, f"the headers of {where}: {error}") from error


def _deliver_at_ms(sent: NewMessage, *, now_ms: int) -> int | None:
    if sent.delay_ms is None:
        return sent.deliver_at_ms
    if sent.deliver_at_ms is not None:
        raise InvalidMessage("deliver_at_ms and delay_ms exclude each other")
    return now_ms + sent.delay_ms


# -- the bulk path -----------------------------------------------------------------------------------------------------


class PlainMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A wire.PackedMessage for the bulk path."""

    body: bytes
    id: str
    key: str | None = None
    headers: Annotated[dict[str, str], msgspec.Meta(max_length=HEADERS_MAX)] | None = None
    encoding: Literal["binary"] | None = None
    created_at_ms: TimeMs | None = None


class PlainMessageInPlace(PlainMessage, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """The same, with a body that is a view of the request's."""

    body: memoryview  # type: ignore[assignment]  # it is written to the log as bytes are


class PlainPublishRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wire.PackedPublishRequest with messages for the bulk path only."""

    messages: list[PlainMessage]


_read: Final = msgspec.msgpack.Decoder(PlainPublishRequest).decode
_read_in_place: Final = msgspec.msgpack.Decoder(PlainMessageInPlace).decode


def publish_plain(call: Call) -> list[str] | None:
    """Store a batch as received, and return its ids; None, with nothing stored, if it does not fit the bulk path.

    For common publishes: MessagePack, binary bodies, explicit ids, immediate delivery. Any other batch, or one out of
    bounds, is passed to the general path, which validates each message and names the position, at about three times the
    cost a message. In batches of 500 with bodies of 512 bytes a message costs the server 4.3 us, 5.1 without this path;
    messages are msgspec Structs, made in a quarter of a frozen dataclass's time.
    """
    try:
        sent = _messages_of(call.body)
    except (TooManyMessages, msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return None
    ids = [message.id for message in sent]
    if not _is_in_bounds(sent, ids, settings=call.services.settings):
        return None
    return ids if call.served.producers.publish_plain(call.topic, sent, ids) else None


def _messages_of(body: bytes | bytearray) -> Sequence[PlainMessage]:
    if len(body) <= LONG_BYTES:
        return _read(body).messages
    return [_read_in_place(entry) for entry in packed_entries(body)]


def _is_in_bounds(sent: Sequence[PlainMessage], ids: Sequence[str], *, settings: HttpSettings) -> bool:
    text = "\n".join(ids)
    if not _IDS.fullmatch(text) or text.count("\n") != len(sent) - 1 or len(sent) > settings.batch_messages_max:
        return False
    if max(len(message.body) for message in sent) > settings.body_bytes_max:
        return False
    try:
        for key in {message.key for message in sent} - {None}:
            check_key(key or "")
        for headers in [message.headers for message in sent if message.headers]:
            check_headers(headers)
    except InvalidMessage:
        return False
    return True


# -- large batches -----------------------------------------------------------------------------------------------------

# Messages of a large publish are decoded one by one, so that no call holds the interpreter for a whole batch. Nothing
# is built from a batch with too many messages.


class _PackedBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=BATCH_MESSAGES_MAX)]


_split_packed: Final = msgspec.msgpack.Decoder(_PackedBatch).decode
_skip_text: Final = msgspec.json.Decoder(msgspec.Raw).decode


class TooManyMessages(Exception):
    """A batch has more messages than allowed."""


def packed_entries(body: Body) -> Sequence[msgspec.Raw]:
    """Returns the messages of a MessagePack publish as slices of the body, without copies: an array states its length,
    and its entries are found without decoding them.

    Raises TooManyMessages or what msgspec raises.
    """
    try:
        return _split_packed(body).messages
    except msgspec.ValidationError as error:
        if str(error).startswith(f"Expected `array` of length <= {BATCH_MESSAGES_MAX}"):
            raise TooManyMessages from error
        raise


def packed_messages(body: Body, shape: type[Entry]) -> Iterator[Entry]:
    """Yields the messages of a MessagePack publish. Raises TooManyMessages, or Problem that names the position."""
    try:
        entries = packed_entries(body)
    except _ERRORS as error:
        raise of_decoding(error) from error
    decode = msgpack_decoder(shape).decode
    for index, entry in enumerate(entries):
        try:
            message = decode(entry)
        except _ERRORS as error:
            raise of_decoding(error, within=f"{WHERE}[{index}]") from error
        yield message


def text_messages(body: Body, shape: type[Entry]) -> Iterator[Entry]:
    """Yields the messages of a JSON publish. Raises TooManyMessages, or Problem that names the position.

    The end of each entry is where the decoder reports trailing characters.
    """
    decode = json_decoder(shape).decode
    for index, (start, end) in enumerate(_text_entries(body)):
        if index == BATCH_MESSAGES_MAX:
            raise TooManyMessages
        try:
            message = decode(memoryview(body)[start:end])
        except _ERRORS as error:
            raise _shifted(error, start, within=f"{WHERE}[{index}]") from error
        yield message


def _text_entries(body: Body) -> Iterator[tuple[int, int]]:
    """Yields where the entries of {"messages": [...]} begin and end."""
    begin = _BEGIN.match(body)
    if begin is None:
        _refuse_frame()
    position = begin.end()
    if _END.match(body, position):
        return
    likely_bytes = 0
    while True:
        end = _end_of_value(body, position, likely_bytes=likely_bytes)
        yield position, end
        likely_bytes = end - position
        comma = _NEXT.match(body, end)
        if comma is None:
            break
        position = comma.end()
    if not _END.match(body, end):
        _refuse_frame()


def _end_of_value(body: Body, start: int, *, likely_bytes: int) -> int:
    """Returns the end of the value that begins here, which something must follow. Raises Problem.

    The decoder gets at most twice what it needs: it would skip any number of blanks.
    """
    if not _VALUE.match(body, start):
        _refuse_frame()
    size = max(_WINDOW_BYTES, 2 * likely_bytes)
    while True:
        try:
            _skip_text(memoryview(body)[start : start + size])
        except _ERRORS as error:
            more = _MORE.search(str(error))
            if more is not None:
                return start + int(more.group(1)) - 1
            if start + size >= len(body):
                raise _shifted(error, start, within=WHERE) from error
        else:
            _refuse_frame()
        size *= 2


def _shifted(error: Exception, start: int, *, within: str) -> Problem:
    """Returns the problem of an entry that begins at this offset of the body."""
    problem = of_decoding(error, within=within)
    byte_match = _BYTE.search(str(error))
    if byte_match is None or problem.kind is not ProblemKind.MALFORMED_BODY:
        return problem
    return Problem(problem.kind, f"{str(error)[: byte_match.start()]}(byte {start + int(byte_match.group(1))})")


def _refuse_frame() -> NoReturn:
    raise Problem(
        ProblemKind.MALFORMED_BODY,
        f'a publish of more than {LONG_BYTES:,} bytes is {{"messages": [...]}}, with nothing before or behind it, and '
        "few blanks in between",
    )


# -- shapes, as they arrive --------------------------------------------------------------------------------------------

# The messages of a publish as the server reads them: parts without bounds stay encoded until they have been checked.
# MessagePack may have anything in a body's place, where a list of empty maps takes seventy times its bytes in memory; a
# map of many short headers takes twenty times its bytes, in JSON too.


class ReceivedNewMessage(NewMessage, frozen=True, kw_only=True):
    """A wire.NewMessage of a long request."""

    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]  # decoded_headers() has what they are


class ReceivedMultiTopicMessage(MultiTopicMessage, frozen=True, kw_only=True):
    """A wire_multi_topic_publish.MultiTopicMessage of a long request."""

    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]


class ReceivedPackedMessage(PackedMessage, frozen=True, kw_only=True):
    """A wire.PackedMessage."""

    body: msgspec.Raw
    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]


class ReceivedPackedPublishRequest(Request, frozen=True, kw_only=True):
    """A wire.PackedPublishRequest."""

    messages: Annotated[list[ReceivedPackedMessage], Batch]


class ReceivedPackedMultiTopicMessage(PackedMultiTopicMessage, frozen=True, kw_only=True):
    """A wire_multi_topic_publish.PackedMultiTopicMessage."""

    body: msgspec.Raw
    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]


class ReceivedPackedMultiTopicPublishRequest(Request, frozen=True, kw_only=True):
    """A wire_multi_topic_publish.PackedMultiTopicPublishRequest."""

    messages: Annotated[list[ReceivedPackedMultiTopicMessage], Batch]


def decoded_body(body: object) -> object:
    """Returns a body that was left encoded as text or bytes; None if it is neither. Raises UnicodeDecodeError."""
    if not isinstance(body, msgspec.Raw):
        return body
    head = memoryview(body)[0]
    if head in _BIN_HEADS:
        return _decode_bin(body)
    return _decode_str(body) if head in _STR_HEADS else None


def decoded_headers(headers: object, codec: Codec) -> dict[str, str]:
    """Returns headers that may have been left encoded. Raises InvalidMessage, or what msgspec raises."""
    if not isinstance(headers, msgspec.Raw):
        return headers or {}  # type: ignore[return-value]  # as they were decoded
    size_bytes = len(memoryview(headers))
    if not size_bytes:
        return {}
    if size_bytes > ENCODED_HEADERS_BYTES_MAX:
        raise InvalidMessage(f"the headers have more than the {HEADERS_BYTES_MAX:,} bytes allowed")
    return (_decode_json_headers(headers) if codec is Codec.JSON else _decode_packed_headers(headers)) or {}


# -- scheduled messages ------------------------------------------------------------------------------------------------


def cancel(call: Call) -> CancelAnswer:
    """Cancel scheduled messages on the topics that the token covers: other topics are invisible to it."""
    ids = call.read(CancelRequest).ids
    call.check_batch(ids, where="$.ids")
    for index, message_id in enumerate(ids):
        _check_id(message_id, where=f"$.ids[{index}]")
    statuses = call.served.producers.cancel(ids, topics=call.principal.topics)
    return CancelAnswer(
        results=[CancelOutcome(id=message_id, status=status) for message_id, status in zip(ids, statuses, strict=True)]
    )


def scheduled(call: Call) -> ScheduledAnswer:
    """Count scheduled messages per minute, hour or day, a bounded page of them."""
    query = call.read_query(ScheduledQuery)
    if query.topic is not None:
        _check_topic(query.topic, where="query.topic")
    call.require(Role.READ, query.topic)
    counts = call.served.producers.scheduled(query.topic, from_ms=query.from_ms, to_ms=query.to_ms, bucket=query.bucket)
    page = counts[: call.services.settings.scheduled_buckets_max]
    return ScheduledAnswer(
        bucket=query.bucket,
        counts=[ScheduledCount(at_ms=at_ms, messages=count) for at_ms, count in page],
        next_from_ms=page[-1][0] + _BUCKET_MS[query.bucket] if len(page) < len(counts) else None,
    )


def scheduled_message(call: Call) -> ScheduledMessage:
    """Returns one scheduled message; not found if the token does not cover its topic."""
    message = call.served.producers.scheduled_message(
        _check_id(call.item, where="path.id"), topics=call.principal.topics
    )
    if message is None:
        raise Problem(ProblemKind.NOT_FOUND, f"no message is scheduled under the id {call.item}")
    refused = message.get("refused")
    return ScheduledMessage(
        id=call.item,
        topic=str(message["topic"]),
        deliver_at_ms=int(str(message["deliver_at_ms"])),
        refused=None if refused is None else str(refused),
    )


def refused(call: Call) -> RefusedAnswer:
    """List what a delay service's target refused for good, on the topics that the token covers."""
    refusals = call.served.needed(call.served.refusals)
    return RefusedAnswer(messages=refusals.refused(topics=call.principal.topics))


def retry_refused(call: Call) -> RetryAnswer:
    """Publish refused messages once more, on the topics that the token covers."""
    ids = call.read(RetryRequest).ids
    call.check_batch(ids, where="$.ids")
    for index, message_id in enumerate(ids):
        _check_id(message_id, where=f"$.ids[{index}]")
    refusals = call.served.needed(call.served.refusals)
    return RetryAnswer(results=refusals.retry_refused(ids, topics=call.principal.topics))


def _check_topic(topic: str, *, where: str) -> None:
    try:
        check_topic(topic)
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_NAME, str(error), where=where) from error


def _check_id(message_id: str, *, where: str) -> str:
    try:
        return check_message_id(message_id)
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_MESSAGE, str(error), where=where) from error
