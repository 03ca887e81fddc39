"""Builds requests to the broker and decodes its answers, as functions without I/O: a transport carries the bytes.

One function an operation makes its Exchange, or raises InvalidMessage. RequestCodec makes a request's bytes, and of its
answer the operation's result or the port's error; parse_answer() finds an answer in bytes that come in whatever pieces.
A transport, blocking or not, adds connections, time-outs, and the second try that ExchangeFailed allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import msgspec

from broker_adapter.http.errors import of_answer
from outbox_core.common.errors import DECODE_ERRORS, BrokerUnavailable, ConfigurationError, InvalidMessage
from outbox_core.messages import limits
from outbox_core.messages.broadcast_port import Start, TopicRead, check_start
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    Delivery,
    ExtendStatus,
    Message,
    NackStatus,
    PublishResult,
    check_group,
    check_topic,
    encode_packed,
)
from outbox_core.protocol import wire, wire_conversion
from outbox_core.protocol.decoder_cache import json_decoder, msgpack_decoder
from outbox_core.protocol.wire import JSON_TYPE, MSGPACK_TYPE
from outbox_core.runtime.http_broker_url import check_token

Result = TypeVar("Result")
Shape = TypeVar("Shape")
Entry = TypeVar("Entry")

REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
"""A publish is split into requests of about this size; one message may be larger."""
PORTS: Final = {"http": 80, "https": 443}
USER_AGENT: Final = "outbox-mq"
HEAD_BYTES_MAX: Final = 64 * 1024
CHUNK_LINE_BYTES_MAX: Final = 4 * 1024
ANSWER_BYTES_MAX: Final = 512 * 1024 * 1024
"""Bodies of 64 MiB, each byte of which takes six in JSON (a control character), and their headers. More is no answer
of this protocol.
"""
_MESSAGE_OVERHEAD_BYTES: Final = 256
_HEAD_END: Final = b"\r\n\r\n"
_KNOWN_HEAD_BYTES_MAX: Final = 1024
_LENGTH_DIGITS_MAX: Final = 15
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class WireCodec(StrEnum):
    """The format of bodies: MessagePack is fast, JSON can be read on the wire."""

    MSGPACK = "msgpack"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the connection to a broker. `ca_file` None: the certificates that requests brings."""

    url: str
    token: str | None = field(default=None, repr=False)
    timeout_ms: int = 10_000
    ca_file: str | None = None
    pool_size: int = 16
    codec: WireCodec = WireCodec.MSGPACK

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _host_of(parts)
        except ValueError as error:
            raise ConfigurationError(f"an HTTP broker's URL has no host or port that could be: {error}") from error
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ConfigurationError(
                "an HTTP broker's URL looks like http://127.0.0.1:7788, with nothing behind the path but options"
            )
        if parts.username or parts.password:
            raise ConfigurationError("a broker's URL carries no user or password; pass token=, or say ?token_file=")
        if self.timeout_ms < 1 or self.pool_size < 1:
            raise ConfigurationError("timeout_ms and pool_size must be at least 1")
        check_token(self.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Generic[Shape, Result]):
    """One request, and how its answer is read: decoded as `shape`, of which `result` makes what the caller gets, or
    raises UnexpectedAnswer.

    The broker may hold its answer back for `wait_ms`. A `repeatable` one may be carried out twice.
    """

    method: str
    path: str
    shape: type[Shape]
    result: Callable[[Shape], Result]
    body: msgspec.Struct | Sequence[Message] | None = None
    query: Mapping[str, str] | None = None
    wait_ms: int = 0
    repeatable: bool = False


class UnexpectedAnswer(Exception):
    """An answer that can be decoded, and is not one to its request."""


class Repeat(StrEnum):
    """Whether a request whose exchange failed may be sent a second time."""

    ALWAYS = "always"
    """Nothing was sent: no connection could be made."""
    IF_REPEATABLE = "if_repeatable"
    """The connection broke before the answer was whole: the broker may have carried it out."""
    NEVER = "never"
    """As after a time-out: a broker that is late is not helped by the same work twice."""


class ExchangeFailed(Exception):
    """A request had no whole answer; says why, and no secret."""

    def __init__(self, reason: str, *, repeat: Repeat = Repeat.IF_REPEATABLE) -> None:
        super().__init__(reason)
        self.repeat = repeat

    def may_repeat(self, request: Exchange[Any, Any]) -> bool:
        """Whether the request may be sent a second time."""
        return self.repeat is Repeat.ALWAYS or (self.repeat is Repeat.IF_REPEATABLE and request.repeatable)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """An answer that came whole. Names of headers are in lower case; of a repeated one the first counts."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    stays_open: bool = False
    """Whether the connection may carry another request."""


class RequestCodec:
    """From requests to bytes, and from answers to results or errors, for one broker. Immutable; does no I/O."""

    def __init__(self, options: Options) -> None:
        parts = urlsplit(options.url.rstrip("/"))
        self.packed = options.codec is WireCodec.MSGPACK
        """Whether MessagePack is spoken."""
        self.address = _host_of(parts) if parts.port else f"{_host_of(parts)}:{PORTS[parts.scheme]}"
        """Host and port, for messages: never a user, a password or a token."""
        self._type = MSGPACK_TYPE if self.packed else JSON_TYPE
        self._base = quote(parts.path, safe="/%:@!$&'()*+,;=~")
        self._head = _head_of(parts, accept=self._type, token=options.token)

    def encode(self, request: Exchange[Any, Any]) -> bytes:
        """The request as it goes over the wire."""
        target = self._base + request.path + (f"?{urlencode(request.query)}" if request.query else "")
        if request.body is None:
            length = "" if request.method == "GET" else "content-length: 0\r\n"
            return f"{request.method} {target} HTTP/1.1\r\n{self._head}{length}\r\n".encode("ascii")
        data = encode_packed(request.body) if self.packed else msgspec.json.encode(request.body)
        fields = f"content-type: {self._type}\r\ncontent-length: {len(data)}\r\n"
        return f"{request.method} {target} HTTP/1.1\r\n{self._head}{fields}\r\n".encode("ascii") + data

    def decode(self, request: Exchange[Shape, Result], response: HttpResponse) -> Result:
        """What an answer says. Raises the error that it stands for, BrokerUnavailable if it is none to the request."""
        if response.status_code != 200:
            raise of_answer(response.status_code, response.headers, response.content, what=self._what(request))
        kind = response.headers.get("content-type", "").partition(";")[0]
        try:
            return request.result(_decoder(kind, request.shape).decode(response.content))
        except UnexpectedAnswer as error:
            raise BrokerUnavailable(f"{self._what(request)}: {error}") from error
        except (LookupError, *DECODE_ERRORS) as error:
            what = self._what(request)
            raise BrokerUnavailable(f"{what}: the answer is not one of this protocol ({error})") from error

    def failure(self, request: Exchange[Any, Any], error: ExchangeFailed) -> BrokerUnavailable:
        """The error of a request without a whole answer: the broker may answer another time, and the URL was checked
        when the client was made.
        """
        return BrokerUnavailable(f"{self._what(request)}: {error}")

    def _what(self, request: Exchange[Any, Any]) -> str:
        return f"{request.method} {request.path} at {self.address}"


# --- publish


class _Results(msgspec.Struct, frozen=True):
    """wire.PublishAnswer, decoded directly into the results that callers get."""

    results: list[PublishResult]


def requests_of(batch: Sequence[Message], *, packed: bool) -> Iterator[Sequence[Message]]:
    """A batch, cut where a request would carry too many messages or bytes."""
    size_of, bytes_max = _packed_bytes, REQUEST_BYTES_MAX
    if not packed:
        size_of, bytes_max = wire_conversion.json_bytes_max, wire.JSON_BYTES_MAX
    start = size_bytes = 0
    for index, message in enumerate(batch):
        more_bytes = size_of(message)
        is_full = index - start >= limits.BATCH_MESSAGES_MAX or size_bytes + more_bytes > bytes_max
        if is_full and index > start:
            yield batch[start:index]
            start, size_bytes = index, 0
        size_bytes += more_bytes
    if start < len(batch):
        yield batch[start:]


def publish_request(messages: Sequence[Message], *, packed: bool) -> Exchange[_Results, list[PublishResult]]:
    """Publish one request's worth. What is refused is refused as a whole."""

    def result(answer: _Results) -> list[PublishResult]:
        if [outcome.id for outcome in answer.results] != [message.id for message in messages]:
            raise UnexpectedAnswer("the answer is about other messages than those published")
        return answer.results

    body: Sequence[Message] | wire.PublishRequest = messages
    if not packed:
        body = wire.PublishRequest(messages=[wire_conversion.json_message(message) for message in messages])
    return Exchange(method="POST", path="/v1/publish", shape=_Results, result=result, body=body, repeatable=True)


def _packed_bytes(message: Message) -> int:
    return len(message.body) + _MESSAGE_OVERHEAD_BYTES


# --- pull and read


def pull_request(
    topic: str, group: str, *, max_messages: int, wait_ms: int, invisible_ms: int, begins: bool, packed: bool
) -> Exchange[Any, list[Delivery]]:
    """Take what is ready."""
    if max_messages < 1 or wait_ms < 0 or not limits.INVISIBLE_MS_MIN <= invisible_ms <= limits.INVISIBLE_MS_MAX:
        raise InvalidMessage(
            f"max_messages is at least 1, wait_ms at least 0, invisible_ms up to {limits.INVISIBLE_MS_MAX}"
        )
    body = wire.PullRequest(
        max_messages=min(max_messages, limits.PULL_MESSAGES_MAX),
        wait_ms=min(wait_ms, limits.PULL_WAIT_MS_MAX),
        invisible_ms=invisible_ms,
        begins=begins,
    )
    return Exchange(
        method="POST",
        path=f"{group_path(topic, group)}/pull",
        shape=list[Delivery] if packed else wire.PullAnswer,
        result=whole_result if packed else _json_deliveries,
        body=body,
        wait_ms=body.wait_ms,
    )


def _json_deliveries(answer: wire.PullAnswer) -> list[Delivery]:
    return [wire_conversion.delivery_of(delivery) for delivery in answer.deliveries]


def read_request(
    topic: str, *, offset: int | None, start: Start, max_messages: int, wait_ms: int, packed: bool
) -> Exchange[Any, TopicRead]:
    """Read a topic on from a place of the caller's. It is repeatable: the broker keeps nothing of it."""
    check_start(start)
    if max_messages < 1 or wait_ms < 0 or (offset is not None and offset < 0):
        raise InvalidMessage("max_messages is at least 1, wait_ms and offset at least 0")
    body = wire.ReadRequest(
        offset=offset, start=start, max_messages=min(max_messages, limits.PULL_MESSAGES_MAX),
        wait_ms=min(wait_ms, limits.PULL_WAIT_MS_MAX),
    )  # fmt: skip
    return Exchange(
        method="POST",
        path=f"/v1/topics/{check_topic(topic)}/read",
        shape=TopicRead if packed else wire.ReadAnswer,
        result=whole_result if packed else wire_conversion.topic_read_of,
        body=body,
        wait_ms=body.wait_ms,
        repeatable=True,
    )


# --- settle, cancel, inspect


def receipts_by_group(receipts: Sequence[str]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yields what requests settle these, each by its group's path and the indexes of its receipts, which begin with
    their topic and group. A text that is no receipt is in none.
    """
    path = _common_path(receipts)
    if path is not None:
        yield path, range(len(receipts))
        return
    indexes_by_path: defaultdict[str | None, list[int]] = defaultdict(list)
    for index, receipt in enumerate(receipts):
        indexes_by_path[_receipt_path(receipt)].append(index)
    for path, indexes in indexes_by_path.items():
        if path is not None:
            yield from ((path, chunk) for chunk in slices(indexes))


def ack_request(path: str, receipts: Sequence[str]) -> Exchange[wire.AckAnswer, list[AckStatus]]:
    """Settle deliveries of one group."""
    body = wire.AckRequest(receipts=list(receipts))
    return Exchange(
        method="POST", path=f"{path}/ack", shape=wire.AckAnswer, result=_statuses(len(receipts)), body=body,
        repeatable=True,
    )  # fmt: skip


def nack_request(
    path: str, receipts: Sequence[str], *, delay_ms: int | None, reason: str | None, counts: bool
) -> Exchange[wire.NackAnswer, list[NackStatus]]:
    """Give deliveries of one group back. It is not repeatable: a second one would count a second attempt."""
    body = wire.NackRequest(receipts=list(receipts), delay_ms=delay_ms, reason=reason, counts=counts)
    return Exchange(
        method="POST", path=f"{path}/nack", shape=wire.NackAnswer, result=_statuses(len(receipts)), body=body
    )


def extend_request(
    path: str, receipts: Sequence[str], *, invisible_ms: int, begun: bool
) -> Exchange[wire.ExtendAnswer, list[ExtendStatus]]:
    """Keep deliveries of one group invisible for `invisible_ms` from now."""
    body = wire.ExtendRequest(receipts=list(receipts), invisible_ms=invisible_ms, begun=begun)
    return Exchange(
        method="POST", path=f"{path}/extend", shape=wire.ExtendAnswer, result=_statuses(len(receipts)), body=body,
        repeatable=True,
    )  # fmt: skip


def cancel_request(message_ids: Sequence[str]) -> Exchange[wire.CancelAnswer, list[CancelStatus]]:
    """Cancel scheduled messages, up to a batch of them."""
    body = wire.CancelRequest(ids=list(message_ids))
    return Exchange(
        method="POST", path="/v1/scheduled/cancel", shape=wire.CancelAnswer, result=_statuses(len(message_ids)),
        body=body, repeatable=True,
    )  # fmt: skip


def ready_request() -> Exchange[wire.HealthAnswer, wire.HealthAnswer]:
    """Ask whether it can serve."""
    return Exchange(method="GET", path="/readyz", shape=wire.HealthAnswer, result=whole_result, repeatable=True)


def whole_result(answer: Shape) -> Shape:
    """Of an answer that is what callers get."""
    return answer


def no_result(_: msgspec.Struct) -> None:
    """Of an answer that says nothing but that it was done."""


def group_path(topic: str, group: str) -> str:
    """The route of a group."""
    return f"/v1/topics/{check_topic(topic)}/groups/{check_group(group)}"


def slices(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """What fits into one request each."""
    for start in range(0, len(entries), limits.BATCH_MESSAGES_MAX):
        yield entries[start : start + limits.BATCH_MESSAGES_MAX]


def _statuses(count: int) -> Callable[[Any], list[Any]]:
    """Of an answer with as many results, their statuses."""

    def result(answer: Any) -> list[Any]:
        if len(answer.results) != count:
            raise UnexpectedAnswer(f"{len(answer.results)} results were answered for {count} entries")
        return [outcome.status for outcome in answer.results]

    return result


def _common_path(receipts: Sequence[str]) -> str | None:
    """Returns the route that settles all of these in one request; None if several requests are needed, or none."""
    if not 0 < len(receipts) <= limits.BATCH_MESSAGES_MAX:
        return None
    topic, _, rest = receipts[0].partition("/")
    start = f"{topic}/{rest.partition('/')[0]}/"
    return _receipt_path(start) if all(receipt.startswith(start) for receipt in receipts) else None


def _receipt_path(receipt: str) -> str | None:
    """Returns the route that settles a receipt; None if it is not a receipt."""
    topic, _, rest = receipt.partition("/")
    group, slash, _ = rest.partition("/")
    return _known_path(topic, group) if slash else None


@lru_cache(maxsize=1024)
def _known_path(topic: str, group: str) -> str | None:
    try:
        return group_path(topic, group)
    except InvalidMessage:
        return None


# --- HTTP/1.1


def parse_answer() -> Generator[None, bytes, HttpResponse]:
    """Finds one answer. Yields for each piece that it needs; is sent the piece, which is empty at the end of the
    connection; returns the answer. Raises ExchangeFailed where it breaks off, is no HTTP, or is too long.

    http.client reads an answer's head with the parser of e-mails, which costs more than all else of a small request: a
    single publish by urllib3's pool, which reads so, takes this client 232 us of processor time, by this parser 83.
    What an answer of HTTP/1.1 may look like is little (RFC 9112): a status line, fields, and a body with a length or in
    chunks.
    """
    return _AnswerParser().answer()


class _AnswerParser:
    """Bytes of one answer, those that came and are not used yet in `_data`."""

    def __init__(self) -> None:
        self._data = b""
        self._heads_bytes = 0

    def answer(self) -> Generator[None, bytes, HttpResponse]:
        """Parse it all. Answers of 1xx are passed over: they announce another."""
        status, version, headers = yield from self._head()
        while 100 <= status < 200:
            status, version, headers = yield from self._head()
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if coding.lower() != "chunked":
                raise ExchangeFailed(f"an answer cannot be read in the transfer coding {coding[:100]!r}")
            content = yield from self._chunks()
        elif length is not None:
            content = yield from self._exactly(_length_of(length, base=10))
        else:
            # A head that breaks off, and a body that ends with the connection, look like a lost connection.
            raise ExchangeFailed("the answer has no length: its head broke off")
        certain = version == b"HTTP/1.1" and (coding is None or length is None) and not self._data
        stays_open = certain and headers.get("connection", "").lower() != "close"
        return HttpResponse(status_code=status, headers=headers, content=content, stays_open=stays_open)

    def _head(self) -> Generator[None, bytes, tuple[int, bytes, Mapping[str, str]]]:
        while True:
            end = self._data.find(_HEAD_END)
            head_bytes = len(self._data) if end < 0 else end + len(_HEAD_END)
            # All heads of an answer have one bound: those of 1xx could follow each other without end.
            is_too_long = self._heads_bytes + head_bytes > HEAD_BYTES_MAX
            if is_too_long or (head_bytes >= 5 and not self._data.startswith(b"HTTP/")):
                raise ExchangeFailed("the answer's head is none of HTTP")
            if end >= 0:
                break
            self._data += _checked((yield))
        self._heads_bytes += head_bytes
        head, self._data = self._data[:end], self._data[head_bytes:]
        return _known_head(head) if end <= _KNOWN_HEAD_BYTES_MAX else _parsed_head(head)

    def _exactly(self, size: int) -> Generator[None, bytes, bytes]:
        if size > ANSWER_BYTES_MAX:
            raise _too_long()
        pieces, have = [self._data], len(self._data)
        while have < size:
            piece = _checked((yield))
            pieces.append(piece)
            have += len(piece)
        data = b"".join(pieces) if len(pieces) > 1 else pieces[0]
        self._data = data[size:]
        return data[:size] if self._data else data

    def _chunks(self) -> Generator[None, bytes, bytes]:
        # What frames the chunks counts, too: each byte that comes buys time.
        pieces: list[bytes] = []
        total = 0
        while True:
            line = yield from self._line()
            size = _length_of(line.partition(b";")[0].decode("latin-1"), base=16)
            total += size + len(line)
            if total > ANSWER_BYTES_MAX:
                raise _too_long()
            if not size:
                break
            pieces.append((yield from self._exactly(size + 2))[:size])
        while trailer := (yield from self._line()):
            total += len(trailer)
            if total > ANSWER_BYTES_MAX:
                raise _too_long()
        return b"".join(pieces)

    def _line(self) -> Generator[None, bytes, bytes]:
        while (end := self._data.find(b"\r\n")) < 0:
            if len(self._data) > CHUNK_LINE_BYTES_MAX:
                raise ExchangeFailed("the answer has a line of a chunk that does not end")
            self._data += _checked((yield))
        line, self._data = self._data[:end], self._data[end + 2 :]
        return line


def _checked(piece: bytes) -> bytes:
    if not piece:
        raise ExchangeFailed("the connection was closed before the answer was whole")
    return piece


def _too_long() -> ExchangeFailed:
    return ExchangeFailed(f"the answer has more than {ANSWER_BYTES_MAX:,} bytes", repeat=Repeat.NEVER)


def _parsed_head(head: bytes) -> tuple[int, bytes, Mapping[str, str]]:
    status_line, *lines = head.split(b"\r\n")
    version, _, status_text = status_line.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not status_text[:3].isdigit():
        raise ExchangeFailed("the answer's first line is none of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise ExchangeFailed("the answer has a header line without a colon")
        first_value = headers.setdefault(name.decode("latin-1").lower(), text := value.strip().decode("latin-1"))
        if first_value != text and name.lower() in _FRAMING:
            raise ExchangeFailed("the answer says twice, and differently, where it ends")
    return int(status_text[:3]), version, MappingProxyType(headers)


_known_head = lru_cache(maxsize=64)(_parsed_head)
"""Answers of one second to one kind of request often begin with the same bytes."""


def _length_of(text: str, *, base: int) -> int:
    stripped = text.strip()
    if not stripped.isascii() or not stripped.isalnum() or len(stripped) > _LENGTH_DIGITS_MAX:
        raise ExchangeFailed(f"{stripped[:100]!r} is no length of an answer")
    try:
        return int(stripped, base)
    except ValueError as error:
        raise ExchangeFailed(f"{stripped[:100]!r} is no length of an answer") from error


def _head_of(parts: SplitResult, *, accept: str, token: str | None) -> str:
    """The header lines that all requests have in common."""
    lines = [f"host: {_host_of(parts)}", f"accept: {accept}", "accept-encoding: identity", f"user-agent: {USER_AGENT}"]
    if token is not None:
        lines.append(f"authorization: Bearer {token}")
    return "".join(f"{line}\r\n" for line in lines)


def _host_of(parts: SplitResult) -> str:
    """Host and port as a request names them. Raises ValueError where there can be none like it."""
    name = parts.hostname.encode("idna").decode("ascii") if parts.hostname else ""
    return (f"[{name}]" if ":" in name else name) + (f":{parts.port}" if parts.port else "")


def _decoder(kind: str, shape: type[Shape]) -> msgspec.json.Decoder[Shape] | msgspec.msgpack.Decoder[Shape]:
    if kind == MSGPACK_TYPE:
        return msgpack_decoder(shape)
    if kind == JSON_TYPE:
        return json_decoder(shape)
    raise LookupError(f"media type {kind!r}")
