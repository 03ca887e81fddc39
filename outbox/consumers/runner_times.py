"""The waiting times of a ConsumerRunner. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox.consumers.ack_sender import ACK_LINGER_MS
from outbox.consumers.broadcast_reader import RETRIES
from outbox_core.common.backoff import Backoff

PULL_WAIT_MS: Final = 5_000
ACK_DELAY_MS: Final = 100
PAUSES: Final = Backoff(initial_ms=200, multiplier=2, max_ms=30_000, jitter=0.5)
"""The backoff between pulls while the broker or the inbox's database is unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTimes:
    """The waiting times of normal operation, and between the attempts at a broadcast message.

    A pull waits `pull_wait_ms` at the broker for messages. A handled message waits `ack_delay_ms`, at most, for
    others to be acknowledged with it, while its batch is being handled; if messages come faster than the broker
    responds to acks, an ack lingers until nothing was added for `ack_linger_ms`.
    """

    pull_wait_ms: int = PULL_WAIT_MS
    ack_delay_ms: int = ACK_DELAY_MS
    ack_linger_ms: int = ACK_LINGER_MS
    broadcast_retries: Backoff = RETRIES
