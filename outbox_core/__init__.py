"""Types that all packages share: messages, the Broker port, errors, clocks. No I/O; imports no package above it."""

from outbox_core.common.clock import Clock, ManualClock, SystemClock
from outbox_core.messages.broker_port import Broker, BrokerAdmin
from outbox_core.messages.connect import connect
from outbox_core.messages.message import (
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
    Record,
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
    "Record",
    "SystemClock",
    "connect",
]
