"""Outbox MQ, the SDK of producers and consumers: publish in the business transaction, handle each message once."""

from outbox.cloudevents import CloudEvents
from outbox.consumers.consumer_decorator import Consumer, NotTried, RetryLater, consumer, run_consumers, still_held
from outbox.consumers.consumer_runner import ConsumerRunner
from outbox.consumers.handler import Outcome
from outbox.consumers.standalone_inbox import Inbox
from outbox.delivery.relay import RelayPolicy
from outbox.producer.outbox import Outbox
from outbox.producer.sender import SenderLimits
from outbox.producer.transactional import Propagation
from outbox.telemetry import Telemetry
from outbox_core import Broker, Delivery, Message, connect
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import (
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

__all__ = [
    "Backoff",
    "Broker",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "CloudEvents",
    "ConfigurationError",
    "Consumer",
    "ConsumerRunner",
    "DatabaseUnavailable",
    "Delivery",
    "DuplicateMessageId",
    "Inbox",
    "InvalidMessage",
    "Message",
    "NoTransaction",
    "NotSupported",
    "NotTried",
    "Outbox",
    "OutboxError",
    "Outcome",
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
