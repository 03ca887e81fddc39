"""What the demo needs of another broker's own client: topics of the run, deliveries, acknowledgements, the lag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import split_url

REDELIVERED_AFTER_MS: Final = 5_000
"""What a consumer has not acknowledged by then is delivered again."""
MESSAGES_MAX: Final = 100
WAIT_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message as the plain client has read it; `receipt` is what the client acknowledges it by."""

    id: str
    topic: str
    body: bytes
    receipt: Any


class ForeignClient(Protocol):
    """A plain client of one engine, on the topics of one run. Not thread-safe. Raises what its library does."""

    def make_topics(self) -> None:
        """Make the run's topics with their consumer groups, as plan.GROUPS has them."""

    def deliveries(self, group: str) -> Iterator[Received]:
        """Read a group's messages for ever: new ones, and those that a dead consumer has not acknowledged."""

    def acknowledge(self, message: Received) -> None:
        """Settle a message: its group is not given it again."""

    def unsettled(self) -> int:
        """How many messages the groups have not acknowledged, read or not."""

    def remove_topics(self) -> None:
        """Remove what make_topics() made."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, slots=True)
class ForeignEngine:
    """Of a URL's scheme: the default port, the module with the client, and what a prefix ends with."""

    port: int
    client: str
    prefix_end: str


ENGINES: Final[Mapping[str, ForeignEngine]] = {
    "redis": ForeignEngine(6379, "outbox_demo.redis_streams:RedisStreams", ":"),
    "rediss": ForeignEngine(6379, "outbox_demo.redis_streams:RedisStreams", ":"),
    "nats": ForeignEngine(4222, "outbox_demo.jetstream:JetStream", ""),
    "natss": ForeignEngine(4222, "outbox_demo.jetstream:JetStream", ""),
}
_OPTIONS: Final = {"wait", "window_ms", "prefix", "delay", "inbox_prefix", "creds_file", "nkey_file"}


def engine_of(url: str) -> ForeignEngine:
    """The engine that a URL names. Raises ConfigurationError for one that the demo has no client for."""
    scheme = split_url(url).scheme
    if scheme not in ENGINES:
        raise ConfigurationError(f"the demo runs on the brokers {', '.join(ENGINES)} and on its own, not on {scheme!r}")
    return ENGINES[scheme]


def open_client(url: str) -> ForeignClient:
    """The plain client for a broker URL whose `prefix` is the run's."""
    engine = engine_of(url)
    module, _, name = engine.client.partition(":")
    client: ForeignClient = getattr(import_module(module), name)(
        BrokerUrl.parse(url, port=engine.port, options=_OPTIONS)
    )
    return client
