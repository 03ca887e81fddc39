"""The demo's port to another broker's own client: topics of the run, deliveries, acknowledgements, the lag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Final, Protocol

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import split_url
from outbox_demo.plan import RunTopics

REDELIVERED_AFTER_MS: Final = 5_000
"""What a consumer has not acknowledged by then is delivered again."""
MESSAGES_MAX: Final = 100
WAIT_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMessage:
    """A message as the plain client has read it; `receipt` is what the client acknowledges it by."""

    id: str
    topic: str
    """Its full name."""
    body: bytes
    receipt: Any


class ForeignClient(Protocol):
    """A plain client of one engine, on the topics of one run. Not thread-safe. Raises what its library does."""

    def make_topics(self) -> None:
        """Make the run's topics with their consumer groups."""

    def deliveries(self, group: str) -> Iterator[ReceivedMessage]:
        """Read a group's messages for ever: new ones, and those that a dead consumer has not acknowledged."""

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Settle a message: its group is not given it again."""

    def unsettled(self) -> int:
        """Returns how many messages the groups have not acknowledged, as far as the engine shows them: unread ones, and
        of some engines those that were read, too.
        """

    def remove_topics(self) -> None:
        """Remove what make_topics() made."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEngine:
    """An engine's facts for the demo, besides its plain client."""

    port: int
    """The default one."""
    client: str
    """`module:class` of the ForeignClient, which takes the URL and the run's topics."""
    options: frozenset[str] = frozenset()
    """What the URL of its adapter may say."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Options that the demo sets where the URL does not."""


_REDIS: Final = ForeignEngine(
    port=6379, client="outbox_demo.redis_streams:RedisStreams", options=frozenset({"prefix", "wait", "window_ms"})
)
_NATS: Final = ForeignEngine(
    port=4222, client="outbox_demo.jetstream:JetStream",
    options=frozenset({"prefix", "inbox_prefix", "creds_file", "nkey_file"}),
)  # fmt: skip
_KAFKA: Final = ForeignEngine(
    port=9092, client="outbox_demo.kafka_topics:KafkaTopics", options=frozenset({"security", "sasl"})
)
_RABBITMQ: Final = ForeignEngine(
    port=5672, client="outbox_demo.rabbitmq_queues:RabbitMqQueues", options=frozenset({"exchange", "management"}),
    added={"exchange": "amq.direct"},  # the default exchange has one queue a topic, and so one group
)  # fmt: skip
_PULSAR: Final = ForeignEngine(port=6650, client="outbox_demo.pulsar_topics:PulsarTopics", options=frozenset({"admin"}))
_ROCKETMQ: Final = ForeignEngine(
    port=8081, client="outbox_demo.rocketmq_topics:RocketMqTopics", options=frozenset({"nameserver"})
)
_OWN: Final = ForeignEngine(port=7788, client="outbox_demo.own_topics:OwnTopics")
ENGINES: Final[Mapping[str, ForeignEngine]] = {
    "http": _OWN,
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+cluster": _REDIS,
    "rediss+cluster": _REDIS,
    "nats": _NATS,
    "natss": _NATS,
    "kafka": _KAFKA,
    "rabbitmq": _RABBITMQ,
    "rabbitmqs": replace(_RABBITMQ, port=5671),
    "pulsar": _PULSAR,
    "pulsar+ssl": replace(_PULSAR, port=6651),
    "rocketmq": _ROCKETMQ,
    "rocketmqs": _ROCKETMQ,
}


def engine_of(url: str) -> ForeignEngine:
    """The engine that a URL names. Raises ConfigurationError for one that the demo has no client for."""
    scheme = split_url(url).scheme
    if scheme not in ENGINES:
        raise ConfigurationError(f"the demo runs on the brokers {', '.join(ENGINES)} and on its own, not on {scheme!r}")
    return ENGINES[scheme]


def open_client(url: str, topics: RunTopics) -> ForeignClient:
    """The plain client for a broker URL, on the topics of a run."""
    engine = engine_of(url)
    module, _, name = engine.client.partition(":")
    parsed = BrokerUrl.parse(url, port=engine.port, options=engine.options | {"delay"})
    client: ForeignClient = getattr(import_module(module), name)(parsed, topics)
    return client
