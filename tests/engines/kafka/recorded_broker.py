"""The broker of Kafka that records which messages were in doubt."""

from __future__ import annotations

from collections import Counter

from broker_adapter.kafka import KafkaPublisher
from broker_adapter.kafka.client_settings import URL_OPTIONS, client_settings
from broker_adapter.kafka.producer_pool import ProducerPool
from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from outbox_core.messages.broker_port import Broker
from tests.engines.recorded_publisher import RecordedPublisher


def recorded_broker(addresses: str, in_doubt: Counter[str], *, timeout_ms: int) -> Broker:
    """The broker of a kafka URL, with its publishes recorded."""
    url = BrokerUrl.parse(f"kafka://{addresses}", port=0, options=URL_OPTIONS)
    pool = ProducerPool(client_settings(url, timeout_ms=timeout_ms), timeout_ms=timeout_ms, place=url.addresses)
    return PublishOnlyBroker(RecordedPublisher(KafkaPublisher(pool), in_doubt), timeout_ms=timeout_ms)
