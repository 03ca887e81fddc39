"""HTTP client of a node for the shards of another one. One request a call, never repeated: the sender repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import urllib3

from outbox_broker.cluster import peer_protocol as peer
from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.owned_shard_operations import Identity, Wanted
from outbox_core.common.deadline_connections import set_deadlines
from outbox_core.common.errors import DECODE_ERRORS, BrokerRefused, BrokerUnavailable
from outbox_core.messages.message import CancelStatus, PublishResult, Record, encode_packed
from outbox_core.protocol.decoder_cache import json_decoder, msgpack_decoder
from outbox_core.protocol.problem import ProblemAnswer
from outbox_core.protocol.wire import MSGPACK_TYPE, RefusedAnswer, RefusedMessage, RetryAnswer, RetryOutcome

Answer = TypeVar("Answer", bound=msgspec.Struct)
_ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How a node reaches the others."""

    token: str | None = None
    timeout_ms: int = 8_000
    """For all of a request, from its connection to the last byte of its answer."""
    connections_max: int = 16
    tls: bool = False
    """Whether the others are reached by HTTPS alone: their URLs are read from ZooKeeper, which anybody may write."""
    ca_file: Path | None = None


class PeerClient:
    """Connections to all other nodes. Thread-safe.

    Raises NotOwner if the node does not serve a shard now, BrokerUnavailable if it does not answer: a write may have
    happened then.
    """

    def __init__(self, options: PeerOptions) -> None:
        self._options = options
        self._pools = urllib3.PoolManager(
            maxsize=options.connections_max,
            retries=False,
            timeout=urllib3.Timeout(total=options.timeout_ms / 1000),
            ca_certs=None if options.ca_file is None else str(options.ca_file),
        )
        set_deadlines(self._pools)

    def publish(self, url: str, batch: Sequence[tuple[str, Record]]) -> list[PublishResult]:
        """See OwnedShardOperations.publish."""
        request = peer.PeerPublish(list(batch))  # type: ignore[arg-type]  # any record is encoded so
        return [one.result() for one in self._send(url, peer.PUBLISH, request, peer.PeerResults).results]

    def cancel(
        self, url: str, ids: Sequence[tuple[str, str]], *, topics: Sequence[str] | None
    ) -> list[CancelStatus]:  # fmt: skip
        """See OwnedShardOperations.cancel."""
        request = peer.PeerCancel(list(ids), None if topics is None else list(topics))
        return self._send(url, peer.CANCEL, request, peer.PeerStatuses).statuses

    def find(self, url: str, wanted: Sequence[tuple[str, Wanted]]) -> list[Mapping[str, object] | None]:
        """See OwnedShardOperations.find."""
        found = self._send(url, peer.FIND, peer.PeerFind(list(wanted)), peer.PeerFound).found
        return [None if one is None else {"id": one[0], "topic": one[1], "deliver_at_ms": one[2]} for one in found]

    def known(self, url: str, messages: Sequence[tuple[str, Identity]]) -> list[bool]:
        """See OwnedShardOperations.known."""
        return self._send(url, peer.KNOWN, peer.PeerIdentities(list(messages)), peer.PeerKnown).known

    def scheduled(
        self, url: str, shards: Sequence[str], topic: str | None, *, from_ms: int | None, to_ms: int | None, bucket: str
    ) -> list[tuple[int, int]]:  # fmt: skip
        """See OwnedShardOperations.scheduled."""
        request = peer.PeerCounts(list(shards), topic, from_ms, to_ms, bucket)
        return self._send(url, peer.COUNTS, request, peer.PeerHistogram).counts

    def refused(self, url: str, shards: Sequence[str], *, topics: Sequence[str] | None) -> list[RefusedMessage]:
        """See OwnedShardOperations.refused."""
        request = peer.PeerRefused(list(shards), None if topics is None else list(topics))
        return self._send(url, peer.REFUSED, request, RefusedAnswer).messages

    def retry_refused(
        self, url: str, ids: Sequence[tuple[str, str]], *, topics: Sequence[str] | None
    ) -> list[RetryOutcome]:  # fmt: skip
        """See OwnedShardOperations.retry_refused."""
        request = peer.PeerCancel(list(ids), None if topics is None else list(topics))
        return self._send(url, peer.RETRY, request, RetryAnswer).results

    def topic_counts(self, url: str, shards: Sequence[str]) -> dict[str, int]:
        """See OwnedShardOperations.topic_counts."""
        return self._send(url, peer.TOPICS, peer.PeerTopics(list(shards)), peer.PeerTopicCounts).topics

    def close(self) -> None:
        """Close the connections."""
        self._pools.clear()

    def _send(self, url: str, path: str, request: msgspec.Struct, shape: type[Answer]) -> Answer:
        # A URL of another scheme would take the token and the bodies out in clear.
        if self._options.tls and not url.startswith("https://"):
            raise BrokerUnavailable(
                f"this node has TLS, and sends nothing to a node at {url}: give all nodes --tls-cert and --tls-key"
            )
        headers = {"content-type": MSGPACK_TYPE, "accept": MSGPACK_TYPE}
        if self._options.token is not None:
            headers["authorization"] = f"Bearer {self._options.token}"
        body = encode_packed(request)
        try:
            response = self._pools.request("POST", f"{url}{path}", body=body, headers=headers, preload_content=False)
            try:
                answer = response.read(_ANSWER_BYTES_MAX + 1)
            finally:
                response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise BrokerUnavailable(f"the node at {url} does not answer: {type(error).__name__}") from error
        if response.status != 200:
            raise _refusal(url, response.status, answer)
        try:
            return msgpack_decoder(shape).decode(answer)
        except DECODE_ERRORS as error:
            raise BrokerUnavailable(f"the node at {url} answers in another protocol: upgrade it") from error


def _refusal(url: str, status: int, answer: bytes) -> BrokerRefused | BrokerUnavailable:
    try:
        detail = json_decoder(ProblemAnswer).decode(answer).detail
    except DECODE_ERRORS:
        detail = f"status {status}"
    if status in {401, 403}:
        return BrokerUnavailable(
            f"the node at {url} refuses this node's token: give all nodes the same peer_token_file in [cluster]"
        )
    if status in {404, 405}:
        return BrokerUnavailable(f"the node at {url} does not know a request of this node: upgrade it")
    if status == 429 or status >= 500:
        return NotOwner(f"the node at {url}: {detail}")
    return BrokerRefused(f"the node at {url}: {detail}")
