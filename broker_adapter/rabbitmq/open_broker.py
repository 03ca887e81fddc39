"""open_broker(): from a URL of RabbitMQ to a Broker that publishes to it."""

from __future__ import annotations

import ssl
from typing import Final

import pika

from broker_adapter.publishing.admin_http import admin_url, check_login_encrypted
from broker_adapter.publishing.broker_url import BrokerUrl, tls_context
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from broker_adapter.rabbitmq.connection import ProcessConnection
from broker_adapter.rabbitmq.durability_inspection import Inspector, ManagementApi
from broker_adapter.rabbitmq.rabbitmq_publisher import RabbitMqPublisher
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import Broker

PORT: Final = 5672
PORT_TLS: Final = 5671
PORT_MANAGEMENT: Final = 15672
TLS_SCHEMES: Final = frozenset({"rabbitmqs"})
OPTIONS: Final = frozenset({"exchange", "management"})
GUEST: Final = "guest"
"""User and password of a server that nobody has changed; it takes them from its own machine alone."""
HEARTBEAT_SECONDS: Final = 60
BLOCKED_SECONDS_MAX: Final = 1.0
"""How long a resource alarm of the server may last before what waits for a confirm is given up."""


def open_broker(
    url: str, *, timeout_ms: int | None = None, token: str | None = None, ca_file: str | None = None
) -> Broker:
    """A Broker at `rabbitmq://user:password@host:5672,host2:5672/vhost?exchange=shop`; `rabbitmqs://` is with TLS.

    `timeout_ms` bounds each call and goes before the URL's, as `ca_file` does. Does no I/O on the network. Raises
    ConfigurationError; for a token, too, since RabbitMQ takes an OAuth token as the password.
    """
    if token is not None:
        raise ConfigurationError("RabbitMQ takes a token as the password: put it into the URL, or ?password_file=")
    parsed = BrokerUrl.parse(url, port=PORT_TLS if url.startswith("rabbitmqs:") else PORT, options=OPTIONS)
    bound_ms = parsed.timeout_ms if timeout_ms is None else timeout_ms
    tls = tls_context(parsed, tls_schemes=TLS_SCHEMES, ca_file=ca_file)
    user, password = parsed.user or GUEST, parsed.password or GUEST
    vhost, exchange = parsed.path or "/", parsed.options.get("exchange", "")
    servers = _servers(parsed, vhost=vhost, login=(user, password), tls=tls, timeout_s=bound_ms / 1000)
    api = None
    if "management" in parsed.options:
        address = admin_url(parsed.options["management"], option="management", port=PORT_MANAGEMENT)
        if tls is not None:
            check_login_encrypted(address, option="management")
        api = ManagementApi(
            address, vhost=vhost, login=(user, password), ca_file=ca_file or parsed.file("ca_file"),
            needs_tls=tls is not None,
        )  # fmt: skip
    publisher = RabbitMqPublisher(
        ProcessConnection(servers),
        Inspector(exchange=exchange, api=api),
        exchange=exchange,
        addresses=parsed.addresses,
    )
    return PublishOnlyBroker(publisher, strict=parsed.is_strict, timeout_ms=bound_ms)


def _servers(
    url: BrokerUrl, *, vhost: str, login: tuple[str, str], tls: ssl.SSLContext | None, timeout_s: float
) -> list[pika.ConnectionParameters]:
    """Returns the client's parameters for each host. Together they share the connect time-out."""
    attempt_s = timeout_s / len(url.hosts)
    return [
        pika.ConnectionParameters(
            host=host,
            port=port,
            virtual_host=vhost,
            credentials=pika.PlainCredentials(*login, erase_on_connect=False),
            ssl_options=None if tls is None else pika.SSLOptions(tls, server_hostname=host),
            heartbeat=HEARTBEAT_SECONDS,
            blocked_connection_timeout=BLOCKED_SECONDS_MAX,
            socket_timeout=attempt_s,
            stack_timeout=attempt_s,
            client_properties={"connection_name": "outbox-mq"},
        )
        for host, port in url.hosts
    ]
