"""The broker of RocketMQ that records which messages were in doubt."""

from __future__ import annotations

from collections import Counter
from functools import partial

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from broker_adapter.rocketmq import RocketMqPublisher
from broker_adapter.rocketmq.broker_settings import BrokerSettings
from broker_adapter.rocketmq.proxy_channel import ProxyServers
from broker_adapter.rocketmq.proxy_connection import ProxyConnection
from broker_adapter.rocketmq.signature import Credentials
from outbox_core.common.clock import SystemClock
from outbox_core.messages.broker_port import Broker
from tests.engines.recorded_publisher import RecordedPublisher


def recorded_broker(url: str, in_doubt: Counter[str], *, timeout_ms: int) -> Broker:
    """The broker of a rocketmq URL with a login, with its publishes recorded. It does not ask how brokers are set."""
    parts = BrokerUrl.parse(url, port=0, options=("nameserver",))
    login = Credentials(parts.user or "", parts.password or "")
    servers = ProxyServers(hosts=parts.hosts, place=parts.addresses, login=login, credentials=None)
    clock = SystemClock()
    pool = ClientPool(partial(ProxyConnection, servers, clock=clock))
    publisher = RocketMqPublisher(pool, BrokerSettings((), login=login), place=servers.place, clock=clock)
    return PublishOnlyBroker(RecordedPublisher(publisher, in_doubt), timeout_ms=timeout_ms)
