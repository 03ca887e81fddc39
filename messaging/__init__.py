"""The words that all rooms share: messages, the Broker port, errors, time. No I/O, and no room above is known here."""

from messaging.broker import Broker, BrokerAdmin
from messaging.clock import Clock, ManualClock, SystemClock
from messaging.connecting import connect
from messaging.message import (
    AckStatus,
    CancelStatus,
    DeadLetter,
    Delivery,
    ExtendStatus,
    GroupConfig,
    Message,
    NackStatus,
    PublishResult,
    PublishStatus,
)

__all__ = [
    "AckStatus",
    "Broker",
    "BrokerAdmin",
    "CancelStatus",
    "Clock",
    "DeadLetter",
    "Delivery",
    "ExtendStatus",
    "GroupConfig",
    "ManualClock",
    "Message",
    "NackStatus",
    "PublishResult",
    "PublishStatus",
    "SystemClock",
    "connect",
]
