"""Outbox MQ, the producer's and consumer's SDK: publish in the business transaction, handle each message once."""

from messaging import Broker, Delivery, Message, connect
from messaging.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    ConfigurationError,
    DatabaseUnavailable,
    DuplicateMessageId,
    InvalidMessage,
    NoTransaction,
    NotSupported,
    OutboxError,
    SchemaMissing,
    TransactionDoomed,
)
from outbox.box import Outbox
from outbox.consumer import Consumer, RetryLater, consumer, run_consumers
from outbox.relay import RelayPolicy
from outbox.sender import SenderLimits
from outbox.transactional import Propagation

__all__ = [
    "Broker",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "ConfigurationError",
    "Consumer",
    "DatabaseUnavailable",
    "Delivery",
    "DuplicateMessageId",
    "InvalidMessage",
    "Message",
    "NoTransaction",
    "NotSupported",
    "Outbox",
    "OutboxError",
    "Propagation",
    "RelayPolicy",
    "RetryLater",
    "SchemaMissing",
    "SenderLimits",
    "TransactionDoomed",
    "connect",
    "consumer",
    "run_consumers",
]
