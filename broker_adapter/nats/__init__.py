"""NATS JetStream behind the Broker port: publishes to the streams that a team already has."""

from broker_adapter.nats.open_broker import open_broker

__all__ = ["open_broker"]
