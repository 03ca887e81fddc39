"""Publishes to Apache RocketMQ through a proxy, over gRPC: each message durable before its answer.

Without RocketMQ's Python SDK, which sends one message a request, and after a restart of the proxy gets nothing through
for minutes. The proxy is a hop more than its Java client takes, over the remoting protocol: stubs that do nothing else
reach 0.6 of that client's rate, and this adapter 0.96 of the stubs. Delay would end at a day, and a cancel needs a
handle that only the sending process has, so neither is declared.
"""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from broker_adapter.publishing.broker_url import BrokerUrl, host_and_port, tls_context
from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from broker_adapter.rocketmq.durability_inspection import BrokerSettings
from broker_adapter.rocketmq.proxy_connection import ProxyConnection, ProxyServers
from broker_adapter.rocketmq.rocketmq_publisher import RocketMqPublisher
from broker_adapter.rocketmq.signature import Credentials
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import Broker

__all__ = ["RocketMqPublisher", "open_broker"]

PORT_DEFAULT: Final = 8081
NAME_SERVER_PORT: Final = 9876
TLS_SCHEMES: Final = frozenset({"rocketmqs"})
URL_OPTIONS: Final = frozenset({"nameserver"})


def open_broker(
    url: str, *, timeout_ms: int | None = None, token: str | None = None, ca_file: str | None = None
) -> Broker:
    """A Broker at `rocketmq://access-key:secret@proxy:8081,proxy2:8081?nameserver=ns:9876`; `rocketmqs://` is with TLS.

    `timeout_ms` bounds each publish and goes before the URL's, as `ca_file` does. Does no I/O on the network. Raises
    ConfigurationError for options that contradict each other, and for a token, which RocketMQ does not know.
    """
    if token is not None:
        raise ConfigurationError("RocketMQ knows no tokens: put access key and secret into the URL, or ?password_file=")
    parts = BrokerUrl.parse(url, port=PORT_DEFAULT, options=URL_OPTIONS)
    if parts.path:
        raise ConfigurationError(f"a rocketmq URL has no path, and this one has /{parts.path}: messages name topics")
    if (parts.user is None) != (parts.password is None):
        raise ConfigurationError("a login is an access key and a secret: rocketmq://access-key:secret@proxy:8081")
    login = None if parts.user is None or parts.password is None else Credentials(parts.user, parts.password)
    names = parts.options.get("nameserver", "")
    name_servers = [host_and_port(address, NAME_SERVER_PORT) for address in names.split(",") if address]
    servers = ProxyServers(
        hosts=parts.hosts, addresses=parts.addresses, login=login, credentials=_credentials(parts, ca_file)
    )
    clock = SystemClock()
    pool = ClientPool(partial(ProxyConnection, servers, clock=clock))
    publisher = RocketMqPublisher(
        pool, BrokerSettings(name_servers, login=login), addresses=parts.addresses, clock=clock
    )
    bound_ms = parts.timeout_ms if timeout_ms is None else timeout_ms
    return PublishOnlyBroker(publisher, strict=parts.is_strict, timeout_ms=bound_ms)


def _credentials(url: BrokerUrl, ca_file: str | None) -> grpc.ChannelCredentials | None:
    """Returns gRPC's credentials, made of files, by default of the authorities that this machine trusts."""
    if tls_context(url, tls_schemes=TLS_SCHEMES, ca_file=ca_file) is None:  # which checks the files, too
        return None
    authorities = ca_file or url.file("ca_file") or ssl.get_default_verify_paths().cafile
    contents = [None if name is None else Path(name).read_bytes() for name in _files(url, authorities)]
    return grpc.ssl_channel_credentials(*contents)


def _files(url: BrokerUrl, authorities: str | None) -> tuple[str | None, ...]:
    certificate = url.file("cert_file")
    return authorities, url.file("key_file") or certificate, certificate
