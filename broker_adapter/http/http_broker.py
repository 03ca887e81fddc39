"""Implements the Broker port over the HTTP protocol. Leaves transport and errors to its collaborators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Final, TypeVar

import msgspec

from broker_adapter.http.http_admin import HttpAdmin
from broker_adapter.http.http_transport import Options, RequestSender, WireCodec
from broker_adapter.http.publish_batching import BackgroundPublisher, PublishCoalescer
from broker_adapter.http.request_codec import publish_request, requests_of
from outbox_core.common.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    InvalidMessage,
)
from outbox_core.messages import limits
from outbox_core.messages.broadcast_port import Start, TopicRead, check_start
from outbox_core.messages.broker_port import BrokerAdmin
from outbox_core.messages.durability_inspection import Inspection
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    Delivery,
    ExtendStatus,
    Message,
    NackStatus,
    PublishResult,
    check_group,
    check_message_id,
    check_topic,
)
from outbox_core.messages.publish_guard import Guard, allow
from outbox_core.protocol import wire, wire_conversion
from outbox_core.protocol.wire_broadcast import PackedReadAnswer, ReadAnswer, ReadRequest, delivery_read
from outbox_core.runtime.http_broker_url import HttpBrokerUrl

TURN_TIMEOUTS_MAX: Final = 4
"""A publish waits at most this many time-outs for those before it."""

Entry = TypeVar("Entry")
Status = TypeVar("Status")
Key = TypeVar("Key")


class _Deliveries(msgspec.Struct, frozen=True):
    """wire.PackedPullAnswer, read into what callers get: in MessagePack a body is always `bin`, so nothing is left to
    decode, and a message costs a quarter of what two objects for each would.
    """

    deliveries: list[Delivery]


class HttpBroker:
    """A Broker at a URL, e.g. `http://127.0.0.1:7788`, or `https://host:7788?token_file=FILE&ca_file=FILE`.

    Sends nothing before it is used; all methods are thread-safe.

    Small publishes of many threads share requests, see gathering. A publish of many topics is one request, to a broker
    that knows of these, and else one a topic. Requests are repeated where that is safe, see Connection.send(): publish,
    ack, extend, cancel and whatever only reads, but neither pull nor nack.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_ms: int = 10_000,
        ca_file: str | None = None,
        pool_size: int = 16,
        codec: str = WireCodec.MSGPACK,
    ) -> None:
        """`timeout_ms` bounds each request; a pull may take its `wait_ms` longer. `codec` is "msgpack" or "json".

        `token` and `ca_file` win over the URL's `?token_file=` and `?ca_file=`.
        """
        parsed = HttpBrokerUrl.parse(url)
        if codec not in tuple(WireCodec):
            raise ConfigurationError(f"codec is one of {', '.join(WireCodec)}, not {codec!r}")
        self._connection = RequestSender(
            Options(
                url=parsed.address,
                token=parsed.token if token is None else token,
                timeout_ms=timeout_ms,
                ca_file=parsed.ca_file if ca_file is None else ca_file,
                pool_size=pool_size,
                codec=WireCodec(codec),
            )
        )
        self._admin = HttpAdmin(self._connection)
        publish = partial(publish_request, self._connection)
        turns_s_max = TURN_TIMEOUTS_MAX * timeout_ms / 1000
        self._submitting = BackgroundPublisher(publish, address=self._connection.address, wait_s_max=turns_s_max)
        self._gathering = PublishCoalescer(publish, address=self._connection.address, wait_s_max=turns_s_max)

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch; one result a message, in order.

        A request is refused as a whole: BrokerRefused for one of its messages, NotAuthorized for one of its topics.
        What requests before it stored is `answered`; publish_isolated() finds the message at fault.
        """
        return self.publish_guarded(batch, guard=allow)

    def publish_guarded(self, batch: Sequence[Message], *, guard: Guard) -> list[PublishResult]:
        """As publish(), see GuardedPublisher. Where the guard raises, requests before may have been sent."""
        results: list[PublishResult] = []
        for chunk in requests_of(batch):
            try:
                results += self._gathering.publish(chunk, guard)
            except BrokerError as error:
                error.with_answered(dict(enumerate(results)))
                raise
        return results

    def submit(self, message: Message) -> Future[PublishResult]:
        """Publish without waiting: what becomes of the message is the future's, once it is durable.

        Messages that are submitted while a request is on its way share the next one, in order; up to 10,000 wait, who
        submits more waits for room. An asyncio program awaits `asyncio.wrap_future(broker.submit(message))`. A callback
        of the future runs in the thread that sends, and must not wait. close() sends what is left.
        """
        return self._submitting.submit(message)

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = limits.INVISIBLE_MS_DEFAULT,
        begins: bool = False,
    ) -> list[Delivery]:
        """Take what is ready, waiting up to `wait_ms` for the first; at most 1,000 messages and 60 s a call."""
        if max_messages < 1 or wait_ms < 0 or not limits.INVISIBLE_MS_MIN <= invisible_ms <= limits.INVISIBLE_MS_MAX:
            raise InvalidMessage(
                f"max_messages is at least 1, wait_ms at least 0, invisible_ms up to {limits.INVISIBLE_MS_MAX}"
            )
        request = wire.PullRequest(
            max_messages=min(max_messages, limits.PULL_MESSAGES_MAX),
            wait_ms=min(wait_ms, limits.PULL_WAIT_MS_MAX),
            invisible_ms=invisible_ms,
            begins=begins,
        )
        path = f"{_group_path(topic, group)}/pull"
        if self._connection.packed:
            return self._connection.send("POST", path, _Deliveries, body=request, wait_ms=request.wait_ms).deliveries
        answer = self._connection.send("POST", path, wire.PullAnswer, body=request, wait_ms=request.wait_ms)
        return [wire_conversion.delivery_of(delivery) for delivery in answer.deliveries]

    def read(
        self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int = 100,
        wait_ms: int = 0,
    ) -> TopicRead:  # fmt: skip
        """Read a topic on, without a group; at most 1,000 messages and 60 s a call."""
        return read_topic(
            self._connection, topic, offset=offset, start=start, max_messages=max_messages, wait_ms=wait_ms
        )

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries; a text that is no receipt is `unknown`."""

        def send(path: str, chunk: list[str]) -> list[AckStatus]:
            body = wire.AckRequest(receipts=chunk)
            answer = self._connection.send("POST", f"{path}/ack", wire.AckAnswer, body=body, repeatable=True)
            return [result.status for result in answer.results]

        return _settled(receipts, send=send, foreign=AckStatus.UNKNOWN, address=self._connection.address)

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back; a text that is no receipt is `stale`. A reason is cut to 1,024 characters."""
        reason = reason[: limits.REASON_CHARS_MAX] if reason else None

        def send(path: str, chunk: list[str]) -> list[NackStatus]:
            body = wire.NackRequest(receipts=chunk, delay_ms=delay_ms, reason=reason, counts=counts)
            return [
                result.status
                for result in self._connection.send("POST", f"{path}/nack", wire.NackAnswer, body=body).results
            ]

        return _settled(receipts, send=send, foreign=NackStatus.STALE, address=self._connection.address)

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Keep deliveries invisible for `invisible_ms` from now."""

        def send(path: str, chunk: list[str]) -> list[ExtendStatus]:
            body = wire.ExtendRequest(receipts=chunk, invisible_ms=invisible_ms, begun=begun)
            answer = self._connection.send("POST", f"{path}/extend", wire.ExtendAnswer, body=body, repeatable=True)
            return [result.status for result in answer.results]

        return _settled(receipts, send=send, foreign=ExtendStatus.STALE, address=self._connection.address)

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel scheduled messages; `canceled` means never delivered."""
        for message_id in message_ids:
            check_message_id(message_id)
        statuses: list[CancelStatus] = []
        for chunk in _slices(message_ids):
            body = wire.CancelRequest(ids=list(chunk))
            answer = self._connection.send(
                "POST", "/v1/scheduled/cancel", wire.CancelAnswer, body=body, repeatable=True
            )
            _check_count(answer.results, chunk, address=self._connection.address)
            statuses += [result.status for result in answer.results]
        return statuses

    @property
    def admin(self) -> BrokerAdmin:
        """Groups, figures, dead letters."""
        return self._admin

    def inspect(self, topics: Sequence[str] = ()) -> Inspection:  # noqa: ARG002 - it is durable for every topic
        """Ask whether it can serve. Raises BrokerUnavailable if it cannot; it has no setting that weakens a promise."""
        self._connection.send("GET", "/readyz", wire.HealthAnswer, repeatable=True)
        return Inspection(product="outbox-mq", version="")

    def close(self) -> None:
        """Send what was submitted, and let go of the connections; idempotent."""
        self._submitting.close()
        self._connection.close()


def _settled(
    receipts: Sequence[str], *, send: Callable[[str, list[str]], list[Status]], foreign: Status, address: str
) -> list[Status]:
    """One status a receipt, each asked for where its group is."""
    path = _common_path(receipts)
    if path is not None:
        answered = send(path, list(receipts))
        _check_count(answered, receipts, address=address)
        return answered
    statuses = [foreign] * len(receipts)
    for path, indexes in _by(receipts, key=_receipt_path).items():
        if path is None:
            continue
        for chunk in _slices(indexes):
            answered = send(path, [receipts[index] for index in chunk])
            _check_count(answered, chunk, address=address)
            for index, status in zip(chunk, answered, strict=True):
                statuses[index] = status
    return statuses


def _common_path(receipts: Sequence[str]) -> str | None:
    """Returns the route that settles all of these in one request; None if several requests are needed, or none."""
    if not 0 < len(receipts) <= limits.BATCH_MESSAGES_MAX:
        return None
    topic, _, rest = receipts[0].partition("/")
    start = f"{topic}/{rest.partition('/')[0]}/"
    return _receipt_path(start) if all(receipt.startswith(start) for receipt in receipts) else None


def _check_count(answered: Sequence[object], entries: Sequence[object], *, address: str) -> None:
    if len(answered) != len(entries):
        raise BrokerUnavailable(f"the broker at {address} answered {len(answered)} results for {len(entries)} entries")


def _receipt_path(receipt: str) -> str | None:
    """Returns the route that settles a receipt, which begins with its topic and group; None if it is not a receipt."""
    topic, _, rest = receipt.partition("/")
    group, slash, _ = rest.partition("/")
    return _known_path(topic, group) if slash else None


@lru_cache(maxsize=1024)
def _known_path(topic: str, group: str) -> str | None:
    try:
        return _group_path(topic, group)
    except InvalidMessage:
        return None


def _group_path(topic: str, group: str) -> str:
    return f"/v1/topics/{check_topic(topic)}/groups/{check_group(group)}"


def _by(entries: Iterable[Entry], *, key: Callable[[Entry], Key]) -> dict[Key, list[int]]:
    """The indexes of entries in their list, by key, in order."""
    indexes_by_key: defaultdict[Key, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        indexes_by_key[key(entry)].append(index)
    return indexes_by_key


def _slices(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    for start in range(0, len(entries), limits.BATCH_MESSAGES_MAX):
        yield entries[start : start + limits.BATCH_MESSAGES_MAX]


def read_topic(
    connection: RequestSender, topic: str, *, offset: int | None, start: Start, max_messages: int, wait_ms: int
) -> TopicRead:
    """One read. It is repeated where no answer came: the broker keeps nothing of it."""
    check_start(start)
    if max_messages < 1 or wait_ms < 0 or (offset is not None and offset < 0):
        raise InvalidMessage("max_messages is at least 1, wait_ms and offset at least 0")
    request = ReadRequest(
        offset=offset, start=start, max_messages=min(max_messages, limits.PULL_MESSAGES_MAX),
        wait_ms=min(wait_ms, limits.PULL_WAIT_MS_MAX),
    )  # fmt: skip
    kind: type[PackedReadAnswer | ReadAnswer] = PackedReadAnswer if connection.packed else ReadAnswer
    answer = connection.send(
        "POST", f"/v1/topics/{check_topic(topic)}/read", kind, body=request, wait_ms=request.wait_ms, repeatable=True
    )
    return TopicRead(
        deliveries=[delivery_read(message) for message in answer.messages],
        offset=answer.offset,
        next_offset=answer.next_offset,
    )
