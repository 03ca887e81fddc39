"""Redis Streams behind the Broker port: the publish half, for one server or a cluster."""

from broker_adapter.redis.open_broker import open_broker

__all__ = ["open_broker"]
