"""RabbitMQ behind the Broker port: the publish half, by AMQP 0.9.1."""

from broker_adapter.rabbitmq.open_broker import open_broker

__all__ = ["open_broker"]
