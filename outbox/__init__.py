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
from outbox.cloudevents import CloudEvents
from outbox.consumer import Consumer, NotTried, RetryLater, consumer, run_consumers, still_held
from outbox.relay import RelayPolicy
from outbox.sender import SenderLimits
from outbox.telemetry import Telemetry
from outbox.transactional import Propagation

__all__ = [
    "Broker",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "CloudEvents",
    "ConfigurationError",
    "Consumer",
    "DatabaseUnavailable",
    "Delivery",
    "DuplicateMessageId",
    "InvalidMessage",
    "Message",
    "NoTransaction",
    "NotSupported",
    "NotTried",
    "Outbox",
    "OutboxError",
    "Propagation",
    "RelayPolicy",
    "RetryLater",
    "SchemaMissing",
    "SenderLimits",
    "Telemetry",
    "TransactionDoomed",
    "connect",
    "consumer",
    "run_consumers",
    "still_held",
]
