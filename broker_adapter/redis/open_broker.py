"""open_broker: from a URL to a Broker on Redis: streams that are published to, or timers that are pulled, too."""

from __future__ import annotations

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from broker_adapter.redis.connections import opener
from broker_adapter.redis.durability_inspection import MasterSettings
from broker_adapter.redis.redis_options import URL_OPTIONS, RedisOptions, port_of
from broker_adapter.redis.redis_publisher import RedisPublisher, StreamStore
from broker_adapter.redis.script_sender import ScriptSender
from broker_adapter.redis.timers import open_timers
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import Broker


def open_broker(
    url: str,
    *,
    timeout_ms: int | None = None,
    token: str | None = None,
    ca_file: str | None = None,
    clock: Clock | None = None,
) -> Broker:
    """A Broker for redis://, redis+cluster://, redis+sentinel:// or over TLS rediss://, rediss+cluster://,
    rediss+sentinel://; does no I/O until it is used.

    `timeout_ms` bounds each call and wins over the URL's, `ca_file` likewise. Raises ConfigurationError; for a token,
    too, since Redis knows users and passwords.
    """
    if token is not None:
        raise ConfigurationError("Redis has no tokens: put user and password into the URL, or ?password_file=")
    parsed = BrokerUrl.parse(url, port=port_of(url), options=URL_OPTIONS)
    bound_ms = parsed.timeout_ms if timeout_ms is None else timeout_ms
    options, clock = RedisOptions.of_url(parsed), clock or SystemClock()
    sender = ScriptSender(opener(parsed, timeout_ms=bound_ms, ca_file=ca_file), addresses=parsed.addresses)
    if options.has_timers:
        return open_timers(sender, options, strict=parsed.is_strict, timeout_ms=bound_ms, clock=clock)
    publisher = RedisPublisher(
        sender, StreamStore(options), MasterSettings(sender, options, clock=clock), options, clock=clock
    )
    return PublishOnlyBroker(publisher, strict=parsed.is_strict, timeout_ms=bound_ms)
