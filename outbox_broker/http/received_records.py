"""What of a publish becomes records: both codecs, and the checks by batch, of clients and of a cluster's nodes.

A request is decoded to records once, and checked as a batch; record by record only where something is wrong, to say
where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec

from outbox_broker.http.content_negotiation import LONG_BYTES
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem, of_decoding
from outbox_core.common.errors import DECODE_ERRORS, InvalidMessage
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.limits import (
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    KEY_BYTES_MAX,
    MESSAGE_ID_CHARS_MAX,
    TOPIC_CHARS_MAX,
)
from outbox_core.messages.message import (
    Record,
    check_headers,
    check_key,
    check_message_id,
    check_topic,
)
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    JSON_BYTES_MAX,
    MSGPACK_TYPE,
    TIME_MS_MAX,
    Batch,
    Headers,
    JsonMessage,
    Request,
)
from outbox_core.protocol.wire_conversion import body_bytes

MESSAGES: Final = "$.messages"
BESIDE_BODY_BYTES_MAX: Final = 2 * HEADERS_BYTES_MAX
"""More than id, topic, key or headers take in MessagePack, if each is within its bound."""
LONG_FRAME_BYTES_MAX: Final = 4 * 1024
"""What stands around the messages of a long JSON request."""
RECORD_PARTS: Final = len(Record.__struct_fields__)
_IDS: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}(?:\n[A-Za-z0-9._:-]{1,64})*", re.ASCII)
"""Message ids, one per line: a whole batch is validated with one match."""
_NOTHING: Final = msgspec.Raw()


# -- MessagePack: an array of records ----------------------------------------------------------------------------------


class ReceivedRecord(Record, frozen=True, kw_only=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A record with no part that is unknown here: what is stored is what was sent."""


class _BesideBody(msgspec.Struct, frozen=True, array_like=True):
    """What of a record comes before its body, undecoded."""

    id: msgspec.Raw
    topic: msgspec.Raw
    key: msgspec.Raw
    headers: msgspec.Raw


_decode_records: Final = msgspec.msgpack.Decoder(list[ReceivedRecord]).decode
_decode_record: Final = msgspec.msgpack.Decoder(ReceivedRecord).decode
_beside_body: Final = msgspec.msgpack.Decoder(_BesideBody).decode
_split: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def packed_records(call: Call) -> Sequence[Record]:
    count = array_length(call.body)
    if count > call.services.settings.batch_messages_max:  # a list of that many would be made before it is refused
        raise call.too_many(f"{count:,} entries", where="$")
    records = _decoded(call)
    check_bounds(call, records, where=_record_place)
    return records


def _decoded(call: Call) -> Sequence[Record]:
    """Decodes a short request in one call, and a long one record by record, so that no call holds the interpreter for
    all of it, and ends at the first record that is too large beside its body: as objects such parts take many times
    their bytes. Raises Problem that names the record.
    """
    if len(call.body) <= LONG_BYTES:
        try:
            return _decode_records(call.body)
        except DECODE_ERRORS:
            pass  # which record it is shows below
    try:
        entries = _split(call.body)
    except DECODE_ERRORS as error:
        raise of_decoding(error) from error
    records: list[Record] = []
    for index, entry in enumerate(entries):
        record = _record(entry, where=_record_place(index))
        if (
            len(record.headers) > HEADERS_MAX
            or len(record.id) > MESSAGE_ID_CHARS_MAX
            or len(record.topic) > TOPIC_CHARS_MAX
            or len(record.key or "") > KEY_BYTES_MAX
        ):
            _check_record(call, record, where=_record_place(index))
            check_topic_name(record.topic, where=f"{_record_place(index)}.topic")
        records.append(record)
    return records


def _record_place(index: int) -> str:
    return f"$[{index}]"


def _record(entry: msgspec.Raw, *, where: str) -> Record:
    parts = array_length(memoryview(entry))
    if parts > RECORD_PARTS:
        raise Problem(
            ProblemKind.UNSUPPORTED_MEDIA_TYPE,
            f"this broker stores records of up to {RECORD_PARTS} parts, and this one has {parts}: upgrade it first",
            where=where,
            headers={"accept": f"{MSGPACK_TYPE};record-parts={RECORD_PARTS}"},
        )
    try:
        if len(memoryview(entry)) > BESIDE_BODY_BYTES_MAX:
            _refuse_long_parts(_beside_body(entry), where=where)
        return _decode_record(entry)
    except DECODE_ERRORS as error:
        raise of_decoding(error, within=where) from error


def _refuse_long_parts(beside: _BesideBody, *, where: str) -> None:
    """A map of many short headers takes twenty times its bytes in memory, and a text up to four times."""
    for name in beside.__struct_fields__:
        if len(memoryview(getattr(beside, name))) > BESIDE_BODY_BYTES_MAX:
            raise _of_long_part(name, where=where)


def array_length(data: bytes | bytearray | memoryview) -> int:
    """How many entries a MessagePack array says that it has; 0 where there is no array, or no whole head of one."""
    head = data[0] if data else 0
    if head & 0xF0 == 0x90:
        return head & 0x0F
    size = {0xDC: 2, 0xDD: 4}.get(head, 0)
    return int.from_bytes(data[1 : 1 + size], "big") if len(data) > size else 0


# -- JSON: an object with messages -------------------------------------------------------------------------------------


class _ReceivedMessage(JsonMessage, frozen=True, kw_only=True):
    """A wire.JsonMessage whose headers are decoded once their size is known."""

    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]


class _ReceivedMessages(Request, frozen=True, kw_only=True):
    messages: Annotated[list[_ReceivedMessage], Batch]


class _LongRequest(Request, frozen=True, kw_only=True):
    messages: msgspec.Raw


_decode_one: Final = msgspec.json.Decoder(tuple[_ReceivedMessage]).decode
_decode_headers: Final = msgspec.json.Decoder(Headers | None).decode


def json_records(call: Call) -> Sequence[Record]:
    is_long = len(call.body) > JSON_BYTES_MAX
    sent: Sequence[_ReceivedMessage] = _one_message(call) if is_long else call.read(_ReceivedMessages).messages
    call.check_batch(sent, where=MESSAGES)
    now_ms = call.services.clock.now_ms()
    records: list[Record] = []
    for index, message in enumerate(sent):
        where = f"{MESSAGES}[{index}]"
        record = _of_json(message, where=where, now_ms=now_ms)
        _check_record(call, record, where=where)
        check_topic_name(record.topic, where=f"{where}.topic")
        records.append(record)
    return records


def _one_message(call: Call) -> Sequence[_ReceivedMessage]:
    """What a long request has: its bytes are passed over, and decoded in one call, which ends at a second message."""
    messages = call.read(_LongRequest).messages
    try:
        if len(call.body) - len(memoryview(messages)) <= LONG_FRAME_BYTES_MAX:  # else they may stand there twice
            return _decode_one(messages)
    except msgspec.ValidationError as error:
        problem = of_decoding(error, within=MESSAGES)
        if problem.answer.where != MESSAGES:
            raise problem from error
    raise Problem(
        ProblemKind.BODY_TOO_LARGE,
        f"a JSON publish of more than {JSON_BYTES_MAX:,} bytes has one message, and nothing around it: send fewer in a "
        "request, or MessagePack",
        where=MESSAGES,
        bound=("JSON_BYTES_MAX", JSON_BYTES_MAX),
    )


def _of_json(sent: _ReceivedMessage, *, where: str, now_ms: int) -> Record:
    try:
        return Record(
            id=new_message_id() if sent.id is None else sent.id,
            topic=sent.topic,
            body=body_bytes(sent.body, sent.encoding),
            key=sent.key,
            headers=_headers(sent.headers, where=where),
            created_at_ms=now_ms if sent.created_at_ms is None else sent.created_at_ms,
            deliver_at_ms=_deliver_at_ms(sent, now_ms=now_ms),
        )
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_MESSAGE, str(error), where=where) from error


def _headers(headers: msgspec.Raw, *, where: str) -> Mapping[str, str]:
    size_bytes = len(memoryview(headers))
    if size_bytes > LONG_BYTES:
        raise _of_long_part("headers", where=where)
    if not size_bytes:
        return {}
    try:
        return _decode_headers(headers) or {}
    except msgspec.ValidationError as error:
        raise of_decoding(error, within=f"{where}.headers") from error
    except DECODE_ERRORS as error:
        raise Problem(ProblemKind.MALFORMED_BODY, f"the headers of {where}: {error}") from error


def _deliver_at_ms(sent: JsonMessage, *, now_ms: int) -> int | None:
    if sent.delay_ms is None:
        return sent.deliver_at_ms
    if sent.deliver_at_ms is not None:
        raise InvalidMessage("deliver_at_ms and delay_ms exclude each other")
    return min(now_ms + sent.delay_ms, TIME_MS_MAX)  # as any other delay that is too long, it is this message's fault


# -- checks, by batch --------------------------------------------------------------------------------------------------


def check_bounds(call: Call, records: Sequence[Record], *, where: Callable[[int], str]) -> None:
    """Raises Problem at the first record that is out of bounds, or whose topic has no name; `where` it stands."""
    if not _is_in_bounds(records, body_bytes_max=call.services.settings.body_bytes_max):
        for index, record in enumerate(records):
            _check_record(call, record, where=where(index))
    topics = [record.topic for record in records]
    first_index = dict(zip(reversed(topics), reversed(range(len(topics))), strict=True))
    for topic in dict.fromkeys(topics):
        check_topic_name(topic, where=f"{where(first_index[topic])}.topic")


def _is_in_bounds(records: Sequence[Record], *, body_bytes_max: int) -> bool:
    """Whether all are, but for their topics. A quarter of what it costs to check them one by one."""
    if not records:
        return True
    ids = "\n".join([record.id for record in records])
    created = [record.created_at_ms for record in records]
    due = [record.deliver_at_ms for record in records if record.deliver_at_ms is not None] or [0]
    if (
        not _IDS.fullmatch(ids)
        or ids.count("\n") != len(records) - 1
        or max([len(record.body) for record in records]) > body_bytes_max
        or not 0 <= min(created) <= max(created) <= TIME_MS_MAX
        or not 0 <= min(due) <= max(due) <= TIME_MS_MAX
    ):
        return False
    try:
        for key in {record.key for record in records if record.key is not None}:
            check_key(key)
        for headers in {tuple(record.headers.items()) for record in records if record.headers}:
            check_headers(dict(headers))
    except InvalidMessage:
        return False
    return True


def _check_record(call: Call, record: Record, *, where: str) -> None:
    limit = call.services.settings.body_bytes_max
    if len(record.body) > limit:
        raise Problem(
            ProblemKind.MESSAGE_TOO_LARGE,
            f"the body has {len(record.body):,} bytes, more than the {limit:,} allowed; "
            "store it elsewhere and publish a reference",
            where=f"{where}.body",
            bound=("body_bytes_max", limit),
        )
    try:
        check_message_id(record.id)
        if record.key is not None:
            check_key(record.key)
        check_headers(record.headers)
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_MESSAGE, str(error), where=where) from error
    for name in ("created_at_ms", "deliver_at_ms"):
        if not 0 <= (getattr(record, name) or 0) <= TIME_MS_MAX:
            raise Problem(ProblemKind.INVALID_MESSAGE, f"{name} must be from 0 to {TIME_MS_MAX}", where=where)


def _of_long_part(name: str, *, where: str) -> Problem:
    text = f"the headers have more than the {HEADERS_BYTES_MAX:,} bytes allowed"
    return Problem(
        ProblemKind.INVALID_MESSAGE, text if name == "headers" else f"the {name} is longer than allowed", where=where
    )


def check_topic_name(topic: str, *, where: str) -> None:
    try:
        check_topic(topic)
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_NAME, str(error), where=where) from error
