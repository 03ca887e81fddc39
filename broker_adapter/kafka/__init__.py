"""Publishes to Apache Kafka through librdkafka: idempotent, acknowledged by all in-sync replicas."""

from __future__ import annotations

from functools import partial
from typing import Final

from broker_adapter.kafka.client_settings import URL_OPTIONS, KafkaServers, client_settings, producer_settings
from broker_adapter.kafka.kafka_publisher import KafkaPublisher
from broker_adapter.kafka.record_sender import KafkaRecordSender
from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from outbox_core.common.clock import SystemClock
from outbox_core.messages.broker_port import Broker

__all__ = ["KafkaPublisher", "open_broker"]

PORT_DEFAULT: Final = 9092


def open_broker(
    url: str, *, timeout_ms: int | None = None, token: str | None = None, ca_file: str | None = None
) -> Broker:
    """A Broker that publishes to Kafka: `kafka://user:password@host:9092,host:9092?security=sasl_ssl&sasl=PLAIN`.

    `timeout_ms` bounds each publish and goes before the URL's, as `ca_file` does; `token` is the bearer token of
    OAUTHBEARER. Does no I/O. Raises ConfigurationError for options that contradict each other.
    """
    parts = BrokerUrl.parse(url, port=PORT_DEFAULT, options=URL_OPTIONS)
    bound_ms = parts.timeout_ms if timeout_ms is None else timeout_ms
    settings = client_settings(parts, timeout_ms=bound_ms, token=token, ca_file=ca_file)
    of_producers, clock = producer_settings(settings, timeout_ms=bound_ms), SystemClock()
    pool = ClientPool(partial(KafkaRecordSender, of_producers, addresses=parts.addresses, clock=clock))
    publisher = KafkaPublisher(pool, KafkaServers(settings, parts.addresses), clock=clock)
    return PublishOnlyBroker(publisher, strict=parts.is_strict, timeout_ms=bound_ms)
