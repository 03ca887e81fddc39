"""Implements the Broker port over the HTTP protocol: request_codec says what goes over the wire, http_transport carries
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from broker_adapter.http.admin_client import AdminClient
from broker_adapter.http.http_transport import HttpTransport
from broker_adapter.http.publish_batching import BatchLimits, PublishBatcher
from broker_adapter.http.request_codec import (
    Exchange,
    Options,
    WireCodec,
    ack_request,
    cancel_request,
    extend_request,
    nack_request,
    publish_request,
    pull_request,
    read_request,
    ready_request,
    receipts_by_group,
    requests_of,
    slices,
)
from outbox_core.common.errors import BrokerError, ConfigurationError, NotAuthenticated
from outbox_core.messages import limits
from outbox_core.messages.broadcast_port import Start, TopicRead
from outbox_core.messages.broker_port import BrokerAdmin, Inspection
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    Delivery,
    ExtendStatus,
    Message,
    NackStatus,
    PublishResult,
    check_message_id,
)
from outbox_core.messages.publish_guard import Guard, allow
from outbox_core.runtime.http_broker_url import HttpBrokerUrl

TURN_TIMEOUTS_MAX: Final = 4
"""A publish waits at most this many time-outs for those before it."""
JSON_LIMITS: Final = BatchLimits(request_messages_max=200, request_bytes_max=512 * 1024)
"""What shares a request in JSON, of which each byte may take six: within wire.JSON_BYTES_MAX."""

Status = TypeVar("Status")


class HttpBroker:
    """A Broker at a URL, e.g. `http://127.0.0.1:7788`, or `https://host:7788?token_file=FILE&ca_file=FILE`.

    Sends nothing before it is used; all methods are thread-safe.

    Small publishes of many threads share requests, see PublishBatcher. A publish of many topics is one request.
    Requests are repeated where that is safe, see Repeat: publish, ack, extend, cancel and whatever only reads, but
    neither pull nor nack.
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
        options = Options(
            url=parsed.address,
            token=parsed.token if token is None else token,
            timeout_ms=timeout_ms,
            ca_file=parsed.ca_file if ca_file is None else ca_file,
            pool_size=pool_size,
            codec=WireCodec(codec),
        )
        self._has_token = options.token is not None
        self._transport = HttpTransport(options)
        self._packed = self._transport.codec.packed
        self._admin = AdminClient(options.url, timeout_ms=timeout_ms, token=options.token, ca_file=options.ca_file)
        turns_s_max, address = TURN_TIMEOUTS_MAX * timeout_ms / 1000, self._transport.codec.address
        self._batcher = PublishBatcher(
            self._send_publish, address=address, wait_s_max=turns_s_max, limits=None if self._packed else JSON_LIMITS
        )

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch; one result a message, in order.

        A request is refused as a whole: BrokerRefused for one of its messages, NotAuthorized for one of its topics.
        What requests before it stored is `answered`; publish_isolated() finds the message at fault.
        """
        return self.publish_guarded(batch, guard=allow)

    def publish_guarded(self, batch: Sequence[Message], *, guard: Guard) -> list[PublishResult]:
        """As publish(), see GuardedPublisher. Where the guard raises, requests before may have been sent."""
        results: list[PublishResult] = []
        for chunk in requests_of(batch, packed=self._packed):
            try:
                results += self._batcher.publish(chunk, guard)
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
        return self._batcher.submit(message)

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
        return self._transport.send(
            pull_request(
                topic, group, max_messages=max_messages, wait_ms=wait_ms, invisible_ms=invisible_ms, begins=begins,
                packed=self._packed,
            )
        )  # fmt: skip

    def read(
        self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int = 100,
        wait_ms: int = 0,
    ) -> TopicRead:  # fmt: skip
        """Read a topic on, without a group; at most 1,000 messages and 60 s a call."""
        return self._transport.send(
            read_request(
                topic, offset=offset, start=start, max_messages=max_messages, wait_ms=wait_ms, packed=self._packed
            )
        )

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries; a text that is no receipt is `unknown`."""
        return self._settle(receipts, ack_request, foreign=AckStatus.UNKNOWN)

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back; a text that is no receipt is `stale`. A reason is cut to 1,024 characters."""
        reason = reason[: limits.REASON_CHARS_MAX] if reason else None
        request = partial(nack_request, delay_ms=delay_ms, reason=reason, counts=counts)
        return self._settle(receipts, request, foreign=NackStatus.STALE)

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Keep deliveries invisible for `invisible_ms` from now."""
        request = partial(extend_request, invisible_ms=invisible_ms, begun=begun)
        return self._settle(receipts, request, foreign=ExtendStatus.STALE)

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel scheduled messages; `canceled` means never delivered."""
        for message_id in message_ids:
            check_message_id(message_id)
        statuses: list[CancelStatus] = []
        for chunk in slices(message_ids):
            answered = self._transport.send(cancel_request(chunk))
            statuses += answered
        return statuses

    @property
    def admin(self) -> BrokerAdmin:
        """Groups, figures, dead letters."""
        return self._admin

    def inspect(self, topics: Sequence[str] = ()) -> Inspection:  # noqa: ARG002 - it is durable for every topic
        """Ask whether it can serve, and what this client may do. It has no setting that weakens a promise.

        Raises BrokerUnavailable if it cannot serve, NotAuthenticated if it does not know the token.
        """
        answer = self._transport.send(ready_request())
        if answer.roles == [] and self._has_token:  # a probe is answered without one, and every publish is refused
            raise NotAuthenticated(f"the broker at {self._transport.codec.address} does not know the token")
        return Inspection(
            product="outbox-mq", version=answer.version or "", now_ms=answer.now_ms,
            roles=None if answer.roles is None else tuple(answer.roles),
        )  # fmt: skip

    def close(self) -> None:
        """Send what was submitted, and let go of the connections; idempotent."""
        self._batcher.close()
        self._transport.close()
        self._admin.close()

    def _send_publish(self, messages: Sequence[Message], guard: Guard) -> list[PublishResult]:
        return self._transport.send(publish_request(messages, packed=self._packed), guard=guard)

    def _settle(
        self,
        receipts: Sequence[str],
        request: Callable[[str, Sequence[str]], Exchange[Any, list[Status]]],
        *,
        foreign: Status,
    ) -> list[Status]:
        """One status a receipt, each asked for where its group is."""
        statuses = [foreign] * len(receipts)
        for path, indexes in receipts_by_group(receipts):
            if len(indexes) == len(receipts):  # mostly
                return self._transport.send(request(path, receipts))
            answered = self._transport.send(request(path, [receipts[index] for index in indexes]))
            for index, status in zip(indexes, answered, strict=True):
                statuses[index] = status
        return statuses
