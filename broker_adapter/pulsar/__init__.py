"""Publishes to Apache Pulsar through its C++ client: each message persistent, and confirmed by a receipt of its own."""

from __future__ import annotations

from functools import partial
from typing import Final

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from broker_adapter.pulsar.client_settings import TLS_SCHEME, URL_OPTIONS, ClientSettings
from broker_adapter.pulsar.durability_inspection import AdminApi
from broker_adapter.pulsar.open_client import end_clients_at_exit
from broker_adapter.pulsar.pulsar_publisher import PulsarPublisher
from broker_adapter.pulsar.record_sender import PulsarRecordSender
from outbox_core.common.clock import SystemClock
from outbox_core.messages.broker_port import Broker

__all__ = ["PulsarPublisher", "open_broker"]

PORT_DEFAULT: Final = 6650
PORT_TLS_DEFAULT: Final = 6651


def open_broker(
    url: str, *, timeout_ms: int | None = None, token: str | None = None, ca_file: str | None = None
) -> Broker:
    """A Broker that publishes to Pulsar: `pulsar://host:6650,host:6650/tenant/namespace?admin=http://host:8080`.

    `pulsar+ssl://` is with TLS. A user and a password are Pulsar's basic login; a password without a user is a token,
    as `token` is, which goes before it. `timeout_ms` bounds each publish and goes before the URL's, as `ca_file` does.
    Does no I/O. Raises ConfigurationError for options that contradict each other.
    """
    port = PORT_TLS_DEFAULT if url.startswith(f"{TLS_SCHEME}:") else PORT_DEFAULT
    parts = BrokerUrl.parse(url, port=port, options=URL_OPTIONS)
    bound_ms = parts.timeout_ms if timeout_ms is None else timeout_ms
    settings = ClientSettings.of(parts, timeout_ms=bound_ms, token=token, ca_file=ca_file)
    admin = None if settings.admin_url is None else AdminApi(settings)
    clock = SystemClock()
    end_clients_at_exit()
    pool = ClientPool(partial(PulsarRecordSender, settings, clock=clock))
    publisher = PulsarPublisher(pool, admin, settings=settings, clock=clock)
    return PublishOnlyBroker(publisher, strict=parts.is_strict, timeout_ms=bound_ms)
