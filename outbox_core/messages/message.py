"""A message, its deliveries and the results of operations, as values that are validated when they are made. No I/O.

Values of which each message needs one are msgspec Structs: they are made in a quarter of a dataclass's time, and
decoded from the wire directly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec

from outbox_core.common.errors import DECODE_ERRORS, InvalidMessage
from outbox_core.messages import limits
from outbox_core.messages.failure_history import History

CONTENT_TYPE: Final = "content-type"
JSON_CONTENT_TYPE: Final = "application/json"
ORDERED_HEADER: Final = "outbox-ordered"
"""On a message of a topic that its producer keeps in order, with the value "key": consumers can tell who lost it."""
DUE_HEADER: Final = "outbox-deliver-at-ms"
"""The header with the requested due time of a message that a delay service, or the outbox, publishes as due now."""
EDITED_HEADER: Final = "outbox-edited-from"
"""The header of a dead letter that an operator edited, with the id that it had before."""
_PLAIN: Final = (str, type(None))

_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
_MESSAGE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}", re.ASCII)
_encode_json = msgspec.json.Encoder().encode


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A message as it goes over the wire: an array of these parts in this order. Nothing of it is checked.

    A later part goes last and has a default: who reads an array passes over parts that it does not know, but for a
    broker, which refuses to store what it would lose.
    """

    id: str
    topic: str
    key: str | None = None
    headers: Mapping[str, str] = {}
    body: bytes
    created_at_ms: int = 0
    deliver_at_ms: int | None = None


class Message(Record, frozen=True, kw_only=True, array_like=True, gc=False):
    """A message as its producer publishes it.

    Times are milliseconds since the Unix epoch, UTC. `deliver_at_ms` None: deliver immediately.
    Raises InvalidMessage, which names the limit, if a part exceeds one.
    """

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_message_id(self.id)
        if self.key is not None:
            check_key(self.key)
        if type(self.id) is not str or type(self.topic) is not str or type(self.key) not in _PLAIN:
            _make_plain(self)
        if self.headers:
            check_headers(self.headers)
        if len(self.body) > limits.BODY_BYTES_MAX:
            raise InvalidMessage(
                f"the body has {len(self.body):,} bytes, more than the {limits.BODY_BYTES_MAX:,} allowed; "
                "store it elsewhere and publish a reference"
            )


encode_packed: Final = msgspec.msgpack.Encoder(enc_hook=dict).encode
"""Returns the MessagePack of a Record, or of what holds some. Headers may be any Mapping: msgspec knows dicts alone."""
decode_record: Final = msgspec.msgpack.Decoder(Record).decode
"""Returns the Record of such bytes. Raises DECODE_ERRORS."""


class _HoldsMessage:
    """The parts of `message`, for those who have what it came in."""

    __slots__ = ()
    message: Record

    @property
    def id(self) -> str:
        """The message's id, which is unique in its topic."""
        return self.message.id

    @property
    def topic(self) -> str:
        """The message's topic."""
        return self.message.topic

    @property
    def key(self) -> str | None:
        """The message's key, if it has one."""
        return self.message.key

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers."""
        return self.message.headers

    @property
    def body(self) -> bytes:
        """The message's body, as it was published."""
        return self.message.body


class Delivery(_HoldsMessage, msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A delivery of a message to one consumer of a group; settle it with `receipt` before the invisible time ends.

    `attempt` counts from 1. `expired`: the invisible time of a delivery ran out, and no consumer has tried it since. It
    may have ended its consumer: one that pulls with `begins` reports such a message as begun before it handles it.
    """

    receipt: str
    attempt: int
    message: Record
    expired: bool = False

    @property
    def created_at_ms(self) -> int:
        """When the message was published, by its producer's clock, in milliseconds since the Unix epoch."""
        return self.message.created_at_ms

    @property
    def deliver_at_ms(self) -> int | None:
        """The due time that was asked for, if any, in milliseconds since the Unix epoch."""
        return self.message.deliver_at_ms

    def json(self) -> Any:
        """Returns the body, decoded from JSON. Raises InvalidMessage if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except DECODE_ERRORS as error:
            raise InvalidMessage(f"message {self.id} on {self.topic} has a body that is not JSON: {error}") from error


class PublishStatus(StrEnum):
    """The result of publishing one message of a batch.

    `rejected`: the message can never be stored as it is. `deferred`: it was not stored for a reason that an operator
    can remove (its topic does not exist, is full or forbidden); retry it later. Only adapters of other brokers
    return `deferred`.
    """

    STORED = "stored"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"
    DEFERRED = "deferred"

    @property
    def is_success(self) -> bool:
        """Returns whether the broker has the message."""
        return self in {PublishStatus.STORED, PublishStatus.DUPLICATE}


class AckStatus(StrEnum):
    """The result of one acknowledgement."""

    ACKED = "acked"
    ALREADY_ACKED = "already_acked"
    STALE = "stale"
    UNKNOWN = "unknown"


class NackStatus(StrEnum):
    """The result of one negative acknowledgement."""

    REQUEUED = "requeued"
    DEAD = "dead"
    STALE = "stale"


class ExtendStatus(StrEnum):
    """The result of one extension of an invisible time."""

    EXTENDED = "extended"
    STALE = "stale"


class CancelStatus(StrEnum):
    """The result of one cancel: `canceled` means never delivered, also after restarts."""

    CANCELED = "canceled"
    TOO_LATE = "too_late"
    UNKNOWN = "unknown"


class PublishResult(msgspec.Struct, frozen=True, gc=False):
    """The broker's result for one message; `error` says why it was rejected or deferred. `duplicate` is a success."""

    id: str
    status: PublishStatus
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """The settings of a consumer group; start "at" requires `start_at_ms`."""

    start: str = "earliest"  # "earliest" | "latest" | "at"
    start_at_ms: int | None = None
    filter: str | None = None
    max_attempts: int = limits.ATTEMPTS_MAX_DEFAULT
    backoff_initial_ms: int = 1_000
    backoff_multiplier: float = 2.0
    backoff_max_ms: int = 5 * 60 * 1000
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.start not in {"earliest", "latest", "at"} or (self.start == "at") != (self.start_at_ms is not None):
            raise InvalidMessage('start is "earliest", "latest" or a time ({"at_ms": N})')
        if not 1 <= self.max_attempts <= 1000:
            raise InvalidMessage("max_attempts must be from 1 to 1000")
        if self.backoff_initial_ms < 1 or self.backoff_max_ms < self.backoff_initial_ms or self.backoff_multiplier < 1:
            raise InvalidMessage("backoff needs 1 <= initial_ms <= max_ms and multiplier >= 1")


class DeadLetter(_HoldsMessage, msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A message that a group failed to process, with the reason and the number of attempts.

    The message has an empty id, and nothing else, if its record is damaged.
    """

    message: Record
    group: str
    attempts: int
    reason: str
    dead_at_ms: int
    history: History = ()
    """(reason, attempts that failed with it one after the other), oldest first; the newest 8 entries."""
    has_contents: bool = True
    """Whether the message has its key, headers and body: they are not for a caller that may not consume."""


class DeadFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters of a group are meant: those that fit all that is given.

    A time goes with something else, never alone: what nobody has looked at does not go because it is old.
    """

    reason: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Part of the last reason, as it is written."""
    key: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    headers: Annotated[dict[str, str], msgspec.Meta(min_length=1)] | None = None
    """All of these, with these values."""
    from_ms: Annotated[int, msgspec.Meta(ge=0, le=limits.TIME_MS_MAX)] | None = None
    """Dead at this time or later."""
    to_ms: Annotated[int, msgspec.Meta(ge=0, le=limits.TIME_MS_MAX)] | None = None
    """Dead before this time."""

    def check(self) -> None:
        """Raise InvalidMessage if it says no more than when."""
        if not (self.reason or self.key or self.headers):
            raise InvalidMessage("say which dead letters by a reason, a key or headers; a time alone chooses none")

    @property
    def needs_messages(self) -> bool:
        """Whether the messages must be read to tell: what died, when and why is in memory."""
        return self.key is not None or bool(self.headers)

    def fits_death(self, *, reason: str, dead_at_ms: int) -> bool:
        """Returns whether a dead letter fits as far as its reason and its time tell."""
        return (
            (self.reason is None or self.reason in reason)
            and (self.from_ms is None or dead_at_ms >= self.from_ms)
            and (self.to_ms is None or dead_at_ms < self.to_ms)
        )

    def fits_message(self, *, key: str | None, headers: Mapping[str, str]) -> bool:
        """Returns whether a message fits as far as its key and its headers tell."""
        return (self.key is None or self.key == key) and (self.headers or {}).items() <= dict(headers).items()


class DeadCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many dead letters are meant, of those that were dead before `dead_before_ms`, the broker's time of counting.

    A discard that is given this time leaves out what died since, so that it takes no more than were counted.
    """

    count: int
    dead_before_ms: int


class DeadEdit(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator changes in a dead letter; what is not named stays. Raises InvalidMessage if nothing is."""

    body: bytes | None = None
    headers: Mapping[str, str] = {}
    """These are set; one that it has is replaced."""
    remove_headers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.body is None and not self.headers and not self.remove_headers:
            raise InvalidMessage("say what to change: a body, headers, or headers to remove")

    def applied(self, message: Record, *, message_id: str, now_ms: int) -> Message:
        """Returns the edited message: of the same topic and key, due now, with the former id in a header. Raises
        InvalidMessage if it exceeds a limit.
        """
        gone = {*self.remove_headers, DUE_HEADER}  # it was due long ago, and the edited one is due now
        kept = {name: value for name, value in message.headers.items() if name not in gone}
        return Message(
            id=message_id, topic=message.topic, key=message.key,
            headers={**kept, **self.headers, EDITED_HEADER: message.id},
            body=message.body if self.body is None else self.body, created_at_ms=now_ms,
        )  # fmt: skip


class EditStatus(StrEnum):
    """What became of one edit of a dead letter: `edited`, now or by an earlier request of the same operation;
    `not_dead`: the group has no dead letter of this id (any more); `refused`: the edited message exceeds a limit, or
    the operation was used for this message before.
    """

    EDITED = "edited"
    NOT_DEAD = "not_dead"
    REFUSED = "refused"


class EditResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one edit: `new_id` is the edited message's, `error` says why it was refused."""

    id: str
    status: EditStatus
    new_id: str | None = None
    error: str | None = None


class EditPage(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the edits of one page of dead letters; `next`: where the next page begins (None: that was all)."""

    results: list[EditResult]
    next: int | None = None


def check_why(why: str) -> str:
    """Return an operator's reason, or raise InvalidMessage: text of 1 to 1,024 characters."""
    if not _is_text(why) or not 1 <= len(why) <= limits.REASON_CHARS_MAX or not _is_utf8(why):
        raise InvalidMessage(f"say why, in 1 to {limits.REASON_CHARS_MAX:,} characters")
    return why


def encode_body(body: object) -> tuple[bytes, str | None]:
    """Encode a published body: returns its bytes and their content type (None for bytes and str).

    bytes stay unchanged, str becomes UTF-8, anything else JSON. Raises InvalidMessage for values that JSON cannot
    represent, NaN and infinities among them.
    """
    match body:
        case bytes():
            return body, None
        case bytearray() | memoryview():
            return bytes(body), None
        case str():
            try:
                return body.encode(), None
            except UnicodeEncodeError as error:
                raise InvalidMessage("the body cannot be written as UTF-8; pass bytes") from error
        case _:
            try:
                encoded = _encode_json(body)
                path = non_finite_path(body) if b"null" in encoded else None
            except (TypeError, ValueError, msgspec.EncodeError, RecursionError) as error:
                raise InvalidMessage(
                    f"the body cannot be written as JSON ({error}); pass bytes, str or JSON-able data"
                ) from error
            if path is not None:
                raise InvalidMessage(f"the body has a number that JSON does not know at {path}; use None or a string")
            return encoded, JSON_CONTENT_TYPE


def check_topic(topic: str) -> str:
    """Return the topic as a plain str, or raise InvalidMessage: `[A-Za-z0-9._-]{1,255}`, and neither `.` nor `..`."""
    return _check_name(topic, kind="topic")


def check_group(group: str) -> str:
    """Return the consumer group's name, or raise InvalidMessage; the same rule as for topics."""
    return _check_name(group, kind="consumer group")


def check_recurring(name: str) -> str:
    """Return the name of a recurring message, or raise InvalidMessage; the same rule as for topics."""
    return _check_name(name, kind="recurring message")


def check_message_id(message_id: str) -> str:
    """Return the id as a plain str, or raise InvalidMessage: `[A-Za-z0-9._:-]{1,64}`."""
    if not _is_text(message_id) or not _MESSAGE_ID.fullmatch(message_id):
        raise InvalidMessage(
            f"message id {_shown(message_id)} must be 1 to {limits.MESSAGE_ID_CHARS_MAX} "
            "of the characters A-Z a-z 0-9 . _ : -"
        )
    return _plain(message_id)


def check_key(key: str) -> str:
    """Return the key, or raise InvalidMessage: text of 1 to 1,024 bytes in UTF-8."""
    if not _is_text(key):
        raise InvalidMessage(f"the key must be a str, not {type(key).__name__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage("the key cannot be written as UTF-8") from error
    if not 1 <= size <= limits.KEY_BYTES_MAX:
        raise InvalidMessage(f"the key has {size:,} bytes; 1 to {limits.KEY_BYTES_MAX:,} are allowed")
    return key


def check_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers, or raise InvalidMessage: at most 64, HTTP token names, str values, 32 KiB in all."""
    check_mapping(headers)
    if len(headers) > limits.HEADERS_MAX:
        raise InvalidMessage(f"{len(headers)} headers are more than the {limits.HEADERS_MAX} allowed")
    total = 0
    for name, value in headers.items():
        if not _is_text(name) or not _HEADER_NAME.fullmatch(name):
            raise InvalidMessage(
                f"header name {_shown(name)} must be an HTTP token of 1 to {limits.HEADER_NAME_CHARS_MAX} characters"
            )
        if not _is_text(value):
            raise InvalidMessage(f"header {name} must be a str, not {type(value).__name__}")
        try:
            total += len(name) + len(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"header {name} cannot be written as UTF-8") from error
    if total > limits.HEADERS_BYTES_MAX:
        raise InvalidMessage(f"the headers have {total:,} bytes, more than the {limits.HEADERS_BYTES_MAX:,} allowed")
    return headers


def check_mapping(headers: object) -> None:
    """Raise InvalidMessage if headers are not a mapping: dict() would also accept a list of pairs."""
    if not isinstance(headers, Mapping):
        raise InvalidMessage(f"the headers must be a mapping of names to values, not {type(headers).__name__}")


def check_deliver_at(deliver_at_ms: int, *, now_ms: int) -> int:
    """Return the due time, or raise InvalidMessage if it is more than 731 days ahead. A past time means now; times
    before 1970 become 1970.
    """
    if deliver_at_ms - now_ms > limits.DELAY_MAX_MS:
        raise InvalidMessage(f"{DELAY_TOO_LONG}; this one is {(deliver_at_ms - now_ms) // 86_400_000:,} days")
    return max(0, deliver_at_ms)


DELAY_TOO_LONG: Final = f"a delay may be at most {limits.DELAY_MAX.days} days"
CLOCKS_DIFFER: Final = (
    f"its publisher's clock allowed the delay, and by the receiver's it is longer than {limits.DELAY_MAX.days} days: "
    "set both hosts' clocks right"
)


def refusal_of_delay(message: Record, *, now_ms: int) -> PublishResult | None:
    """Returns the answer on a message that is due too late by this host's clock; None if it is not.

    Rejected if it is due too late by its publisher's clock, too; else deferred: clocks are apart by more than their
    bound, and once they are right the message is as good as any.
    """
    due_ms, latest_ms = message.deliver_at_ms, limits.DELAY_ACCEPTED_MS_MAX
    if due_ms is None or due_ms - now_ms <= latest_ms:
        return None
    if message.created_at_ms and due_ms - message.created_at_ms <= latest_ms:
        return PublishResult(message.id, PublishStatus.DEFERRED, CLOCKS_DIFFER)
    return PublishResult(message.id, PublishStatus.REJECTED, DELAY_TOO_LONG)


def due_message(message: Record) -> Message:
    """Returns a scheduled message as its target gets it when it is due: for now, under its id, with the due time that
    was asked for as a header, if any was, unless that exceeds the limit of headers.
    """
    if message.deliver_at_ms is None:
        return _for_now(message, message.headers)
    try:
        return _for_now(message, {**message.headers, DUE_HEADER: str(message.deliver_at_ms)})
    except InvalidMessage:
        return _for_now(message, message.headers)


def _for_now(message: Record, headers: Mapping[str, str]) -> Message:
    return Message(
        id=message.id, topic=message.topic, key=message.key, headers=headers, body=message.body,
        created_at_ms=message.created_at_ms,
    )  # fmt: skip


def _check_name(name: str, *, kind: str) -> str:
    if not _is_text(name) or not _is_name(name):
        raise InvalidMessage(
            f"{kind} {_shown(name)} must be 1 to 255 of the characters A-Z a-z 0-9 . _ - and neither . nor .."
        )
    return _plain(name)


def _plain(text: str) -> str:
    """Returns a text without what a subclass of str makes of it: a member of an Enum that is a str equals its text, but
    is formatted, in a URL for instance, as its own name.
    """
    return text if type(text) is str else str.__str__(text)


def _make_plain(message: Message) -> None:
    for name in ("id", "topic", "key"):
        text = getattr(message, name)
        if text is not None:
            msgspec.structs.force_setattr(message, name, _plain(text))


@lru_cache(maxsize=4096)
def _is_name(name: str) -> bool:
    """Cached: a program has few topics, and many messages of each."""
    return _NAME.fullmatch(name) is not None and name not in {".", ".."}


def _is_text(value: object) -> bool:
    """Checked at run time, for callers without a type checker."""
    return isinstance(value, str)


def _is_utf8(text: str) -> bool:
    """Returns whether a text has no half of a surrogate pair, as a command line has for bytes that are no UTF-8."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def non_finite_path(body: object) -> str | None:
    """Returns the path of the first such number, as `$.items[3].price`; None if all numbers are finite.

    msgspec writes these as `null`: a body whose JSON has no `null` need not be searched.
    """
    waiting: list[tuple[str, Any]] = [("$", msgspec.to_builtins(body))]
    while waiting:
        path, value = waiting.pop()
        match value:
            case float() if not math.isfinite(value):
                return f"{path} ({value})"
            case dict():
                waiting.extend((f"{path}.{name}", member) for name, member in reversed(value.items()))
            case list() | tuple():
                waiting.extend((f"{path}[{index}]", value[index]) for index in range(len(value) - 1, -1, -1))
    return None
